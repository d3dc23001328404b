# SPDX-License-Identifier: Apache-2.0
"""Scores of a model beside the baselines: on shapes, on held-out rings, in the ablation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from apusmog_core import baselines, metrics

RANGE_BINS = (0, 15, 30, 45)  # metres
SURFACE_ROUGHNESS = 0.1  # metres: rougher clusters are vegetation

Scores = dict[str, dict[str, float]]  # {group of cases: {score: mean over the cases}}


# --- ring hold-out -------------------------------------------------------------------------------


@dataclass(frozen=True)
class RingCase:
    """One object: its even rings are given, its odd rings held out."""

    points: np.ndarray  # (n, 3) the input, in the sensor's frame
    held: np.ndarray  # (h, 3)
    full: np.ndarray  # (n + h, 3)
    ring: np.ndarray  # (n,) of the input
    range: float  # of the mean of `full`, metres
    surface: bool  # vehicles, persons, walls, poles; otherwise vegetation
    frame: str
    cluster: int
    rays: metrics.MeasuredRays | None = None  # of the whole scan
    truth: Callable[[np.ndarray], np.ndarray] | None = None  # distance to the true surface

    @property
    def ratio(self) -> float:
        """Output points for each input point, so that as many come out as were measured."""
        return len(self.full) / len(self.points)


def ring_case(full: np.ndarray, ring: np.ndarray, surface: bool, **rest) -> RingCase | None:
    """The hold-out case of one object, or None where it has only even or only odd rings."""
    even = ring % 2 == 0
    if even.all() or not even.any():
        return None
    distance = float(np.linalg.norm(full.mean(axis=0)))
    return RingCase(full[even], full[~even], full, ring[even], distance, surface, **rest)


def ring_cases(scans: str | Path, holdout: str | Path) -> list[RingCase]:
    """The fixed clusters of `holdout`/FRAME.npz in the scans `scans`/FRAME.bin."""
    files = sorted(Path(holdout).glob("*.npz"))
    if not files:
        raise ValueError(f"{holdout}: no FRAME.npz in it; expected ring, index, offset, roughness")
    cases = []
    for file in files:
        scan = _velodyne(Path(scans), file.stem)
        fixed = np.load(file)
        if len(fixed["ring"]) != len(scan):
            raise ValueError(f"{file}: made for another scan ({len(scan)} points in this one)")
        rays = metrics.MeasuredRays(scan)
        for j, index in enumerate(np.split(fixed["index"], fixed["offset"][1:-1])):
            surface = bool(fixed["roughness"][j] < SURFACE_ROUGHNESS)
            ring = fixed["ring"][index].astype(int)
            case = ring_case(scan[index], ring, surface, frame=file.stem, cluster=j, rays=rays)
            cases += [case] if case else []
    return cases


def _velodyne(folder: Path, frame: str) -> np.ndarray:
    """All points of a KITTI scan, none removed: clusters are kept as indices into them."""
    for inner in ("", "velodyne_points/data", "velodyne"):
        file = folder / inner / f"{frame}.bin"
        if file.is_file():
            return np.fromfile(file, np.float32).reshape(-1, 4)[:, :3]
    raise ValueError(f"{folder}: no scan {frame}.bin in it")


def score_rings(cases: list[RingCase], predict: Callable[[RingCase], np.ndarray]) -> Scores:
    """Mean scores of a method by surface or vegetation and by range bin.

    `predict` gives the whole output for a case, measured points included.
    """
    return mean_rings(cases, [score_ring(case, predict(case)) for case in cases])


def score_ring(case: RingCase, output: np.ndarray) -> dict[str, float]:
    """Scores of one output (see `metrics.ring_scores`), and what the scan's rays say of it."""
    scores = metrics.ring_scores(output, case.held, case.full)
    if case.rays:
        scores["free_space"] = metrics.free_space_share(output, case.points, case.rays)
    if case.truth:
        scores["surface_error"] = float(case.truth(output).mean())
    return scores


def mean_rings(cases: list[RingCase], scores: list[dict[str, float]]) -> Scores:
    """Means by group; groups without a case are left out."""
    groups: dict[str, list[dict[str, float]]] = {}
    for kind, surface in (("surface", True), ("vegetation", False)):
        mine = [(c.range, s) for c, s in zip(cases, scores, strict=True) if c.surface == surface]
        groups[kind] = [s for _, s in mine]
        for low, high in zip(RANGE_BINS, (*RANGE_BINS[1:], np.inf), strict=True):
            name = f"{low}-{high} m" if np.isfinite(high) else f"over {low} m"
            groups[f"{kind} {name}"] = [s for distance, s in mine if low <= distance < high]
    return {name: {"clusters": len(g), **_means(g)} for name, g in groups.items() if g}


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    """Mean of each score over the rows that have it; NaN rows do not count."""
    return {
        key: float(np.nanmean([row[key] for row in rows]))
        if not all(np.isnan(row[key]) for row in rows)
        else float("nan")
        for key in rows[0]
    }


RING_BASELINES: dict[str, Callable[[RingCase], np.ndarray]] = {
    "nothing": lambda case: baselines.nothing(case.points),
    "range-interpolation": lambda case: baselines.range_interpolation(case.points, case.ring),
    "midpoint": lambda case: baselines.midpoint(case.points, len(case.full)),
}
