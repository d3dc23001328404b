# SPDX-License-Identifier: Apache-2.0
"""Ring hold-out: some rings of a scan are given, the others say how good the answer is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..data.clouds import read_bin
from ..segment.rings import require_rings
from ..sensor.calibrate import ALL_SCANS, Calibration
from ..sensor.view import ObjectScan
from . import baselines, metrics
from .tables import Row, Scores, means

if TYPE_CHECKING:
    from ..data import Scan
    from ..dense import Dense
    from ..segment import Segmenter
    from ..upsampler import Upsampler

RANGE_BINS = (0, 15, 30, 45)  # metres
SCORED_POINTS = (64, 1_000_000)  # fewest and most of an object
FEWEST_KEPT = 8  # points that are given, and that are held, of an object where few rings are kept
SURFACE_ROUGHNESS = 0.1  # metres: rougher clusters are vegetation

Progress = Callable[[Iterable, str, int], Iterable]  # items, what one is, how many


def without_progress(items: Iterable, unit: str, total: int) -> Iterable:
    return items


# --- ring hold-out -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class KeptScan:
    """What is given of one scan: the rings that were kept, of objects and of all around them."""

    points: np.ndarray  # (n, 3), in the sensor's frame
    ring: np.ndarray  # (n,)
    height: np.ndarray | None  # (n,) above the ground
    rays: metrics.MeasuredRays  # of all rings


def keep_rings(points: np.ndarray, ring: np.ndarray, stride: int) -> tuple[KeptScan, np.ndarray]:
    """Every `stride`-th ring of a scan (n, 3), and the row (n,) of each point in it, or -1."""
    from ..segment import Segmenter

    kept = np.flatnonzero(ring % stride == 0)
    row = np.full(len(points), -1)
    row[kept] = np.arange(len(kept))
    given = points[kept]
    height = Segmenter().find(np.ascontiguousarray(given, np.float32), ring[kept]).height
    return KeptScan(given, ring[kept], height, metrics.MeasuredRays(points)), row


@dataclass(frozen=True, eq=False)
class RingCase:
    """One object: every n-th ring is given, the others are held out."""

    scan: KeptScan
    rows: np.ndarray  # (n,) of the scan: the input
    points: np.ndarray  # (n, 3) the input, in the sensor's frame
    held: np.ndarray  # (h, 3)
    full: np.ndarray  # (n + h, 3)
    ring: np.ndarray  # (n,) of the input
    stride: int
    range: float  # of the mean of `full`, metres
    surface: bool  # vehicles, persons, walls, poles; otherwise vegetation
    scan_name: str
    cluster: int
    truth: Callable[[np.ndarray], np.ndarray] | None = None  # distance to the true surface

    @property
    def ratio(self) -> float:
        """Output points for each input point, so that as many come out as were measured."""
        return len(self.full) / len(self.points)


def hold_out(
    scan: KeptScan, rows: np.ndarray, full: np.ndarray, ring: np.ndarray, stride: int, **rest
) -> RingCase | None:
    """The hold-out case of one object (n, 3) whose points are `rows` (n,) of the kept scan, or -1;
    None where too little is kept, or held where rings are."""
    kept = rows >= 0
    fewest = 1 if stride == 2 else FEWEST_KEPT
    if kept.sum() < fewest or (stride > 1 and (~kept).sum() < fewest):
        return None
    distance = float(np.linalg.norm(full.mean(axis=0)))
    given = (full[kept], full[~kept], full, ring[kept])
    return RingCase(scan, rows[kept], *given, stride=stride, range=distance, **rest)


def fixed_cases(scans: str | Path, holdout: str | Path, stride: int = 2) -> list[RingCase]:
    """The fixed clusters of `holdout`/SCAN.npz in the scans `scans`/SCAN.bin."""
    files = sorted(Path(holdout).glob("*.npz"))
    if not files:
        raise ValueError(f"{holdout}: no SCAN.npz in it; expected ring, index, offset, roughness")
    cases = []
    for file in files:
        scan = _velodyne(Path(scans), file.stem)
        fixed = np.load(file)
        if len(fixed["ring"]) != len(scan):
            raise ValueError(f"{file}: made for another scan ({len(scan)} points in this one)")
        rings = fixed["ring"].astype(int)
        kept, row = keep_rings(scan, rings, stride)
        for j, index in enumerate(np.split(fixed["index"], fixed["offset"][1:-1])):
            surface = bool(fixed["roughness"][j] < SURFACE_ROUGHNESS)
            named = dict(surface=surface, scan_name=file.stem, cluster=j)
            case = hold_out(kept, row[index], scan[index], rings[index], stride, **named)
            cases += [case] if case else []
    return cases


def _velodyne(folder: Path, name: str) -> np.ndarray:
    """All points of a KITTI scan, none removed: clusters are kept as indices into them."""
    for inner in ("", "velodyne_points/data", "velodyne"):
        file = folder / inner / f"{name}.bin"
        if file.is_file():
            return read_bin(file)[:, :3]
    raise ValueError(f"{folder}: no scan {name}.bin in it")


def score_rings(cases: list[RingCase], predict: Callable[[RingCase], np.ndarray]) -> Scores:
    """Mean scores of a method by surface or vegetation and by range bin.

    `predict` gives the whole output for a case, measured points included.
    """
    return mean_rings(cases, [score_ring(case, predict(case)) for case in cases])


def score_ring(case: RingCase, output: np.ndarray) -> dict[str, float]:
    """Scores of one output (see `metrics.ring_scores`), and what the scan's rays say of it."""
    scores = metrics.ring_scores(output, case.held, case.full)
    scores["free_space"] = metrics.free_space_share(output, case.points, case.scan.rays)
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


