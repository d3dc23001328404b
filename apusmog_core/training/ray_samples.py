# SPDX-License-Identifier: Apache-2.0
"""Simulated LiDAR objects for training: sparse rings in, what more rays would have seen out."""

from __future__ import annotations

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
from ..segment.cluster import components, rows_by_label
from ..sensor.grid import RayGrid, grid_context, ray_neighbours, scan_grids, wrap

if TYPE_CHECKING:
    from ..simulate import Scene, Sensor

PROBES = 6  # rays cast around each input point
MAX_NEIGHBOURS = 16
PROBE_REACH = (1.0, 1.1)  # how far a probe strays from its anchor, grid steps
SENSORS = ("HDL-64E",) * 7 + ("OS1-64", "VLP-32C", "VLP-16")
STRIDES = (1, 1, 2, 2, 2, 2, 2, 2, 3, 4)  # every how many rings are kept
LARGEST = 600  # points of one object
VERSION = 2  # of the samples, for caches: raise it when they change


@dataclass
class RaySample:
    """One object on its sensor's grid, with the true answers of rays around its points."""

    points: np.ndarray  # (n, 3) grid coordinates
    neighbours: np.ndarray  # (n, 16), itself first
    context: np.ndarray  # (n, 2)
    probes: np.ndarray  # (n, PROBES, 3): ray and depth, grid steps from the anchor
    hit: np.ndarray  # (n, PROBES): the ray meets this object


