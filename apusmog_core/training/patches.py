# SPDX-License-Identifier: Apache-2.0
"""Surface patches for training, from any folder of meshes or from a published HDF5 file."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from ..config import DataConfig, TrainConfig
from ..files import written_whole
from ..geometry import farthest, nearest_in_batch
from ..surface.mesh import MESHES, read_mesh

SPARSE = (1024, 2048, 4096)  # input samplings of one mesh
DENSE = 24576  # target sampling of one mesh
OVERDRAW = 4  # uniform samples for each Poisson-disk sample


@dataclass
class Surface:
    """One mesh as point sets, each in the order of farthest point sampling: every start of it is a
    Poisson-disk sample, so that any target size is a slice."""

    sparse: list[np.ndarray]
    dense: np.ndarray

    @classmethod
    def of(cls, path: Path, seed: int) -> Surface:
        import open3d as o3d

        mesh = read_mesh(path)
        o3d.utility.random.seed(seed)
        sparse = [poisson_disk(mesh, count) for count in SPARSE]
        return cls(sparse, poisson_disk(mesh, DENSE))


def poisson_disk(mesh, count: int) -> np.ndarray:
    points = np.asarray(mesh.sample_points_uniformly(count * OVERDRAW).points, np.float32)
    return points[farthest(points - points.mean(axis=0), count)]


class MeshPatches:
    """Patches cut from surfaces as they are asked for; the samplings are cached on disk."""

    def __init__(self, folder: str, seed: int, cache: str):
        from tqdm import tqdm

        paths = find_meshes(folder)
        paths = tqdm(paths, desc="sampling meshes", unit="mesh", disable=len(paths) < 10)
        self.surfaces = [sampled(path, seed, Path(cache)) for path in paths]
        self.trees = [[cKDTree(s) for s in (*f.sparse, f.dense)] for f in self.surfaces]

    def cut(
        self, rng: np.random.Generator, size: int, target: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """One patch: `size` input points and `target` points of the same piece of surface."""
        index = rng.integers(len(self.surfaces))
        surface, trees = self.surfaces[index], self.trees[index]
        level = int(rng.choice(len(SPARSE), p=(0.25, 0.5, 0.25)))
        sparse = surface.sparse[level]
        seed = sparse[rng.integers(len(sparse))]
        near = trees[level].query(seed, k=size)[1]
        # as dense as the input times the ratio, over a slightly larger piece than the input's
        dense = surface.dense
        share = min(len(dense), round(len(sparse) * target / size))
        reach = trees[-1].query(seed, k=min(len(dense), round(target * len(dense) / share)))[1]
        inside = np.sort(reach)
        inside = inside[inside < share]
        short = target - len(inside)
        if short > 0:  # the slice is a little uneven: take the next points in order
            rest = np.setdiff1d(np.sort(reach), inside, assume_unique=True)[:short]
            inside = np.concatenate((inside, rest))
        if len(inside) < target:
            inside = np.resize(inside, target)
        return sparse[near], dense[inside[:target]]


def find_meshes(folder: str | Path) -> list[Path]:
    """All meshes in a folder, at any depth; ValueError if there is none."""
    paths = sorted(p for p in Path(folder).rglob("*") if p.suffix.lower() in MESHES)
    if not paths:
        raise ValueError(f"{folder}: no meshes ({' '.join(MESHES)}) found")
    return paths


def sampled(path: Path, seed: int, cache: Path) -> Surface:
    """The samplings of one mesh, from the cache where they are there already."""
    digest = zlib.crc32(path.read_bytes())
    stored = cache / f"surface-{path.stem}-{digest:08x}-{seed}.npz"
    if stored.is_file():
        arrays = np.load(stored)
        return Surface([arrays[str(count)] for count in SPARSE], arrays["dense"])
    surface = Surface.of(path, seed)
    sets = {str(count): s for count, s in zip(SPARSE, surface.sparse, strict=True)}
    _store(stored, {"dense": surface.dense, **sets})
    return surface


def _store(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with written_whole(path) as place:  # others may write it, too
        np.savez(place, **arrays)


class StoredPatches:
    """Patches as PU1K and PU-GAN publish them: pairs of 256 and 1024 points."""

    def __init__(self, sparse: np.ndarray, dense: np.ndarray):
        self.sparse, self.dense = sparse, dense

    def cut(
        self, rng: np.random.Generator, size: int, target: int
    ) -> tuple[np.ndarray, np.ndarray]:
        index = rng.integers(len(self.sparse))
        sparse, dense = self.sparse[index], self.dense[index]
        return sparse[rng.permutation(len(sparse))[:size]], np.resize(dense, (target, 3))


def open_patches(data: DataConfig, seed: int, cache: str) -> MeshPatches | StoredPatches:
    """The source of patches that the settings describe."""
    if data.hdf5:
        from ..data.pu1k import read_patches

        return StoredPatches(*read_patches(data.hdf5))
    if not data.meshes:
        raise ValueError("data.meshes or data.hdf5: name a folder of meshes or a training file")
    return MeshPatches(data.meshes, seed, cache)


# --- batches -------------------------------------------------------------------------------------


def patch_batch(patches, config: TrainConfig, step: int, rank: int, size: int) -> dict[str, Tensor]:
    """This process's share of the batch of one step; depends on seed and step alone."""
    data = config.data
    ratio = float(np.random.default_rng((config.seed, step)).choice(data.ratios))
    count = round(data.points * ratio)
    target = round(data.points * ratio * data.target_factor)
    pairs, noises = [], []
    for item in range(rank, config.batch, size):
        rng = np.random.default_rng((config.seed, step, item))
        pairs.append(augment(*patches.cut(rng, data.points, target), data, rng))
        noises.append(rng.standard_normal((count, 2)))
    points = torch.from_numpy(np.stack([p for p, _ in pairs]).astype(np.float32))
    return {
        "points": points,
        "target": torch.from_numpy(np.stack([t for _, t in pairs]).astype(np.float32)),
        "neighbours": nearest_in_batch(points, config.network.neighbours),
        "noise": torch.from_numpy(np.stack(noises).astype(np.float32)),
    }