def scans_with_rings(scans: str | Path, most: int) -> Iterator[Scan]:
    """At most `most` scans, spread over all there are; ValueError where one has no rings."""
    from tqdm import tqdm

    from ..data import open_scans

    opened = open_scans(scans)
    wanted = set(np.linspace(0, len(opened) - 1, min(most, len(opened))).round().astype(int))
    bar = tqdm(opened, desc="finding objects", unit="scan", disable=None)
    for number, scan in enumerate(bar):
        if number not in wanted:
            continue
        yield replace(scan, ring=require_rings(scan, scans)[0])


def cases_of(
    scan: Scan,
    segment: Segmenter,
    points: Sequence[int] = SCORED_POINTS,
    max_range: float = 45.0,
    stride: int = 2,
) -> list[RingCase]:
    """The objects that segmentation finds in one scan with all its rings."""
    _, instance = segment(scan.points, scan.ring)
    kept, row = keep_rings(scan.points, scan.ring, stride)
    cases = []
    for j in range(1, instance.max(initial=0) + 1):
        index = np.flatnonzero(instance == j)
        if not points[0] <= len(index) <= points[1]:
            continue
        cloud, ring = scan.points[index], scan.ring[index]
        surface = roughness(cloud, ring) < SURFACE_ROUGHNESS
        named = dict(surface=surface, scan_name=scan.name, cluster=j)
        case = hold_out(kept, row[index], cloud, ring, stride, **named)
        cases += [case] if case and case.range < max_range else []
    return cases


def found_cases(
    scans: str | Path,
    most: int = 20,
    points: Sequence[int] = SCORED_POINTS,
    max_range: float = 45.0,
    stride: int = 2,
) -> list[RingCase]:
    """Objects that segmentation finds in at most `most` scans, spread over all there are."""
    from ..segment import Segmenter

    segment = Segmenter()
    limits = (points, max_range, stride)
    found = (cases_of(scan, segment, *limits) for scan in scans_with_rings(scans, most))
    return _some([case for some in found for case in some], scans, points, max_range)


def simulated_cases(
    count: int,
    seed: int = 0,
    sensor: str = "HDL-64E",
    meshes: str | Path | None = None,
    points: Sequence[int] = SCORED_POINTS,
    max_range: float = 45.0,
    stride: int = 2,
    bias: float = 0.0,
) -> list[RingCase]:
    """Objects of simulated streets, one street a scan, whose true surface is known.

    With a `bias` each laser is off, in range by about so many metres, and starts elsewhere."""
    from .. import simulate

    device = simulate.Sensor.named(sensor)
    if bias:
        device = device.jittered(seed, metres=bias, lift=0.25)
    cases = []
    for number in range(count):
        scene = simulate.street(seed + number, meshes)
        turn = simulate.scan(scene, device, seed=seed + number)
        kept, row = keep_rings(turn.points, turn.ring, stride)
        for instance, placed in enumerate(scene.objects, start=1):
            index = np.flatnonzero(turn.instance == instance)
            large = placed.name == "building"  # larger than any cluster
            if large or not points[0] <= len(index) <= points[1]:
                continue
            case = hold_out(
                kept,
                row[index],
                turn.points[index],
                turn.ring[index],
                stride,
                surface=placed.name not in ("bush", "tree"),
                scan_name=f"{number:010d}",
                cluster=instance,
                truth=distance_to(placed.world, (0, 0, device.height)),
            )
            cases += [case] if case and case.range < max_range else []
    return _some(cases, f"{count} simulated scans", points, max_range)


