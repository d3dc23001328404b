# SPDX-License-Identifier: Apache-2.0
"""Random creatures as meshes, to train on: bodies, limbs that bend and taper, hands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..surface.mesh import without_small_pieces, write_mesh

SAMPLES = 25_000  # on the surface, for the reconstruction
STEPS = 5  # of Newton's method, to the surface
OFF = 1e-3  # from it: farther ones did not arrive
CELL = 0.008  # one sample in each
DEPTH = 8  # of the octree
TRIANGLES = 40_000
THINNEST = 0.01


@dataclass
class Bones:
    """Round cones: segments with a radius at either end."""

    rng: np.random.Generator
    start: list[np.ndarray] = field(default_factory=list)
    end: list[np.ndarray] = field(default_factory=list)
    radii: list[tuple[float, float]] = field(default_factory=list)

    def grow(self, at, way, length, radii, pieces, bend) -> tuple[np.ndarray, np.ndarray]:
        """Adds a chain that bends by chance; where it ends, and which way it looks there."""
        radius = np.geomspace(*np.maximum(radii, THINNEST), pieces + 1)
        for ends in zip(radius[:-1], radius[1:], strict=True):
            way = _unit(way + bend * self.rng.standard_normal(3))
            self.start.append(at)
            at = at + way * length / pieces
            self.end.append(at)
            self.radii.append(ends)
        return at, way


def _unit(vector: np.ndarray) -> np.ndarray:
    return vector / (np.linalg.norm(vector, axis=-1, keepdims=True) + 1e-9)


def random_bones(rng: np.random.Generator) -> Bones:
    """A body about half a unit long, and two to eight limbs; half of those end in a hand."""
    bones = Bones(rng)
    way, length = _unit(rng.standard_normal(3)), rng.uniform(0.01, 0.9)
    girth = rng.uniform(0.12, 0.35)
    radii = girth, girth * rng.uniform(0.6, 1.2)
    bones.grow(-way * length / 2, way, length, radii, rng.integers(1, 4), bend=0.25)
    body = list(zip(bones.start, bones.end, strict=True))
    for _ in range(rng.integers(2, 9)):
        a, b = body[rng.integers(len(body))]
        thick = rng.uniform(0.03, 0.14)
        thin = max(THINNEST, thick * rng.uniform(0.15, 1))
        at, way = bones.grow(
            a + rng.random() * (b - a),
            _unit(rng.standard_normal(3)),
            girth + rng.uniform(0.2, 0.9),
            (thick, thin),
            rng.integers(1, 5),
            rng.uniform(0.1, 0.6),
        )
        if rng.random() < 0.5:
            _hand(bones, at, way, thin * rng.uniform(1, 2.2))
    return bones


def _hand(bones: Bones, at: np.ndarray, way: np.ndarray, size: float) -> None:
    rng = bones.rng
    bones.grow(at, way, size, (size, size), 1, bend=0.2)
    for _ in range(rng.integers(0, 5)):
        spread = way + 0.8 * rng.standard_normal(3)
        radii = size * rng.uniform(0.3, 0.6), size * 0.2
        bones.grow(at, spread, size * rng.uniform(2, 5), radii, rng.integers(1, 3), bend=0.2)


@dataclass
class Skin:
    """Where the union of the bones ends: smooth between them, and wavy."""

    start: np.ndarray  # (s, 3)
    along: np.ndarray  # (s, 3)
    radii: np.ndarray  # (s, 2)
    blend: float
    waves: np.ndarray  # (w, 5): a wave vector, its phase and its height

    @classmethod
    def over(cls, bones: Bones) -> Skin:
        rng, start = bones.rng, np.array(bones.start)
        vectors = rng.uniform(5, 25, (4, 1)) * _unit(rng.standard_normal((4, 3)))
        waves = np.hstack((vectors, rng.uniform(0, 6, (4, 1)), rng.uniform(0, 0.006, (4, 1))))
        blend = rng.uniform(0.004, 0.03)
        return cls(start, np.array(bones.end) - start, np.array(bones.radii), blend, waves)

    def distance(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of points (n, 3), negative inside, and its gradient (n, 3) but for the taper; nearly."""
        along, (thick, thin) = self.along, self.radii.T
        share = (points @ along.T - (self.start * along).sum(1)) / ((along**2).sum(1) + 1e-9)
        share = share.clip(0, 1)  # (n, s) of the way along each bone
        away = points[:, None] - (self.start + share[..., None] * along)
        length = np.sqrt((away**2).sum(-1)) + 1e-6
        to_bone = length - thick - share * (thin - thick)
        least = to_bone.min(axis=1, keepdims=True)
        weight = np.exp((least - to_bone) / self.blend)
        total = weight.sum(axis=1)
        distance = least[:, 0] - self.blend * np.log(total)
        gradient = ((weight / total[:, None] / length)[:, None] @ away)[:, 0]
        vectors, phase, height = self.waves[:, :3], self.waves[:, 3], self.waves[:, 4]
        angle = points @ vectors.T + phase
        return distance + np.sin(angle) @ height, gradient + (np.cos(angle) * height) @ vectors

    def sample(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Points (n, 3) on it, and normals."""
        area = np.linalg.norm(self.along, axis=1) * self.radii.mean(1) + 2 * (self.radii**2).sum(1)
        bone = rng.choice(len(area), SAMPLES, p=area / area.sum())
        share = rng.random((SAMPLES, 1))
        radius = (1 - share) * self.radii[bone, :1] + share * self.radii[bone, 1:]
        points = self.start[bone] + share * self.along[bone]
        points = points + radius * _unit(rng.standard_normal((SAMPLES, 3)))
        for _ in range(STEPS):
            distance, gradient = self.distance(points)
            steepness = np.maximum((gradient**2).sum(axis=1), 0.05)
            points = points - (distance / steepness)[:, None] * gradient
        distance, gradient = self.distance(points)
        there = np.abs(distance) < OFF
        return points[there], _unit(gradient[there])


def creature(seed: int | Sequence[int]):
    """The Open3D mesh of one: closed, smooth, one or two units long."""
    import open3d as o3d

    rng = np.random.default_rng(seed)
    points, normals = Skin.over(random_bones(rng)).sample(rng)
    cloud = o3d.geometry.PointCloud(o3d.utility.Vector3dVector(points))
    cloud.normals = o3d.utility.Vector3dVector(normals)
    surface, _ = o3d.geometry.TriangleMesh.create_from_point_cloud_poisson(
        cloud.voxel_down_sample(CELL), depth=DEPTH, n_threads=1
    )
    return without_small_pieces(surface).simplify_quadric_decimation(TRIANGLES)


def write_creatures(out: Path, count: int, seed: int = 0) -> None:
    """Writes so many meshes."""
    from tqdm import tqdm

    out.mkdir(parents=True, exist_ok=True)
    for number in tqdm(range(count), desc="creatures", unit="mesh"):
        write_mesh(creature((seed, number)), out / f"creature_{number:03d}.ply")