def augment(points: np.ndarray, target: np.ndarray, data: DataConfig, rng) -> tuple:
    """Unit patch, turned at random, with noise and uneven thinning as the settings say."""
    centre = points.mean(axis=0)
    radius = np.linalg.norm(points - centre, axis=1).max() + 1e-9
    turn = random_rotation(rng) if rng.random() < data.rotation else np.eye(3)
    turn = -turn if rng.random() < data.mirror else turn
    points, target = ((p - centre) / radius @ turn for p in (points, target))
    if rng.random() < data.thinning:
        points = thin_unevenly(points, rng)
    jitter = data.jitter * rng.random() * (rng.random() < data.jitter_chance)
    return points + jitter * rng.standard_normal(points.shape), target


def random_rotation(rng: np.random.Generator) -> np.ndarray:
    matrix, upper = np.linalg.qr(rng.standard_normal((3, 3)))
    matrix = matrix * np.sign(np.diag(upper))
    return matrix * np.linalg.det(matrix)


def thin_unevenly(points: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Drops up to half of one side, then repeats random others so that the size stays."""
    side = points @ random_rotation(rng)[0]
    drop = rng.random(len(points)) < 0.7 * (side - side.min()) / (np.ptp(side) + 1e-9)
    kept = points[~drop]
    if len(kept) < len(points) // 2:
        return points
    again = rng.integers(len(kept), size=len(points) - len(kept))
    spread = 0.2 * np.median(cKDTree(kept).query(kept, k=2)[0][:, 1])
    return np.concatenate((kept, kept[again] + spread * rng.standard_normal((len(again), 3))))
