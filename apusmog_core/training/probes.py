# SPDX-License-Identifier: Apache-2.0
"""Simulated LiDAR objects for training: sparse rings in, what more rays would have met out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..compute import processes
from ..config import ClusterConfig
from ..files import written_whole
from ..segment import Segmenter
from ..segment.cluster import components, rows_by_label
from ..sensor.grid import wrap
from ..sensor.view import CONTEXT, SCALARS, WINDOW, ObjectGraph, ObjectScan, look_around

if TYPE_CHECKING:
    from ..simulate import Scene, Sensor

PROBES = 6  # rays cast around each input point
SENSORS = (
    ("HDL-64E",) * 6
    + ("VLP-16", "VLP-32C", "Pandar64") * 2
    + (
        "OS1-32",
        "OS1-64",
        "OS1-128",
        "XT32",
    )
)
STRIDES = {  # every how many rings are kept, by how many there are
    128: (1, 2, 4, 4, 8, 8),
    64: (1, 2, 2, 2, 3, 4, 4, 4, 6, 8),
    32: (1, 1, 2, 2),
    16: (1, 1, 2),
}
FEWEST, LARGEST = 4, 600  # points of one object
FARTHEST = 75.0  # metres
VERSION = 11  # of the probes, for caches: raise it when they change


@dataclass
class ProbedObject:
    """One object as its sensor sees it, with the true answers of rays around its points."""

    neighbours: np.ndarray  # (n, k), itself first
    offsets: np.ndarray  # (n, k, 3)
    context: np.ndarray  # (n, CONTEXT)
    probes: np.ndarray  # (n, PROBES, 3): ray and depth, steps from the anchor
    hit: np.ndarray  # (n, PROBES): the ray meets this object


def street_objects(seed: int, meshes: str | None = None) -> list[ProbedObject]:
    """All objects of one simulated scan, probed."""
    from .. import simulate

    rng = np.random.default_rng(seed)
    scene = simulate.street(seed // 4, meshes or None)  # four places in each street
    sensor = simulate.Sensor.named(
        str(rng.choice(SENSORS)), height=rng.uniform(1.4, 2.4), noise=rng.uniform(0.005, 0.03)
    ).jittered(seed, metres=rng.uniform(0.0, 0.03), lift=rng.choice((0.0, 0.25)))
    at = (rng.uniform(-40, 40), rng.uniform(-1.5, 1.5), 0.0)
    scan = simulate.scan(scene, sensor, seed, at)
    floor = rng.uniform(0.1, 0.3) - sensor.height  # what is lower goes with the ground
    stride = int(rng.choice(STRIDES[len(sensor.elevation)]))
    first = int(rng.integers(stride))
    kept = scan.ring % stride == first
    labels = np.zeros(len(scan.points), np.int64)
    truths: list[Truth] = []
    rings = np.array(sensor.elevation)[first::stride]
    find = found_objects if rng.random() < 0.5 else true_objects
    for members in find(scan, kept, floor):
        index, window = azimuth_window(scan.azimuth, members, rng)
        if len(index) >= FEWEST:
            instances = np.unique(scan.instance[members])
            reach = RayWindow(*window, rings.min(), rings.max())
            truths.append(Truth(scene, sensor, at, instances[instances > 0], floor, reach))
            labels[index] = len(truths)
    if not truths:
        return []
    graph = view_kept(scan, labels, kept, sensor.height, rng)
    ends = np.cumsum(graph.sizes)
    return [
        _probed(truth, graph, slice(end - size, end), rng)
        for truth, size, end in zip(truths, graph.sizes, ends, strict=True)
    ]


def view_kept(scan, labels: np.ndarray, kept: np.ndarray, mounted: float, rng) -> ObjectGraph:
    """The kept rings as a node would see them; at times without ground, surroundings or rings."""
    whole, knows_ground, knows_rings = rng.random() > 0.1, rng.random() > 0.1, rng.random() > 0.1
    used = kept if whole else kept & (labels > 0)
    points = scan.points[used].astype(np.float64)
    height = None
    if knows_ground and whole:  # roads are not as flat as the simulator's
        slope = rng.normal(0, 0.002, 2)
        height = points[:, 2] + mounted + rng.normal(0, 0.04) + points[:, :2] @ slope
    ring = scan.ring[used] if knows_rings else None
    return look_around(ObjectScan(points, labels[used], ring, height, whole))


def true_objects(scan, kept: np.ndarray, floor: float) -> Iterator[np.ndarray]:
    """Kept rows of each object, as all rings show it; things that touch are one, as in a node."""
    reach = np.linalg.norm(scan.points, axis=1)
    usable = (scan.points[:, 2] > floor) & (scan.instance > 0) & (reach > 3) & (reach < FARTHEST)
    usable = np.flatnonzero(usable)
    if len(usable):
        for rows in rows_by_label(components(scan.points[usable], ClusterConfig())):
            members = usable[rows]
            yield members[kept[members]]


def found_objects(scan, kept: np.ndarray, floor: float) -> Iterator[np.ndarray]:
    """Kept rows of each object that a node would find in the kept rings, right or wrong."""
    rows = np.flatnonzero(kept)
    _, instance = Segmenter()(scan.points[rows], scan.ring[rows])
    for members in rows_by_label(instance.astype(np.int64))[1:]:
        yield rows[members]


@dataclass
class RayWindow:
    """Where the rays of a sensor that saw an object could have gone, radians."""

    azimuth: float  # of the middle
    half_width: float
    lowest: float  # elevation
    highest: float

    def clip(self, azimuth: np.ndarray, elevation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Into the window: beyond it the object may go on, but no ring tells."""
        aside = np.clip(wrap(azimuth - self.azimuth), -self.half_width, self.half_width)
        return self.azimuth + aside, np.clip(elevation, self.lowest, self.highest)


