# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning on unlabelled scans: rings are dropped, and what they saw is the answer."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from .. import weights
from ..compute import machine_code, parse_device
from ..config import ModelConfig, TrainConfig
from ..data import Scan
from ..evaluation import rings
from ..evaluation.tables import Row, Scores
from ..model.network import ApuSmog
from ..segment import Found, Segmenter
from ..sensor.grid import to_polar
from ..sensor.lasers import Lasers, find_lasers
from ..sensor.view import ObjectGraph, ObjectScan, find_columns, look_around
from ..settings import from_dict
from ..upsampler import Upsampler
from .loop import ray_batch, train
from .probes import FEWEST, PROBES, ProbedObject, ProbedObjects, azimuth_window, probed_object

RANGE = (3.0, 60.0)  # metres: objects to learn from
STRIDES = (2, 2, 3, 4)  # every how many rings are kept
DRAWS = 3  # times that each scan is used, with other rings kept
SAME_SURFACE = 0.5  # metres: a return so near that is of no object may be of this one all the same
MOST_HELD = 64  # rays of dropped rings around one point
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
    steps: int = 1500,
    rate: float = 3e-4,
    most: int = 100,
    device: str = "auto",
    seed: int = 0,
    progress: rings.Progress = rings.without_progress,
) -> Outcome:
    """Continue training the weights `start` on scans that have ring numbers, and write `out`.

    At most `most` scans are used, spread over all there are; the last fifth of them is held out.
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

    objects, cases = prepare(scans, most, seed)
    tables = {name: score(network, cases, device, progress) for name, network in rivals.items()}
    tuned = continue_training(config, start, objects)
    tables["after"] = score(tuned, cases, device, progress)

    goals = {name: deciding_score(table) for name, table in tables.items()}
    written = force or goals["after"] >= max(goals.values())
    if written:
        weights.save(tuned, out, _card(stored, start, config, objects, goals))
    rows = [
        {"weights": name, "group": group, **table[group]}
        for group in tables["before"]
        for name, table in tables.items()
    ]
    return Outcome(rows, written)


def continue_training(config: TrainConfig, start: str | Path, objects: ProbedObjects) -> ApuSmog:
    """The network after training, rounded as it is stored."""
    with tempfile.TemporaryDirectory() as folder:
        config = replace(config, out=folder)
        file = train(
            config, start_from=start, source=lambda *place: ray_batch(objects, config, *place)
        )
        return weights.load_network(file)


def score(
    network: ApuSmog,
    cases: list[rings.RingCase],
    device: str,
    progress: rings.Progress = rings.without_progress,
) -> Scores:
    """Ring hold-out scores of a network."""
    up = Upsampler(network, parse_device(device))
    dense = rings.upsample_rings(up, cases, progress=progress)
    pairs = progress(zip(cases, dense, strict=True), "object", len(cases))
    scores = [rings.score_ring(case, out) for case, out in pairs]
    return rings.mean_rings(cases, scores)


def deciding_score(table: Scores) -> float:
    """F at 10 cm on surfaces; on vegetation, where held rings cannot be known, if that is all."""
    return table.get("surface", table.get("vegetation"))["f_10"]


def _card(stored, start, config: TrainConfig, objects: ProbedObjects, goals) -> dict:
    return {
        **stored.get("card", {}),
        "finetuned_from": str(start),
        "finetuned_steps": config.steps,
        "finetuned_objects": len(objects),
        "held_out_f10_before": round(goals["before"], 4),
        "held_out_f10_after": round(goals["after"], 4),
    }


# --- scans to objects ----------------------------------------------------------------------------


def prepare(scans: str | Path, most: int, seed: int) -> tuple[ProbedObjects, list[rings.RingCase]]:
    """Probed objects of the first scans, and hold-out cases of the last fifth.

    Scans between those trained on would show the same objects from the same place.
    """
    found = list(rings.scans_with_rings(scans, most))
    if len(found) < 2:
        raise ValueError(f"{scans}: {len(found)} scans; two are the least, one to score on")
    first_held = len(found) - max(1, len(found) // 5)
    rng, segment = np.random.default_rng(seed), Segmenter()
    objects = [one for scan in found[:first_held] for one in scan_objects(scan, segment, rng)]
    cases = [case for scan in found[first_held:] for case in rings.cases_of(scan, segment)]
    if not objects or not cases:
        raise ValueError(
            f"{scans}: {len(objects)} objects to train on and {len(cases)} to score were found; "
            "give more scans, of a street with objects within 45 m"
        )
    return ProbedObjects.of(objects), cases


def scan_objects(scan: Scan, segment: Segmenter, rng: np.random.Generator) -> list[ProbedObject]:
    """The objects of one scan, several times, each time with other rings dropped."""
    full = FullScan.of(scan.points, scan.ring, segment.find(scan.points, scan.ring))
    objects = []
    for _ in range(DRAWS):
        stride = int(rng.choice(STRIDES))
        objects += dropped_objects(full, stride, int(rng.integers(stride)), rng)
    return objects


@dataclass(frozen=True, eq=False)
class FullScan:
    """A scan with all its rings, and where each return lies among rings and columns."""

    points: np.ndarray  # (n, 3)
    polar: np.ndarray  # (n, 3)
    found: Found
    rings: Lasers
    row_at: np.ndarray  # (rings, columns) row of the return there, -1 where there is none
    column: np.ndarray  # (n,)

    @classmethod
    def of(cls, points: np.ndarray, ring: np.ndarray, found: Found) -> FullScan:
        polar = to_polar(points)
        seen = find_lasers(polar, ring)
        columns = max(8, round(2 * np.pi / seen.step))
        column = find_columns(polar[:, 0], columns)
        row_at = np.full((len(seen.elevation), columns), -1)
        row_at[seen.number, column] = np.arange(len(points))
        return cls(points, polar, found, seen, row_at, column)


def dropped_objects(
    scan: FullScan, stride: int, first: int, rng: np.random.Generator
) -> list[ProbedObject]:
    """Every `stride`-th ring of all objects as input, the rays of the others as probes."""
    number, found = scan.rings.number, scan.found
    kept = number % stride == first
    labels = np.zeros(len(number), np.int64)
    objects = 0
    for instance in range(1, int(found.instance.max(initial=0)) + 1):
        index = np.flatnonzero(kept & (found.instance == instance))
        index, _ = azimuth_window(scan.polar[:, 0], index, rng)
        if len(index) < FEWEST or not RANGE[0] < np.exp(scan.polar[index, 2].mean()) < RANGE[1]:
            continue
        objects += 1
        labels[index] = objects
    if not objects:
        return []
    height = None if found.height is None else found.height[kept]
    graph = look_around(ObjectScan(scan.points[kept], labels[kept], number[kept], height))
    probes, hit = held_probes(scan, graph, np.flatnonzero(kept)[graph.rows], stride, rng)
    edges = np.concatenate(([0], np.cumsum(graph.sizes)))
    parts = [slice(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    return [probed_object(graph, rows, probes[rows], hit[rows]) for rows in parts]


def held_probes(
    scan: FullScan, graph: ObjectGraph, rows: np.ndarray, stride: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Probes (a, PROBES, 3) around the points of a graph, which are `rows` (a,) of the scan, and
    whether they hit (a, PROBES): rays of the dropped rings next to each point."""
    seen, found = scan.rings, scan.found
    where = (scan.polar, seen.number, scan.column, scan.row_at, seen.elevation, seen.height)
    steps = (graph.steps.astype(np.float64), graph.column)
    draw = rng.random(len(rows))
    return _held_probes(*where, found.instance, found.ground, rows, *steps, stride, draw)


