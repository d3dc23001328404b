# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning on unlabelled scans: rings are dropped, and what they saw is the answer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.spatial import cKDTree

from .. import weights
from ..compute import parse_device
from ..config import ModelConfig, TrainConfig
from ..data import Scan
from ..evaluation import rings
from ..evaluation.tables import Row, Scores
from ..model import ApuSmog
from ..segment import Segmenter
from ..sensor.grid import RayGrid, ray_grid, wrap
from ..settings import from_dict
from ..upsampler import Upsampler
from .loop import ray_batch, train
from .ray_samples import PROBE_REACH, PROBES, RaySample, RaySamples, azimuth_window, ray_sample

ORIGIN = np.zeros(3)  # scans are in the sensor's frame
RANGE = (3.0, 60.0)  # metres: objects to learn from
SCORED_RANGE = 45.0  # metres
FEWEST = 8  # points of a training sample
STRIDES = (2, 2, 2, 3)  # every how many rings are kept
DRAWS = 2  # samples of each object, which differ in the rings kept
BATCH = 32  # objects


@dataclass(frozen=True)
class Outcome:
    """Ring hold-out scores on scans not trained on, and whether the weights were written."""

    rows: list[Row]  # one for each network and group of objects
    written: bool


def finetune(
    scans: str | Path,
    start: str | Path,
    out: str | Path,
    force: bool = False,
    steps: int = 400,
    rate: float = 1e-4,
    frames: int = 100,
    device: str = "auto",
    seed: int = 0,
) -> Outcome:
    """Continue training the weights `start` on scans that have ring numbers, and write `out`.

    At most `frames` scans are used, spread over all there are; the last fifth of them is held out.
    Where the score on it gets worse than before, or than that of the file to be overwritten,
    nothing is written unless `force` says so.
    """
    stored, out = weights.read(start), Path(out)
    config = TrainConfig(
        model=from_dict(ModelConfig, stored["model"]),
        steps=steps,
        batch=BATCH,
        rate=rate,
        rate_end=rate / 100,
        warmup=steps // 10,
        device=device,
        seed=seed,
    )
    if config.network.domain != "sensor":
        raise ValueError(f"weights {str(start)!r} do not see rays: start from 'lidar'")
    if out.is_dir():
        raise ValueError(f"{out}: is a folder; name the weights file to write")
    rivals = {"before": start}
    if out.is_file() and not out.samefile(weights.find(start)):
        rivals[f"{out.name} now"] = out
    rivals = {name: weights.load_network(file) for name, file in rivals.items()}

    samples, cases = prepare(scans, frames, seed)
    tables = {name: score(network, cases, device) for name, network in rivals.items()}
    tuned = continue_training(config, start, samples)
    tables["after"] = score(tuned, cases, device)

    goals = {name: deciding_score(table) for name, table in tables.items()}
    written = force or goals["after"] >= max(goals.values())
    if written:
        weights.save(tuned, out, _card(stored, start, config, samples, goals))
    rows = [
        {"weights": name, "group": group, **table[group]}
        for group in tables["before"]
        for name, table in tables.items()
    ]
    return Outcome(rows, written)


def continue_training(config: TrainConfig, start: str | Path, samples: RaySamples) -> ApuSmog:
    """The network after training, rounded as it is stored."""
    with tempfile.TemporaryDirectory() as folder:
        config = replace(config, out=folder)
        file = train(
            config, start_from=start, source=lambda *place: ray_batch(samples, config, *place)
        )
        return weights.load_network(file)


def score(network: ApuSmog, cases: list[rings.RingCase], device: str) -> Scores:
    """Ring hold-out scores of a network."""
    dense = rings.upsample_rings(Upsampler(network, parse_device(device)), cases)
    scores = [rings.score_ring(case, out) for case, out in zip(cases, dense, strict=True)]
    return rings.mean_rings(cases, scores)