@dataclass
class Truth:
    """Answers rays about one object."""

    scene: Scene
    sensor: Sensor
    at: tuple[float, float, float]
    instances: np.ndarray  # that are part of the object
    floor: float  # lower hits go with the ground
    window: RayWindow

    def ask(self, azimuth: np.ndarray, elevation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whether rays meet the object (n,) bool, and how far away (n,), one where they do not."""
        from ..simulate import origin_of, unit_rays

        hits = self.scene.hits(unit_rays(azimuth, elevation), origin_of(self.sensor, self.at))
        hit = np.isin(hits.instance, self.instances) & (hits.reflectivity > 0)
        hit &= np.sin(elevation) * np.where(hit, hits.range, 0) > self.floor
        return hit, np.where(hit, hits.range, 1.0)


def azimuth_window(
    azimuth: np.ndarray, index: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, tuple[float, float]]:
    """At most LARGEST points of an object: all heights, but only so far to the left and right."""
    if len(index) == 0:
        return index, (0.0, np.pi)
    middle = float(azimuth[rng.choice(index)])
    if len(index) <= LARGEST:
        return index, (middle, np.pi)
    away = np.abs(wrap(azimuth[index] - middle))
    half = float(np.partition(away, LARGEST)[LARGEST])
    return index[away < half], (middle, half)


def _probed(truth: Truth, graph: ObjectGraph, rows: slice, rng) -> ProbedObject:
    azimuth, elevation, depth = graph.polar[rows].T[:, :, None]
    up, down = graph.steps[rows].T[:, :, None]
    strays = rng.uniform(-1, 1, (len(azimuth), PROBES, 2)) * (1.0, 1.05)
    rise = np.where(strays[..., 1] > 0, up, down)
    aimed = truth.window.clip(
        azimuth + strays[..., 0] * graph.column, elevation + strays[..., 1] * rise
    )
    hit, reach = (a.reshape(strays.shape[:2]) for a in truth.ask(*(a.ravel() for a in aimed)))
    rays = (
        wrap(aimed[0] - azimuth) / graph.column,
        (aimed[1] - elevation) / rise,
        np.where(hit, (np.log(reach) - depth) / up, 0.0),
    )
    return probed_object(graph, rows, np.stack(rays, axis=-1), hit)


def probed_object(
    graph: ObjectGraph, rows: slice, probes: np.ndarray, hit: np.ndarray
) -> ProbedObject:
    """One object of a graph, from probes (n, PROBES, 3) around its points and hits."""
    return ProbedObject(
        (graph.neighbours[rows] - rows.start).astype(np.int16),
        graph.offsets[rows].astype(np.float16),
        graph.context[rows].astype(np.float16),
        probes.astype(np.float32),
        hit,
    )


# --- many objects, in few arrays -----------------------------------------------------------------


def _mirrored() -> np.ndarray:
    """Order of the context (CONTEXT,) when left and right change places."""
    order = np.arange(CONTEXT)
    places = {tuple(place): n for n, place in enumerate(WINDOW.tolist())}
    for n, (ring, column) in enumerate(WINDOW.tolist()):
        other = places[ring, -column]
        order[SCALARS + 3 * n : SCALARS + 3 * n + 3] = SCALARS + 3 * other + np.arange(3)
    return order


MIRRORED = _mirrored()


class ProbedObjects:
    """Objects end to end in flat arrays; a batch is a few of them as one graph."""

    ARRAYS = tuple(f.name for f in fields(ProbedObject))

    def __init__(self, arrays: dict[str, np.ndarray], sizes: np.ndarray):
        self.arrays, self.sizes = arrays, sizes
        self.starts = np.concatenate(([0], np.cumsum(sizes)))

    @classmethod
    def of(cls, objects: list[ProbedObject]) -> ProbedObjects:
        arrays = {name: np.concatenate([getattr(o, name) for o in objects]) for name in cls.ARRAYS}
        return cls(arrays, np.array([len(o.probes) for o in objects]))

    def __len__(self) -> int:
        return len(self.sizes)

    def batch(self, chosen: np.ndarray, rng: np.random.Generator) -> dict[str, Tensor]:
        """The chosen objects as one graph (total, ...), half of them mirrored."""
        index = np.concatenate([np.arange(self.starts[c], self.starts[c + 1]) for c in chosen])
        out = {name: array[index] for name, array in self.arrays.items()}
        sizes = self.sizes[chosen]
        shift = np.repeat(np.cumsum(sizes) - sizes, sizes)
        out["neighbours"] = out["neighbours"].astype(np.int64) + shift[:, None]
        out["cloud"] = np.repeat(np.arange(len(chosen)), sizes)
        mirror = np.repeat(rng.random(len(chosen)) < 0.5, sizes)
        for name in ("offsets", "context"):
            out[name] = out[name].astype(np.float32)
        out["offsets"][mirror, :, 0] *= -1
        out["probes"][mirror, :, 0] *= -1
        out["context"][mirror] = out["context"][mirror][:, MIRRORED]
        return {name: torch.from_numpy(array) for name, array in out.items()}

    def save(self, path: str | Path) -> None:
        with written_whole(path) as place:
            np.savez(place, sizes=self.sizes, **self.arrays)

    @classmethod
    def load(cls, path: str | Path) -> ProbedObjects:
        stored = np.load(path)
        return cls({name: stored[name] for name in cls.ARRAYS}, stored["sizes"])


def prepare(count: int, seed: int, meshes: str | None, cache: str | Path) -> ProbedObjects:
    """At least `count` objects, simulated once on all cores and cached; the same for a seed."""
    path = Path(cache) / f"rays-v{VERSION}-{count}-{seed}-{_named(meshes)}.npz"
    if path.is_file():
        return ProbedObjects.load(path)
    from tqdm import tqdm

    objects: list[ProbedObject] = []
    streets = range(seed * 1_000_000, (seed + 1) * 1_000_000)
    simulate = partial(street_objects, meshes=meshes)
    with processes() as pool:
        bar = tqdm(total=count, desc="simulating", unit="object")
        for found in pool.imap(simulate, streets, chunksize=4):
            objects += found
            bar.update(len(found))
            if len(objects) >= count:
                break
        bar.close()
        pool.terminate()
    data = ProbedObjects.of(objects)
    data.save(path)
    return data


def _named(meshes: str | None) -> str:
    """A name for the meshes that objects come from, by all that is in their folder."""
    if not meshes:
        return "built-in"
    digest = hashlib.sha256()
    for file in sorted(path for path in Path(meshes).rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(meshes)} {file.stat().st_size} ".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]
