# SPDX-License-Identifier: Apache-2.0
"""A spinning LiDAR over triangle meshes: scans whose surfaces and instances are known.

Scenes live in world coordinates (ground at z = 0); points come out in the sensor's frame, x
forward. Wherever the sensor stands is `at`: (x, y, heading) in the world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from . import shapes
from .shapes import Mesh

GROUND_REFLECTIVITY = 0.2
FAINT = 0.01  # signal, relative to white paint at 100 m, that is lost half the time
HERE = (0.0, 0.0, 0.0)
HEADROOM = 2.2

# --- sensors -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beams:
    """What the maker publishes, at 10 turns a second; angles in degrees, ranges in metres."""

    elevation: tuple[float, ...]  # ring 0 is the highest
    azimuth_step: float
    noise: float
    min_range: float
    max_range: float


def _even(high: float, low: float, count: int) -> tuple[float, ...]:
    return tuple(np.linspace(high, low, count).tolist())


# fmt: off
_VLP_32C = (
    15.0, 10.333, 7.0, 4.667, 3.333, 2.333, 1.667, 1.333, 1.0, 0.667, 0.333, 0.0, -0.333, -0.667,
    -1.0, -1.333, -1.667, -2.0, -2.333, -2.667, -3.0, -3.333, -3.667, -4.0, -4.667, -5.333, -6.148,
    -7.254, -8.843, -11.31, -15.639, -25.0,
)
_PANDAR64 = (
    15.0, 11.0, 8.0, 5.0, 3.0, *(np.arange(12, -37, -1) / 6).tolist(),
    -7.0, -8.0, -9.0, -10.0, -11.0, -12.0, -13.0, -14.0, -19.0, -25.0,
)
# fmt: on

# The HDL-64E's noise is that along single rings of KITTI; see `Sensor.jittered` for the rest.
BEAMS: dict[str, Beams] = {
    "HDL-64E": Beams(_even(2, -25 / 3, 32) + _even(-53 / 6, -73 / 3, 32), 0.1728, 0.01, 0.9, 120.0),
    "VLP-16": Beams(_even(15, -15, 16), 0.2, 0.02, 0.5, 100.0),
    "VLP-32C": Beams(_VLP_32C, 0.2, 0.02, 0.5, 200.0),
    "XT32": Beams(_even(15, -16, 32), 0.18, 0.01, 0.5, 120.0),
    "Pandar64": Beams(_PANDAR64, 0.2, 0.02, 0.5, 200.0),
    "OS1-32": Beams(_even(22.5, -22.5, 32), 360 / 1024, 0.02, 0.5, 120.0),
    "OS1-64": Beams(_even(22.5, -22.5, 64), 360 / 1024, 0.02, 0.5, 120.0),
    "OS1-128": Beams(_even(22.5, -22.5, 128), 360 / 1024, 0.02, 0.5, 120.0),
}


@dataclass(frozen=True)
class Sensor:
    """One mounted sensor; angles in radians, lengths in metres."""

    elevation: tuple[float, ...]  # of each ring, falling
    azimuth_step: float
    phase: tuple[float, ...]  # azimuth of the first shot of each ring
    bias: tuple[float, ...]  # added to every range of a ring
    lift: tuple[float, ...] = ()  # metres above the sensor's centre that lasers leave from
    noise: float = 0.02  # standard deviation of the range, shot by shot
    dropout: float = 0.03  # share of returns lost whatever they hit
    min_range: float = 0.9
    max_range: float = 120.0
    height: float = 1.73

    @classmethod
    def named(cls, name: str = "HDL-64E", **changes) -> Sensor:
        """A sensor of the table, with fields replaced by `changes`."""
        if name not in BEAMS:
            raise ValueError(f"unknown sensor {name!r}; known: {', '.join(BEAMS)}")
        beams = BEAMS[name]
        sensor = cls(
            tuple(np.radians(beams.elevation).tolist()),
            float(np.radians(beams.azimuth_step)),
            phase=(0.0,) * len(beams.elevation),
            bias=(0.0,) * len(beams.elevation),
            noise=beams.noise,
            min_range=beams.min_range,
            max_range=beams.max_range,
        )
        return replace(sensor, **changes)

    def jittered(
        self, seed: int, degrees: float = 0.03, metres: float = 0.02, lift: float = 0.0
    ) -> Sensor:
        """As no two devices are alike: each ring tilted, shifted in azimuth and off in range.

        `degrees` and `metres` are deviations; on upright planes in KITTI rings differ by 2 cm, even
        ones to one side and odd ones to the other. `lift` is the most, in metres, by which the
        upper and the lower half of the lasers leave above the centre, as in an HDL-64E."""
        rng = np.random.default_rng(seed)
        rings = len(self.elevation)
        elevation = np.sort(self.elevation + rng.normal(0, np.radians(degrees), rings))[::-1]
        alternating = 0.7 * metres * (-1.0) ** np.arange(rings)
        halves = np.repeat(lift * rng.random(2), (rings - rings // 2, rings // 2))
        return replace(
            self,
            elevation=tuple(elevation.tolist()),
            phase=tuple(rng.uniform(0, self.azimuth_step, rings).tolist()),
            bias=tuple((alternating + rng.normal(0, 0.7 * metres, rings)).tolist()),
            lift=tuple(halves.tolist()) if lift else (),
        )

    @property
    def columns(self) -> int:
        return round(2 * np.pi / self.azimuth_step)


@lru_cache(maxsize=8)
def _rays(sensor: Sensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Directions (n, 3), ring (n,) and azimuth (n,) in file order of KITTI: ring by ring from
    the top, each turning left from straight ahead."""
    turn = np.arange(sensor.columns) * (2 * np.pi / sensor.columns)
    azimuth = (np.array(sensor.phase)[:, None] + turn).ravel()
    ring = np.repeat(np.arange(len(sensor.elevation)), sensor.columns)
    return unit_rays(azimuth, np.array(sensor.elevation)[ring]), ring, np.float32(azimuth)