def _some(cases: list[RingCase], where, points: Sequence[int], max_range: float) -> list[RingCase]:
    """The cases, or a ValueError where there is none to score."""
    if not cases:
        raise ValueError(
            f"{where}: no object of {points[0]} points within {max_range:g} m has enough of them "
            "on the rings given and on those held out; try --points 8 1000000 or a smaller --stride"
        )
    return cases


def distance_to(mesh, origin: Sequence[float]) -> Callable[[np.ndarray], np.ndarray]:
    """Distance to a simulated mesh, of points given in the frame of a sensor at `origin`."""
    vertices = (mesh.vertices - np.asarray(origin)).astype(np.float32)

    def distance(points: np.ndarray) -> np.ndarray:
        import open3d as o3d

        scene = o3d.t.geometry.RaycastingScene()  # a thousand alive at once crash Open3D
        scene.add_triangles(vertices, mesh.triangles.astype(np.uint32))
        return metrics.distance_to_mesh(points, scene)

    return distance


def calibrate_scans(
    cases: list[RingCase], scans: str | Path | None = None
) -> dict[str, Calibration]:
    """Range biases for each scan by name, from the kept rings of all other scans; where no folder
    or bag of scans is given, of the other cases' scans."""
    from ..data import open_scans

    if scans is None:
        others = {case.scan_name: (case.scan.points, case.scan.ring) for case in cases}
    else:
        stride, others = cases[0].stride, {}
        for scan in open_scans(scans):
            ring, _ = require_rings(scan, scans)
            kept = ring % stride == 0
            others[scan.name] = scan.points[kept], ring[kept]
    found = {case.scan_name: Calibration(ALL_SCANS) for case in cases}
    for scan_name, calibration in found.items():
        for name, (points, ring) in others.items():
            if name != scan_name:
                calibration.update(points, ring)
    return found


def upsample_rings(
    up: Upsampler,
    cases: list[RingCase],
    calibrations: dict[str, Calibration] | None = None,
    progress: Progress = without_progress,
) -> list[np.ndarray]:
    """The model's output for each case: measured points first, as many as the sensor saw."""
    return [d.points for d in dense_rings(up, cases, None, calibrations, progress)]


def dense_rings(
    up: Upsampler,
    cases: list[RingCase],
    ratio: float | None = None,
    calibrations: dict[str, Calibration] | None = None,
    progress: Progress = without_progress,
) -> list[Dense]:
    """What the model makes of each case: `ratio` times the points given, or as many as were seen.

    The objects of a scan go together, as in a node; calibrations are by name.
    """
    results: list[Dense | None] = [None] * len(cases)
    names = dict.fromkeys(case.scan_name for case in cases)
    for name in progress(names, "scan", len(names)):
        index = [i for i, case in enumerate(cases) if case.scan_name == name]
        scan = cases[index[0]].scan
        instance = np.zeros(len(scan.points), np.int64)
        for number, i in enumerate(index, start=1):
            instance[cases[i].rows] = number
        counts = [round((ratio or c.ratio) * len(c.points)) for c in (cases[i] for i in index)]
        bias = calibrations[name].of_points(scan.ring) if calibrations else None
        seen = ObjectScan(scan.points, instance, scan.ring, scan.height, bias=bias)
        for i, result in zip(index, up.upsample_scan(seen, counts).split(counts), strict=True):
            results[i] = result
    return results


RING_BASELINES: dict[str, Callable[[RingCase], np.ndarray]] = {
    "nothing": lambda case: baselines.nothing(case.points),
    "range-interpolation": lambda case: baselines.range_interpolation(
        case.points, case.ring, case.stride
    ),
    "midpoint": lambda case: baselines.midpoint(case.points, len(case.full)),
}


def evaluate_rings(
    cases: list[RingCase],
    up: Upsampler | None = None,
    name: str = "model",
    calibrations: dict[str, Calibration] | None = None,
    progress: Progress = without_progress,
) -> list[Row]:
    """One row for each method and group of cases: baselines, `name`, and the sensor itself."""

    def score(outputs: Iterable[np.ndarray]) -> Scores:
        pairs = progress(zip(cases, outputs, strict=True), "object", len(cases))
        return mean_rings(cases, [score_ring(case, output) for case, output in pairs])

    tables = {title: score(map(method, cases)) for title, method in RING_BASELINES.items()}
    ways = {name: None} | ({f"{name}, calibrated": calibrations} if calibrations else {})
    for title, biases in ways.items() if up else ():
        tables[title] = score(upsample_rings(up, cases, biases, progress))
    tables["all rings"] = score(case.full for case in cases)  # what no method can beat
    groups = tables["nothing"]
    return [
        {"method": title, "group": group, **table[group]}
        for group in groups
        for title, table in tables.items()
    ]
