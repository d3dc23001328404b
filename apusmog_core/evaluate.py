# SPDX-License-Identifier: Apache-2.0
"""Scores of a model beside the baselines: on shapes, on held-out rings, in the ablation."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from apusmog_core import baselines, metrics

if TYPE_CHECKING:
    from apusmog_core.config import TrainConfig
    from apusmog_core.data import Scan
    from apusmog_core.data.pugan import Shape
    from apusmog_core.upsampler import Upsampler

RANGE_BINS = (0, 15, 30, 45)  # metres
SCORED_POINTS = (64, 1_000_000)  # fewest and most of an object
SURFACE_ROUGHNESS = 0.1  # metres: rougher clusters are vegetation

Scores = dict[str, dict[str, float]]  # {group of cases: {score: mean over the cases}}
Row = dict[str, Any]  # one line of a table


# --- shapes --------------------------------------------------------------------------------------

ShapeMethod = Callable[[np.ndarray, float], np.ndarray]  # points (n, 3), ratio -> (m, 3)

SHAPE_BASELINES: dict[str, ShapeMethod] = {
    "nothing": lambda points, ratio: baselines.nothing(points),
    "midpoint": lambda points, ratio: baselines.midpoint(points, round(ratio * len(points))),
}


def evaluate_shapes(
    shapes: Iterable[Shape],
    methods: dict[str, ShapeMethod],
    ratio: float = 4.0,
    noise: float = 0.0,
    seed: int = 0,
) -> list[Row]:
    """One row for each shape and method, then the means: scores as in `metrics.shape_scores`.

    `noise` is the standard deviation added to the input, in radii of the shape. Shapes without
    ground truth at this ratio (not published and no mesh to sample) are left out.
    """
    rows = []
    for shape in shapes:
        truth = shape.truth(round(ratio * len(shape.points)))
        if truth is None:
            continue
        surface = metrics.mesh_surface(shape.mesh) if shape.mesh else None
        points = add_noise(shape.points, noise, seed)
        setting = {"shape": shape.name, "size": len(points), "ratio": ratio, "noise": noise}
        for name, method in methods.items():
            start = time.perf_counter()
            dense = method(points, ratio)
            seconds = time.perf_counter() - start
            scores = metrics.shape_scores(dense, truth, surface)
            rows.append({"method": name, **setting, **scores, "seconds": seconds})
    return rows + [_mean_shape(rows, name) for name in methods if rows]


def add_noise(points: np.ndarray, noise: float, seed: int = 0) -> np.ndarray:
    """Gaussian noise, its deviation given in units of the cloud's radius."""
    if noise == 0:
        return points
    radius = np.linalg.norm(points - points.mean(axis=0), axis=1).max()
    jitter = np.random.default_rng(seed).normal(0, noise * radius, points.shape)
    return (points + jitter).astype(points.dtype)


def _mean_shape(rows: list[Row], method: str) -> Row:
    mine = [row for row in rows if row["method"] == method]
    scores = [{k: v for k, v in row.items() if k not in SHAPE_SETTING} for row in mine]
    setting = {k: mine[0][k] for k in SHAPE_SETTING}
    return {**setting, "shape": f"mean of {len(mine)}", **_means(scores)}


SHAPE_SETTING = ("method", "shape", "size", "ratio", "noise")


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

    from apusmog_core.data import open_scans

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
    from apusmog_core.segment import Segmenter

    segment = Segmenter()
    cases = []
    for scan in scans_with_rings(scans, frames):
        _, instance = segment(scan.points)
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
    from apusmog_core import simulate

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
        dense = up.upsample_many(clouds, ratios, keep_input=True, origin=np.zeros(3))
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


# --- ablation ------------------------------------------------------------------------------------


def ablation_runs(config: TrainConfig, patches: int) -> dict[str, TrainConfig]:
    """The full model and the five rows of the paper's ablation table, each at the same budget."""
    steps = max(1, round(patches / config.batch))
    config = replace(config, steps=steps, warmup=min(config.warmup, steps // 10))
    network = config.network
    runs = {
        "full model": config,
        "uniform sphere": replace(config, model=replace(network, uniform_sphere=True)),
        "N/4 components": replace(config, model=replace(network, component_share=0.25)),
        "no refinement": replace(config, model=replace(network, refinements=0)),
        "no reconstruction": replace(config, lambda_reconstruction=0.0),
        "ACD for upsampling": replace(config, lambda_reconstruction=0.0, loss="acd"),
    }
    folder = Path(config.out) / "ablation"
    return {
        name: replace(run, out=str(folder / name.lower().replace(" ", "_").replace("/", "")))
        for name, run in runs.items()
    }


def evaluate_ablation(config: TrainConfig, patches: int, shapes: list[Shape]) -> list[Row]:
    """Train every run of the ablation and score it on the shapes at ratio 4: one mean row each."""
    from apusmog_core.train import train
    from apusmog_core.upsampler import Upsampler

    rows = []
    for name, run in ablation_runs(config, patches).items():
        up = Upsampler.load(train(run), device=run.device, seed=run.seed)
        scored = evaluate_shapes(shapes, {name: up.upsample})
        rows.append(scored[-1] | {"patches": run.steps * run.batch})
    return rows


# --- tables --------------------------------------------------------------------------------------

LABELS = {
    "cd": "CD e-3", "hd": "HD e-3", "hd_sum": "HD-sum e-3", "p2f": "P2F e-3",
    "p2f_std": "P2F dev e-3", "seconds": "s", "completeness": "complete", "hallucination": "halluc",
    "f_5": "F@5cm", "f_10": "F@10cm", "f_20": "F@20cm", "free_space": "free", "thickness": "thick",
    "surface_error": "to surface",
}  # fmt: skip


def format_table(rows: list[Row]) -> str:
    """Rows as aligned text; shape scores are printed in thousandths."""
    if not rows:
        return "nothing to score"
    names = list(rows[0])
    cells = [[LABELS.get(name, name) for name in names]]
    cells += [[_cell(name, row.get(name, float("nan"))) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    left = [isinstance(rows[0][name], str) for name in names]
    return "\n".join(
        "  ".join(
            c.ljust(w) if a else c.rjust(w) for c, w, a in zip(line, widths, left, strict=True)
        )
        for line in cells
    )


def _cell(name: str, value: Any) -> str:
    if isinstance(value, float):
        if np.isnan(value):
            return "-"
        if LABELS.get(name, "").endswith("e-3"):
            return f"{1e3 * value:.3f}"
        return f"{value:.3f}" if name in LABELS else f"{value:g}"
    return str(value)


def write_rows(path: str | Path, rows: list[Row]) -> None:
    """Unscaled rows as .csv or .json, by the suffix."""
    path = Path(path)
    if path.suffix == ".json":
        clean = [{k: None if v != v else v for k, v in row.items()} for row in rows]  # NaN
        path.write_text(json.dumps(clean, indent=1) + "\n")
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]) if rows else [])
            writer.writeheader()
            writer.writerows(rows)
    else:
        raise ValueError(f"{path}: results are written as .csv or .json")
