# SPDX-License-Identifier: Apache-2.0
"""Streets full of objects, drives along them, and their files."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from ..files import check_new_folder, written_whole
from . import objects, shapes
from .sensor import Placed, Scene, Sensor, SimulatedScan, scan
from .shapes import Mesh

STORED_REFLECTIVITY = 0.3  # of meshes from files, before each is painted


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
            return objects.BUILDERS[kind](self.rng)
        mesh = stored[self.rng.integers(len(stored))].scaled(self.rng.uniform(0.93, 1.07, 3))
        shade = np.float32(objects.paint(self.rng) / STORED_REFLECTIVITY)
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
        mesh = shapes.join(mesh, objects.wheels(length, width, 0.31))
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
    count: int,
    seed: int = 0,
    sensor: Sensor | None = None,
    meshes: str | Path | None = None,
    rate: float = 10.0,
) -> Iterator[SimulatedScan]:
    """Scans of a sensor that moves along one street among moving objects; ids stay the same."""
    sensor = sensor or Sensor.named().jittered(seed)
    reach = 120.0 + 2 * STREET_SPEED * count / rate
    scene = street(seed, meshes, length=reach)
    for number in range(count):
        seconds = number / rate
        at = (STREET_SPEED * seconds, 0.0, 0.0)
        turn = scan(scene.after(seconds), sensor, seed=seed + number, at=at)
        yield replace(turn, stamp=seconds)


def write_kitti(scans: Iterable[SimulatedScan], out: str | Path) -> int:
    """A folder laid out as a KITTI raw drive, with the truth in `truth/*.npz`; returns the count.

    Each truth file has `instance` and `ring` (n,) of the points and `names`, the class of each
    instance."""
    check_new_folder(out)
    with written_whole(out) as place:
        return _write_kitti(scans, place)


def _write_kitti(scans: Iterable[SimulatedScan], out: Path) -> int:
    data, truth = out / "velodyne_points" / "data", out / "truth"
    data.mkdir(parents=True)
    truth.mkdir()
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