@machine_code
def _held_probes(
    polar, number, column, row_at, elevation, height, instance, ground, rows, steps, size, stride,
    draw,
):  # fmt: skip
    """A ray misses where its ring measured something else. Where nothing returned, none is known:
    glass and dark paint return nothing either."""
    rings, columns = row_at.shape
    probes, hit = np.zeros((len(rows), PROBES, 3)), np.ones((len(rows), PROBES), np.bool_)
    rays, met = np.empty((MOST_HELD, 3)), np.empty(MOST_HELD, np.bool_)
    for a in range(len(rows)):
        i, count = rows[a], 0
        reach = np.exp(polar[i, 2])
        for ring in range(max(0, number[i] - stride + 1), min(rings, number[i] + stride)):
            for beside in range(-1, 2):
                j = row_at[ring, (column[i] + beside) % columns]
                if ring == number[i] or j < 0 or count == MOST_HELD:
                    continue
                mine = instance[j] == instance[i]
                close = abs(np.exp(polar[j, 2]) - reach) < SAME_SURFACE
                if not mine and close and not ground[j]:
                    continue
                # lasers start at different heights: where this one looks at the object's range
                up = polar[j, 1] if mine else elevation[ring] + height[ring] / reach
                turn = (polar[j, 0] - polar[i, 0] + np.pi) % (2 * np.pi) - np.pi
                rise = (up - polar[i, 1]) / (steps[a, 0] if up > polar[i, 1] else steps[a, 1])
                if abs(turn) > size or abs(rise) > 1.05:
                    continue
                depth = (polar[j, 2] - polar[i, 2]) / steps[a, 0] if mine else 0.0
                rays[count, 0], rays[count, 1], rays[count, 2] = turn / size, rise, depth
                met[count] = mine
                count += 1
        for p in range(PROBES if count else 0):  # else the point's own ray
            chosen = int((p + draw[a]) * count / PROBES)  # spread over all, or repeated
            probes[a, p], hit[a, p] = rays[chosen], met[chosen]
    return probes, hit