def street_samples(seed: int, meshes: str | None = None) -> list[RaySample]:
    """All objects of one simulated scan as training samples."""
    from .. import simulate

    rng = np.random.default_rng(seed)
    scene = simulate.street(seed // 4, meshes or None)  # four places in each street
    sensor = simulate.Sensor.named(
        str(rng.choice(SENSORS)), height=rng.uniform(1.4, 2.2), noise=rng.uniform(0.005, 0.04)
    ).jittered(seed, metres=rng.uniform(0.01, 0.03))
    at = (rng.uniform(-40, 40), rng.uniform(-1.5, 1.5), 0.0)
    scan = simulate.scan(scene, sensor, seed, at)
    floor = rng.uniform(0.1, 0.35) - sensor.height  # what is lower goes with the ground
    reach = np.linalg.norm(scan.points, axis=1)
    usable = (scan.points[:, 2] > floor) & (scan.instance > 0) & (reach > 3) & (reach < 60)
    stride = int(rng.choice(STRIDES))
    first = int(rng.integers(stride))
    kept = scan.ring % stride == first
    rings = sensor.elevation[first::stride]
    # things that touch are one object, as in a node
    pieces = []
    for members in clusters(scan.points, np.flatnonzero(usable)):
        index, window = azimuth_window(scan.azimuth, members, rng)
        index = index[kept[index]]
        if len(index) >= 8:
            instances = np.unique(scan.instance[members])
            view = View(*window, min(rings), max(rings))
            pieces.append((index, Truth(scene, sensor, at, instances, floor, view)))
    if not pieces:
        return []
    clouds = [scan.points[index] for index, _ in pieces]
    grids, coordinates = scan_grids(clouds, np.zeros(3))
    parts = np.split(coordinates, np.cumsum([len(c) for c in clouds])[:-1])
    truths = [truth for _, truth in pieces]
    return [_sample(t, g, c, rng) for t, g, c in zip(truths, grids, parts, strict=True)]


def clusters(points: np.ndarray, usable: np.ndarray) -> list[np.ndarray]:
    """Rows of points (n, 3) in each cluster of the usable ones."""
    if len(usable) == 0:
        return []
    return [usable[rows] for rows in rows_by_label(components(points[usable], ClusterConfig()))]


@dataclass
class View:
    """Where the rays of a sensor that saw an object could have gone, radians."""

    azimuth: float  # of the middle
    half_width: float
    lowest: float  # elevation
    highest: float

    def clip(self, azimuth: np.ndarray, elevation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Into the view: beyond it the object may go on, but no ring tells."""
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
    view: View

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
    middle = float(azimuth[rng.choice(index)])
    if len(index) <= LARGEST:
        return index, (middle, np.pi)
    away = np.abs(wrap(azimuth[index] - middle))
    half = float(np.partition(away, LARGEST)[LARGEST])
    return index[away < half], (middle, half)


def _sample(
    truth: Truth, grid: RayGrid, coordinates: np.ndarray, rng: np.random.Generator
) -> RaySample:
    strays = rng.uniform(-1, 1, (len(coordinates), PROBES, 2)) * PROBE_REACH
    aimed = coordinates[:, None, :2] + strays
    azimuth = aimed[..., 0] * grid.step_azimuth + grid.forward
    azimuth, elevation = truth.view.clip(azimuth, aimed[..., 1] * grid.step_elevation)
    hit, reach = (a.reshape(aimed.shape[:2]) for a in truth.ask(azimuth.ravel(), elevation.ravel()))
    x, y, z = coordinates.T[:, :, None]
    aside = wrap(azimuth - grid.forward - x * grid.step_azimuth) / grid.step_azimuth
    rise = elevation / grid.step_elevation - y
    depth = np.where(hit, np.log(reach) / grid.step_elevation - z, 0.0)
    return ray_sample(grid, coordinates, np.stack((aside, rise, depth), axis=-1), hit)


def ray_sample(
    grid: RayGrid, coordinates: np.ndarray, probes: np.ndarray, hit: np.ndarray
) -> RaySample:
    """A sample of points (n, 3) on a grid, from probes (n, PROBES, 3) around them and hits."""
    size = np.array([len(coordinates)])
    return RaySample(
        coordinates.astype(np.float32),
        ray_neighbours(coordinates, size, MAX_NEIGHBOURS).astype(np.int32),
        grid_context([grid], coordinates, size),
        probes.astype(np.float32),
        hit,
    )


# --- many samples, in few arrays -----------------------------------------------------------------


class RaySamples:
    """Samples end to end in flat arrays; a batch is a few of them as one graph."""

    ARRAYS = tuple(f.name for f in fields(RaySample))

    def __init__(self, arrays: dict[str, np.ndarray], sizes: np.ndarray):
        self.arrays, self.sizes = arrays, sizes
        self.starts = np.concatenate(([0], np.cumsum(sizes)))

    @classmethod
    def of(cls, samples: list[RaySample]) -> RaySamples:
        arrays = {name: np.concatenate([getattr(s, name) for s in samples]) for name in cls.ARRAYS}
        return cls(arrays, np.array([len(s.points) for s in samples]))

    def __len__(self) -> int:
        return len(self.sizes)

    def batch(
        self, chosen: np.ndarray, rng: np.random.Generator, jitter: float = 0.0
    ) -> dict[str, Tensor]:
        """The chosen samples as one graph (1, total, ...), each mirrored at random.

        Each object gets range noise of its own strength, up to `jitter` metres: real surfaces are
        rougher than meshes. The answers of the probes stay the true ones.
        """
        rows = [np.arange(self.starts[c], self.starts[c + 1]) for c in chosen]
        index = np.concatenate(rows)
        out = {name: array[index] for name, array in self.arrays.items()}
        sizes = self.sizes[chosen]
        shift = np.repeat(np.concatenate(([0], np.cumsum(sizes)[:-1])), sizes)
        out["neighbours"] = out["neighbours"].astype(np.int64) + shift[:, None]
        mirror = np.repeat(rng.choice((-1.0, 1.0), len(chosen)), sizes).astype(np.float32)
        out["points"][:, 0] *= mirror
        out["probes"][:, :, 0] *= mirror[:, None]
        strength = np.repeat(jitter * rng.random(len(chosen)), sizes)
        gap = np.exp(out["context"][:, 0])  # metres in a step of depth
        noise = (strength * rng.standard_normal(len(gap)) / gap).astype(np.float32)
        out["points"][:, 2] += noise
        out["probes"][:, :, 2] -= noise[:, None]
        return {name: torch.from_numpy(array)[None] for name, array in out.items()}

    def save(self, path: str | Path) -> None:
        with written_whole(path) as place:
            np.savez(place, sizes=self.sizes, **self.arrays)

    @classmethod
    def load(cls, path: str | Path) -> RaySamples:
        stored = np.load(path)
        return cls({name: stored[name] for name in cls.ARRAYS}, stored["sizes"])


def prepare(count: int, seed: int, meshes: str | None, cache: str | Path) -> RaySamples:
    """At least `count` samples, simulated once on all cores and cached; the same for a seed."""
    path = Path(cache) / f"rays-v{VERSION}-{count}-{seed}{'-meshes' if meshes else ''}.npz"
    if path.is_file():
        return RaySamples.load(path)
    from tqdm import tqdm

    samples: list[RaySample] = []
    streets = range(seed * 1_000_000, (seed + 1) * 1_000_000)
    simulate = partial(street_samples, meshes=meshes)
    with processes() as pool:
        bar = tqdm(total=count, desc="simulating", unit="object")
        for found in pool.imap(simulate, streets, chunksize=4):
            samples += found
            bar.update(len(found))
            if len(samples) >= count:
                break
        bar.close()
        pool.terminate()
    data = RaySamples.of(samples)
    data.save(path)
    return data
