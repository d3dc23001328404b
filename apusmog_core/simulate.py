# SPDX-License-Identifier: Apache-2.0
"""A spinning LiDAR over triangle meshes: scans whose surfaces and instances are known.

Scenes live in world coordinates (ground at z = 0); points come out in the sensor's frame, x
forward. Wherever the sensor stands is `at`: (x, y, heading) in the world."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from apusmog_core import shapes
from apusmog_core.shapes import Mesh

GROUND_REFLECTIVITY = 0.2
STORED_REFLECTIVITY = 0.3  # of meshes from files, before each is painted
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
# fmt: on

# The HDL-64E's noise is that along single rings of KITTI; see `Sensor.jittered` for the rest.
BEAMS: dict[str, Beams] = {
    "HDL-64E": Beams(_even(2, -25 / 3, 32) + _even(-53 / 6, -73 / 3, 32), 0.1728, 0.01, 0.9, 120.0),
    "VLP-16": Beams(_even(15, -15, 16), 0.2, 0.02, 0.5, 100.0),
    "VLP-32C": Beams(_VLP_32C, 0.2, 0.02, 0.5, 200.0),
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

    def jittered(self, seed: int, degrees: float = 0.03, metres: float = 0.02) -> Sensor:
        """As no two devices are alike: each ring tilted, shifted in azimuth and off in range.

        `degrees` and `metres` are deviations; on upright planes in KITTI rings differ by 2 cm."""
        rng = np.random.default_rng(seed)
        rings = len(self.elevation)
        elevation = np.sort(self.elevation + rng.normal(0, np.radians(degrees), rings))[::-1]
        return replace(
            self,
            elevation=tuple(elevation.tolist()),
            phase=tuple(rng.uniform(0, self.azimuth_step, rings).tolist()),
            bias=tuple(rng.normal(0, metres, rings).tolist()),
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
    """Flat ground and placed meshes; object i of the list is instance i + 1."""

    def __init__(self, objects: Sequence[Placed]):
        import open3d

        self.objects = tuple(objects)
        self.names = ("ground", *(o.name for o in self.objects))
        reach = 250.0 + max((max(abs(o.x), abs(o.y)) for o in self.objects), default=0.0)
        far = reach * np.array([(-1, -1, 0), (1, -1, 0), (1, 1, 0), (-1, 1, 0)])
        plane = shapes.solid(far, [(0, 1, 2), (0, 2, 3)], GROUND_REFLECTIVITY)
        parts = [plane, *(o.world for o in self.objects)]
        # One soup of triangles is one tree for the ray caster; ids are looked up by triangle.
        soup = shapes.join(*parts)
        counts = [len(m.triangles) for m in parts]
        self._instance = np.append(
            np.repeat(np.arange(len(parts), dtype=np.uint32), counts), np.uint32(0)
        )
        self._reflectivity = np.append(soup.reflectivity, np.float32(0))
        self._caster = open3d.t.geometry.RaycastingScene(nthreads=0)
        self._caster.add_triangles(soup.vertices, soup.triangles.astype(np.uint32))

    def hits(self, directions: np.ndarray, origin: Sequence[float]) -> Hits:
        """First hits of unit rays (n, 3) from one origin."""
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
        return Scene([o.after(seconds) for o in self.objects])


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
    hits = scene.hits(_turned(rays, at[2]), origin_of(sensor, at))
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
        points=rays[kept] * distance[:, None],
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


# --- streets -------------------------------------------------------------------------------------

# Right-hand traffic along x, the sensor on y = 0. From the middle of the road outwards: lanes,
# cyclists, parked vehicles, kerb, furniture, pavement, gardens, houses; each strip has room for
# the widest of its kind, so that what moves passes what stands.
LANES = ((0.0, 0.0), (3.5, np.pi))  # y and heading
KERBS = ((-5.4, -1, 0.0), (8.9, 1, np.pi))  # y, side and heading
STREET_SPEED = 8.0
VEHICLES = ("car", "car", "car", "van", "truck")


def street(seed: int = 0, meshes: str | Path | None = None, length: float = 120.0) -> Scene:
    """A street along x, `length` metres with the origin in the middle: traffic, parked vehicles,
    persons, cyclists, furniture, trees, bushes, walls and houses, none overlapping.

    `meshes` is a folder (see `load_meshes`) to draw from beside the built-in shapes."""
    rng = np.random.default_rng(seed)
    lot = _Lot(rng, length, _Catalogue(meshes, rng))

    def anyhow() -> float:
        return rng.uniform(-np.pi, np.pi)

    def along(heading: float, spread: float = 0.03) -> float:
        return heading + rng.choice([0, np.pi]) + rng.normal(0, spread)

    for y, heading in LANES:
        lot.fill((2, 6), VEHICLES, y, 0.15, lambda h=heading: h, STREET_SPEED, gap=2.0)
    for kerb, side, heading in KERBS:
        lot.fill((2, 5), ["cyclist"], kerb - side * 3.0, 0.06, lambda h=heading: h, 4.0)
        lot.fill((5, 14), VEHICLES, kerb - side * 1.3, 0.08, lambda h=heading: along(h), gap=0.6)
        lot.fill((6, 16), ["pole", "tree", "furniture"], kerb + side * 1.0, 0.2, anyhow)
        lot.fill((2, 6), ["person"], kerb + side * 0.3, 0.5, anyhow)
        lot.fill((1, 5), ["bush"], kerb + side * 1.3, 0.1, lambda: along(0.0))
        for way, strip in ((0.0, 3.1), (np.pi, 4.2)):
            lot.fill((2, 6), ["person"], kerb + side * strip, 0.1, lambda h=way: h, 1.3)
        lot.fill((2, 8), ["wall", "bush", "bush", "tree"], kerb + side * 7, 0.5, lambda: along(0.0))
        lot.fill((3, 9), ["building"], kerb + side * 16, 2.0, lambda h=heading: h)
    return Scene(lot.objects)


class _Lot:
    """Ground on which things are put down where there is room."""

    OWN_VEHICLE = np.array([(-3.5, -1.5), (4.5, 1.5)])  # nothing stands where the sensor does

    def __init__(self, rng: np.random.Generator, length: float, pick: _Catalogue):
        self.rng, self.length, self.pick = rng, length, pick
        self.objects: list[Placed] = []
        self.taken = [self.OWN_VEHICLE]

    def fill(self, count, kinds, y, spread, heading, speed=0.0, gap=0.3) -> None:
        """Put down a number of things, `count` (least, most) for 120 m, along a strip at y."""
        least, most = np.round(np.array(count) * self.length / 120).astype(int)
        for _ in range(self.rng.integers(least, most + 1)):
            kind = str(self.rng.choice(kinds))
            thing = Placed(self.pick(kind), kind, 0, 0, heading(), speed)
            self._put(thing, y, spread, gap)

    def _put(self, thing: Placed, y: float, spread: float, gap: float) -> None:
        """At a free place of the strip; left out if none is found soon."""
        for _ in range(12):
            x = self.rng.uniform(-self.length / 2, self.length / 2)
            place = np.array([x, self.rng.normal(y, spread)])
            low, high = thing.footprint + place + [[-gap / 2], [gap / 2]]
            taken = np.array(self.taken)  # (t, 2, 2)
            if not ((taken[:, 1] > low) & (taken[:, 0] < high)).all(-1).any():
                self.taken.append(np.stack([low, high]))
                self.objects.append(replace(thing, x=place[0], y=place[1]))
                return


class _Catalogue:
    """Draws a mesh of a class: built-in, or from a folder where there is one of that class."""

    def __init__(self, folder: str | Path | None, rng: np.random.Generator):
        self.rng = rng
        self.folder = load_meshes(str(folder)) if folder else {}

    def __call__(self, kind: str) -> Mesh:
        stored = self.folder.get(kind, ())
        if not stored or self.rng.random() < 0.4:
            return shapes.BUILDERS[kind](self.rng)
        mesh = stored[self.rng.integers(len(stored))].scaled(self.rng.uniform(0.93, 1.07, 3))
        shade = np.float32(shapes.paint(self.rng) / STORED_REFLECTIVITY)
        return replace(mesh, reflectivity=mesh.reflectivity * shade)


# A manifest's first word of a class -> ours. Trees are left out: their leaves are painted on cards.
_CLASSES = {
    "car": "car", "utv": "car", "van": "van", "truck": "truck", "bus": "truck",
    "person": "person", "street": "furniture", "building": "building",
}  # fmt: skip


@lru_cache(maxsize=2)
def load_meshes(folder: str) -> dict[str, tuple[Mesh, ...]]:
    """Meshes of a folder by class; its MANIFEST.tsv has the columns `name` and `class`."""
    manifest = Path(folder) / "MANIFEST.tsv"
    if not manifest.is_file():
        raise ValueError(f"{manifest} is missing; it must list the meshes, columns name and class")
    found: dict[str, list[Mesh]] = {}
    with manifest.open(newline="") as lines:
        for row in csv.DictReader(lines, delimiter="\t"):
            kind = _CLASSES.get(row["class"].split("(")[0])
            if kind:
                path = manifest.with_name(row["name"] + ".ply")
                found.setdefault(kind, []).append(_load(path, kind, "no wheels" in row["class"]))
    return {kind: tuple(meshes) for kind, meshes in found.items()}


def _load(path: Path, kind: str, add_wheels: bool) -> Mesh:
    import open3d

    if not path.is_file():
        raise ValueError(f"{path} is missing, though MANIFEST.tsv names it")
    read = open3d.io.read_triangle_mesh(str(path))
    mesh = shapes.solid(np.asarray(read.vertices), np.asarray(read.triangles), STORED_REFLECTIVITY)
    if not len(mesh.triangles):
        raise ValueError(f"{path} holds no triangles; remove it or its row of MANIFEST.tsv")
    if kind == "car":
        mesh = _glazed(mesh)
    if add_wheels:
        length, width, _ = mesh.size
        mesh = shapes.join(mesh, shapes.wheels(length, width, 0.31))
    return mesh


def _glazed(mesh: Mesh) -> Mesh:
    """Windows of a car without materials: steep triangles between belt line and roof."""
    corners = mesh.vertices[mesh.triangles]  # (f, 3, 3)
    normal = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    steep = np.abs(normal[:, 2]) < 0.85 * np.linalg.norm(normal, axis=1)
    height = corners[..., 2] / mesh.vertices[:, 2].max()
    glass = steep & (height.min(1) > 0.62) & (height.mean(1) < 0.95)
    return replace(mesh, reflectivity=np.where(glass, np.float32(shapes.GLASS), mesh.reflectivity))


# --- drives and files ----------------------------------------------------------------------------


def drive(
    frames: int,
    seed: int = 0,
    sensor: Sensor | None = None,
    meshes: str | Path | None = None,
    rate: float = 10.0,
) -> Iterator[SimulatedScan]:
    """Scans of a sensor that moves along one street among moving objects; ids stay the same."""
    sensor = sensor or Sensor.named().jittered(seed)
    reach = 120.0 + 2 * STREET_SPEED * frames / rate
    scene = street(seed, meshes, length=reach)
    for frame in range(frames):
        seconds = frame / rate
        at = (STREET_SPEED * seconds, 0.0, 0.0)
        turn = scan(scene.after(seconds), sensor, seed=seed + frame, at=at)
        yield replace(turn, stamp=seconds)


def write_kitti(scans: Iterable[SimulatedScan], out: str | Path) -> int:
    """A folder laid out as a KITTI raw drive, with the truth in `truth/*.npz`; returns the count.

    Each truth file has `instance` and `ring` (n,) of the points and `names`, the class of each
    instance."""
    out = Path(out)
    data, truth = out / "velodyne_points" / "data", out / "truth"
    data.mkdir(parents=True, exist_ok=True)
    truth.mkdir(exist_ok=True)
    stamps = []
    for i, turn in enumerate(scans):
        rows = np.column_stack([turn.points, turn.intensity]).astype("<f4")
        rows.tofile(data / f"{i:010d}.bin")
        labels = dict(instance=turn.instance, ring=turn.ring, names=np.array(turn.names))
        np.savez_compressed(truth / f"{i:010d}.npz", **labels)
        stamps.append(np.datetime64("2000-01-01T00:00:00", "ns") + np.int64(turn.stamp * 1e9))
    text = "".join(str(stamp).replace("T", " ") + "\n" for stamp in stamps)
    (out / "velodyne_points" / "timestamps.txt").write_text(text)
    return len(stamps)