def deciding_score(table: Scores) -> float:
    """F at 10 cm on surfaces; on vegetation, where held rings cannot be known, if that is all."""
    return table.get("surface", table.get("vegetation"))["f_10"]


def _card(stored, start, config: TrainConfig, samples: RaySamples, goals) -> dict:
    return {
        **stored.get("card", {}),
        "finetuned_from": str(start),
        "finetuned_steps": config.steps,
        "finetuned_samples": len(samples),
        "held_out_f10_before": round(goals["before"], 4),
        "held_out_f10_after": round(goals["after"], 4),
    }


# --- objects of scans ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """One object of a scan, with all rings that saw it."""

    points: np.ndarray  # (n, 3)
    ring: np.ndarray  # (n,)
    rings: tuple[int, int]  # first and last of the whole scan
    frame: str
    number: int

    @property
    def range(self) -> float:
        return float(np.linalg.norm(self.points.mean(axis=0)))


def prepare(scans: str | Path, frames: int, seed: int) -> tuple[RaySamples, list[rings.RingCase]]:
    """Training samples of the first scans, and hold-out cases of the last fifth.

    Scans between those trained on would show the same objects from the same place.
    """
    found = list(objects(scans, frames))
    if len(found) < 2:
        raise ValueError(f"{scans}: {len(found)} scans; two are the least, one to score on")
    first_held = len(found) - max(1, len(found) // 5)
    rng = np.random.default_rng(seed)
    drawn = [
        ring_sample(seen, rng) for scan in found[:first_held] for seen in scan for _ in range(DRAWS)
    ]
    samples = [sample for sample in drawn if sample is not None]
    cases = [ring_case(seen) for scan in found[first_held:] for seen in scan]
    cases = [case for case in cases if case is not None]
    if not samples or not cases:
        raise ValueError(
            f"{scans}: {len(samples)} objects to train on and {len(cases)} to score were found; "
            "give more scans, of a street with objects within 45 m"
        )
    return RaySamples.of(samples), cases


def objects(scans: str | Path, frames: int) -> Iterator[list[Seen]]:
    """The objects of at most `frames` scans, spread over all there are, scan by scan."""
    segment = Segmenter()
    for scan in rings.scans_with_rings(scans, frames):
        yield _objects_of(scan, segment)


def _objects_of(scan: Scan, segment: Segmenter) -> list[Seen]:
    _, instance = segment(scan.points, scan.ring)
    rings = int(scan.ring.min()), int(scan.ring.max())
    found = []
    for number in range(1, instance.max(initial=0) + 1):
        mine = instance == number
        seen = Seen(scan.points[mine], scan.ring[mine].astype(int), rings, scan.name, number)
        if RANGE[0] < seen.range < RANGE[1]:
            found.append(seen)
    return found


def ring_case(seen: Seen) -> rings.RingCase | None:
    """The hold-out case of an object, or None where it is too small or too far to be scored."""
    if len(seen.points) < rings.SCORED_POINTS[0] or seen.range >= SCORED_RANGE:
        return None
    surface = rings.roughness(seen.points, seen.ring) < rings.SURFACE_ROUGHNESS
    return rings.ring_case(seen.points, seen.ring, surface, frame=seen.frame, cluster=seen.number)


# --- one training sample -------------------------------------------------------------------------


def ring_sample(seen: Seen, rng: np.random.Generator) -> RaySample | None:
    """Some rings of an object as input, the rays of the others as probes; None if too small."""
    stride = int(rng.choice(STRIDES))
    keeps = seen.ring % stride == rng.integers(stride)
    if keeps.all() or not keeps.any():
        return None
    azimuth = np.arctan2(seen.points[:, 1], seen.points[:, 0])
    kept, (middle, half) = azimuth_window(azimuth, np.flatnonzero(keeps), rng)
    if len(kept) < FEWEST:
        return None
    points = seen.points[kept]
    grid = ray_grid(points, ORIGIN)
    coordinates = grid.to_grid(points)
    hits, misses = (
        rays[np.abs(wrap(rays[:, 0] * grid.step_azimuth + grid.forward - middle)) <= half]
        for rays in held_rays(seen, keeps, grid, rng)
    )
    probes, hit = probes_around(coordinates, hits, misses)
    return ray_sample(grid, coordinates, probes, hit)


def held_rays(
    seen: Seen, keeps: np.ndarray, grid: RayGrid, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Rays of the rings not kept, in grid steps: returns (h, 3) of the object, and misses (m, 2).

    A miss is a ray in the object's window, one ring and one column larger on each side, with no
    return of the object within an azimuth step.
    """
    all_rays = grid.to_grid(seen.points)
    kept_rings = set(seen.ring[keeps].tolist())
    window = np.arange(all_rays[:, 0].min() - 1.5, all_rays[:, 0].max() + 1.5) + rng.random()
    misses = [np.zeros((0, 2))]
    for number, elevation in ring_elevations(seen, all_rays).items():
        if number in kept_rings:
            continue
        returned = all_rays[seen.ring == number]
        returned = returned[returned[:, 0].argsort()]
        height = np.full(len(window), elevation)
        missed = np.ones(len(window), bool)
        if len(returned):
            height = np.interp(window, returned[:, 0], returned[:, 1])
            missed = np.abs(window[:, None] - returned[:, 0]).min(axis=1) > 1
        misses.append(np.stack((window, height), axis=1)[missed])
    return all_rays[~keeps], np.concatenate(misses)


def ring_elevations(seen: Seen, rays: np.ndarray) -> dict[int, float]:
    """Elevation in grid steps of the object's rings, those between them, and one on each side.

    Rings that miss the object are placed by those that meet it: lasers do not start at one point,
    so that the elevation of a ring on what is behind is another.
    """
    numbers = np.unique(seen.ring)
    known = np.array([np.median(rays[seen.ring == number, 1]) for number in numbers])
    slope = np.polyfit(numbers, known, 1)[0] if len(numbers) > 1 else 0.0
    first, last = max(numbers[0] - 1, seen.rings[0]), min(numbers[-1] + 1, seen.rings[1])
    wanted = np.arange(first, last + 1)
    beyond = np.minimum(wanted - numbers[0], 0) + np.maximum(wanted - numbers[-1], 0)
    placed = np.interp(wanted, numbers, known) + slope * beyond
    return dict(zip(wanted.tolist(), placed.tolist(), strict=True))


def probes_around(
    anchors: np.ndarray, hits: np.ndarray, misses: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The nearest held rays of each anchor (n, 3): probes (n, PROBES, 3) and hit (n, PROBES).

    Fewer than that within reach are repeated; where there is none, the anchor's own ray is asked.
    """
    rays = np.concatenate((hits[:, :2], misses, anchors[:, :2]))
    depth = np.concatenate((hits[:, 2], np.zeros(len(misses)), anchors[:, 2]))
    met = np.repeat((True, False, True), (len(hits), len(misses), len(anchors)))
    held = len(hits) + len(misses)
    reach = np.asarray(PROBE_REACH)
    # scaled, so that the reach is one in both directions
    distance, chosen = cKDTree(rays[:held] / reach).query(
        anchors[:, :2] / reach, k=PROBES, p=np.inf, distance_upper_bound=1.0
    )
    count = np.isfinite(distance).sum(axis=1, keepdims=True)  # nearest first
    chosen = np.take_along_axis(chosen, np.arange(PROBES) % np.maximum(count, 1), axis=1)
    own = held + np.arange(len(anchors))
    chosen = np.where(count > 0, chosen, own[:, None])
    hit = met[chosen]
    away = np.where(hit, depth[chosen] - anchors[:, 2:], 0.0)
    return np.concatenate((rays[chosen] - anchors[:, None, :2], away[..., None]), axis=2), hit