def unit_rays(azimuth: np.ndarray, elevation: np.ndarray) -> np.ndarray:
    flat = np.cos(elevation)
    axes = [flat * np.cos(azimuth), flat * np.sin(azimuth), np.sin(elevation)]
    return np.stack(axes, -1).astype(np.float32)


# --- scenes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placed:
    """A mesh standing in the world; `speed` is along its heading, in metres a second."""

    mesh: Mesh
    name: str
    x: float
    y: float
    heading: float = 0.0
    speed: float = 0.0

    @cached_property
    def world(self) -> Mesh:
        return self.mesh.moved((self.x, self.y, 0), self.heading)

    def after(self, seconds: float) -> Placed:
        if not self.speed:
            return self
        way = self.speed * seconds
        x, y = self.x + way * np.cos(self.heading), self.y + way * np.sin(self.heading)
        return replace(self, x=x, y=y)

    @cached_property
    def footprint(self) -> np.ndarray:
        """Least and greatest x and y (2, 2) of what is in the way of others: crowns are not."""
        low = self.world.vertices[self.world.vertices[:, 2] < HEADROOM, :2]
        return np.stack([low.min(0), low.max(0)])


@dataclass(frozen=True)
class Hits:
    """What each ray met first; range is inf where it met nothing."""

    range: np.ndarray  # (n,) float32
    instance: np.ndarray  # (n,) uint32, 0 is ground
    reflectivity: np.ndarray  # (n,) float32, 0 is glass or nothing
    incidence: np.ndarray  # (n,) float32, cosine between ray and normal


class Scene:
    """Ground, flat unless given, and placed meshes; object i of the list is instance i + 1."""

    def __init__(self, objects: Sequence[Placed], ground: Mesh | None = None):
        import open3d

        self.objects = tuple(objects)
        self.ground = ground
        self.names = ("ground", *(o.name for o in self.objects))
        reach = 250.0 + max((max(abs(o.x), abs(o.y)) for o in self.objects), default=0.0)
        far = reach * np.array([(-1, -1, 0), (1, -1, 0), (1, 1, 0), (-1, 1, 0)])
        plane = shapes.solid(far, [(0, 1, 2), (0, 2, 3)], GROUND_REFLECTIVITY)
        parts = [ground or plane, *(o.world for o in self.objects)]
        # One soup of triangles is one tree for the ray caster; ids are looked up by triangle.
        soup = shapes.join(*parts)
        counts = [len(m.triangles) for m in parts]
        self._instance = np.append(
            np.repeat(np.arange(len(parts), dtype=np.uint32), counts), np.uint32(0)
        )
        self._reflectivity = np.append(soup.reflectivity, np.float32(0))
        self._caster = open3d.t.geometry.RaycastingScene(nthreads=0)
        self._caster.add_triangles(soup.vertices, soup.triangles.astype(np.uint32))

    def hits(self, directions: np.ndarray, origin: np.ndarray) -> Hits:
        """First hits of unit rays (n, 3) from one origin (3,), or from one for each (n, 3)."""
        import open3d

        rays = np.empty((len(directions), 6), np.float32)
        rays[:, :3], rays[:, 3:] = origin, directions
        answer = self._caster.cast_rays(open3d.core.Tensor.from_numpy(rays))
        distance = answer["t_hit"].numpy()
        triangle = answer["primitive_ids"].numpy()
        triangle = np.where(np.isfinite(distance), triangle, len(self._instance) - 1)
        normal = answer["primitive_normals"].numpy()
        incidence = np.abs(np.einsum("nd,nd->n", normal, directions))
        return Hits(distance, self._instance[triangle], self._reflectivity[triangle], incidence)

    def cast(self, directions: np.ndarray, origin: Sequence[float]) -> tuple[np.ndarray, ...]:
        """Range (n,), inf on a miss, and instance (n,) of the first hit of each unit ray."""
        hits = self.hits(directions, origin)
        return hits.range, hits.instance

    def after(self, seconds: float) -> Scene:
        """The scene when everything has moved on."""
        return Scene([o.after(seconds) for o in self.objects], self.ground)


