# SPDX-License-Identifier: Apache-2.0
"""Ring hold-out: some rings of a scan are given, the others say how good the answer is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from . import baselines, metrics
from .tables import Row, Scores, means

if TYPE_CHECKING:
    from ..data import Scan
    from ..upsampler import Upsampler

RANGE_BINS = (0, 15, 30, 45)  # metres
SCORED_POINTS = (64, 1_000_000)  # fewest and most of an object
SURFACE_ROUGHNESS = 0.1  # metres: rougher clusters are vegetation


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
    return {name: {"clusters": len(g), **means(g)} for name, g in groups.items() if g}


def roughness(points: np.ndarray, ring: np.ndarray) -> float:
    """Median absolute second difference of range along the rings of one object, metres."""
    azimuth = np.arctan2(points[:, 1], points[:, 0])
    distance = np.linalg.norm(points, axis=1)
    bends = [np.zeros(0)]
    for number in np.unique(ring):
        along = np.flatnonzero(ring == number)
        # from the object's own direction, so that the cut at pi is behind it
        turn = np.angle(np.exp(1j * (azimuth[along] - azimuth[0])))
        bends.append(np.abs(np.diff(distance[along[np.argsort(turn)]], 2)))
    bends = np.concatenate(bends)
    return float(np.median(bends)) if len(bends) else 0.0


def scans_with_rings(scans: str | Path, frames: int) -> Iterator[Scan]:
    """At most `frames` scans, spread over all there are; ValueError where one has no rings."""
    from tqdm import tqdm

    from ..data import open_scans

    opened = open_scans(scans)
    wanted = set(np.linspace(0, len(opened) - 1, min(frames, len(opened))).round().astype(int))
    bar = tqdm(opened, desc="finding objects", unit="scan", disable=None)
    for number, scan in enumerate(bar):
        if number not in wanted:
            continue
        if scan.ring is None:
            raise ValueError(
                f"{scans}: {scan.name} has no ring numbers, so none can be held out; record a "
                "field `ring`, or give a folder of KITTI's files"
            )
        yield scan


def found_cases(
    scans: str | Path,
    frames: int = 20,
    points: Sequence[int] = SCORED_POINTS,
    max_range: float = 45.0,
) -> list[RingCase]:
    """Objects that segmentation finds in at most `frames` scans, spread over all there are."""
    from ..segment import Segmenter

    segment = Segmenter()
    cases = []
    for scan in scans_with_rings(scans, frames):
        _, instance = segment(scan.points, scan.ring)
        rays = metrics.MeasuredRays(scan.points)
        for j in range(1, instance.max(initial=0) + 1):
            index = np.flatnonzero(instance == j)
            if not points[0] <= len(index) <= points[1]:
                continue
            cloud, ring = scan.points[index], scan.ring[index]
            surface = roughness(cloud, ring) < SURFACE_ROUGHNESS
            case = ring_case(cloud, ring, surface, frame=scan.name, cluster=j, rays=rays)
            cases += [case] if case and case.range < max_range else []
    if not cases:
        raise ValueError(f"{scans}: no object of {points[0]} points within {max_range:g} m found")
    return cases


def simulated_cases(
    frames: int,
    seed: int = 0,
    sensor: str = "HDL-64E",
    meshes: str | Path | None = None,
    points: Sequence[int] = SCORED_POINTS,
    max_range: float = 45.0,
) -> list[RingCase]:
    """Objects of simulated streets, one street a frame, whose true surface is known."""
    from .. import simulate

    device = simulate.Sensor.named(sensor)
    cases = []
    for frame in range(frames):
        scene = simulate.street(seed + frame, meshes)
        turn = simulate.scan(scene, device, seed=seed + frame)
        rays = metrics.MeasuredRays(turn.points)
        for instance, placed in enumerate(scene.objects, start=1):
            index = np.flatnonzero(turn.instance == instance)
            large = placed.name == "building"  # larger than any cluster
            if large or not points[0] <= len(index) <= points[1]:
                continue
            case = ring_case(
                turn.points[index],
                turn.ring[index],
                surface=placed.name not in ("bush", "tree"),
                frame=f"{frame:010d}",
                cluster=instance,
                rays=rays,
                truth=_distance_to(placed.world, (0, 0, device.height)),
            )
            cases += [case] if case and case.range < max_range else []
    return cases


def _distance_to(mesh, origin: Sequence[float]) -> Callable[[np.ndarray], np.ndarray]:
    """Distance to a simulated mesh, of points given in the frame of a sensor at `origin`."""
    import open3d as o3d

    scene = o3d.t.geometry.RaycastingScene()
    vertices = (mesh.vertices - np.asarray(origin)).astype(np.float32)
    scene.add_triangles(vertices, mesh.triangles.astype(np.uint32))
    return lambda points: metrics.distance_to_mesh(points, scene)


def upsample_rings(up: Upsampler, cases: list[RingCase]) -> list[np.ndarray]:
    """The model's output for each case: measured points first, as many as the sensor saw.

    The objects of a scan go together, as in a node.
    """
    results: list[np.ndarray | None] = [None] * len(cases)
    for frame in dict.fromkeys(case.frame for case in cases):
        index = [i for i, case in enumerate(cases) if case.frame == frame]
        clouds, ratios = [cases[i].points for i in index], [cases[i].ratio for i in index]
        dense = up.upsample_many(clouds, ratios, keep_measured=True, origin=np.zeros(3))
        for i, result in zip(index, dense, strict=True):
            results[i] = result
    return results


RING_BASELINES: dict[str, Callable[[RingCase], np.ndarray]] = {
    "nothing": lambda case: baselines.nothing(case.points),
    "range-interpolation": lambda case: baselines.range_interpolation(case.points, case.ring),
    "midpoint": lambda case: baselines.midpoint(case.points, len(case.full)),
}


def evaluate_rings(
    cases: list[RingCase], up: Upsampler | None = None, name: str = "model"
) -> list[Row]:
    """One row for each method and group of cases: baselines, `name`, and the sensor itself."""
    tables = {title: score_rings(cases, method) for title, method in RING_BASELINES.items()}
    if up:
        pairs = zip(cases, upsample_rings(up, cases), strict=True)
        tables[name] = mean_rings(cases, [score_ring(case, out) for case, out in pairs])
    tables["all rings"] = score_rings(cases, lambda case: case.full)  # what no method can beat
    groups = tables["nothing"]
    return [
        {"method": title, "group": group, **table[group]}
        for group in groups
        for title, table in tables.items()
    ]