# --- scans ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SimulatedScan:
    """One turn of the sensor, in its own frame, in the order of a KITTI file."""

    points: np.ndarray  # (n, 3) float32
    intensity: np.ndarray  # (n,) float32, 0 to 1
    ring: np.ndarray  # (n,) int, 0 is the highest
    azimuth: np.ndarray  # (n,) float32, radians
    instance: np.ndarray  # (n,) uint32, 0 is ground
    names: tuple[str, ...]  # class of each instance: names[instance]
    stamp: float = 0.0

    @property
    def classes(self) -> np.ndarray:
        """Class name of each point (n,)."""
        return np.array(self.names)[self.instance]


def origin_of(sensor: Sensor, at: Sequence[float]) -> np.ndarray:
    return np.array([at[0], at[1], sensor.height], np.float32)


def _turned(directions: np.ndarray, heading: float) -> np.ndarray:
    c, s = np.cos(heading), np.sin(heading)
    return directions @ np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]], np.float32)


def scan(scene: Scene, sensor: Sensor, seed: int = 0, at: Sequence[float] = HERE) -> SimulatedScan:
    """One turn of the sensor: noisy ranges, lost returns, nothing back from glass."""
    rng = np.random.default_rng(seed)
    rays, ring, azimuth = _rays(sensor)
    start = np.zeros((len(rays), 3), np.float32)  # of each ray, from the sensor's centre
    if sensor.lift:
        start[:, 2] = np.array(sensor.lift)[ring]
    hits = scene.hits(_turned(rays, at[2]), origin_of(sensor, at) + start)
    # A Lambertian echo over an inverse square law: dark, far and grazing surfaces are lost first.
    signal = hits.reflectivity * hits.incidence * (100 / hits.range) ** 2
    kept = rng.random(len(rays)) < (1 - sensor.dropout) * signal / (signal + FAINT)
    kept &= (hits.range >= sensor.min_range) & (hits.range <= sensor.max_range)
    kept = np.flatnonzero(kept)
    error = np.array(sensor.bias)[ring[kept]] + rng.normal(0, sensor.noise, len(kept))
    distance = hits.range[kept] + error.astype(np.float32)
    shine = hits.reflectivity[kept] * np.sqrt(hits.incidence[kept])
    shine = shine * rng.uniform(0.8, 1.2, len(kept))
    return SimulatedScan(
        points=start[kept] + rays[kept] * distance[:, None],
        intensity=np.round(shine.clip(0, 0.99), 2).astype(np.float32),  # as coarse as KITTI's
        ring=ring[kept],
        azimuth=azimuth[kept],
        instance=hits.instance[kept],
        names=scene.names,
    )


def visible_surface(
    scene: Scene,
    sensor: Sensor,
    instance: int,
    oversample: tuple[int, int] = (4, 4),
    at: Sequence[float] = HERE,
) -> np.ndarray:
    """The true surface (m, 3) of an instance as seen from the sensor, without noise.

    Rays are `oversample` times as dense as the sensor's, in elevation and in azimuth, and stay
    between its highest and lowest ring; what others hide, and glass, is not part of it."""
    if not 1 <= instance <= len(scene.objects):
        raise ValueError(f"instance {instance} is not in the scene (1 to {len(scene.objects)})")
    vertices = scene.objects[instance - 1].world.vertices - origin_of(sensor, at)
    directions = _window(sensor, _turned(vertices, -at[2]), oversample)
    hits = scene.hits(_turned(directions, at[2]), origin_of(sensor, at))
    seen = (hits.instance == instance) & (hits.reflectivity > 0)
    seen &= (hits.range >= sensor.min_range) & (hits.range <= sensor.max_range)
    return directions[seen] * hits.range[seen, None]


def _window(sensor: Sensor, vertices: np.ndarray, oversample: tuple[int, int]) -> np.ndarray:
    """Refined rays over the angles that these points span, seen from the sensor."""
    rings = len(sensor.elevation)
    fine = np.linspace(0, rings - 1, (rings - 1) * oversample[0] + 1)
    elevation = np.interp(fine, np.arange(rings), sensor.elevation)
    # By the nearest point of the bounding box: an edge can be seen higher up than both its ends.
    low, high = vertices.min(0), vertices.max(0)
    near = np.linalg.norm(np.maximum(0, np.maximum(low, -high))[:2])
    far = np.linalg.norm(np.maximum(np.abs(low), np.abs(high))[:2])
    least = np.arctan2(low[2], near if low[2] < 0 else far)
    most = np.arctan2(high[2], near if high[2] > 0 else far)
    elevation = elevation[(elevation >= least) & (elevation <= most)]
    middle = np.arctan2(vertices[:, 1].mean(), vertices[:, 0].mean())
    turn = np.arctan2(vertices[:, 1], vertices[:, 0]) - middle
    turn = (turn + np.pi) % (2 * np.pi) - np.pi
    step = sensor.azimuth_step / oversample[1]
    azimuth = middle + np.arange(turn.min(), turn.max() + step, step)
    grid = np.meshgrid(azimuth, elevation)
    return unit_rays(grid[0].ravel(), grid[1].ravel())
