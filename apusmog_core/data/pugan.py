# SPDX-License-Identifier: Apache-2.0
"""Test shapes of PU-GAN, as published; PU1K's test set has the same layout.

Folders, at any depth: `input_N` (clouds of N points, .xyz), `gt_M` (their ground truth at M points)
and meshes (.off) anywhere, matched by name.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..files import written_whole
from .clouds import read_points

PUBLISHED_SIZE = 2048


@dataclass(frozen=True)
class Shape:
    """One test shape: an input cloud and what is known of its surface."""

    name: str
    points: np.ndarray  # (n, 3)
    mesh: Path | None
    folder: Path

    def truth(self, count: int) -> np.ndarray | None:
        """The ground truth of `count` points: published, else sampled from the mesh, else None."""
        published = _folder(self.folder, f"gt_{count}")
        if published and (file := published / f"{self.name}.xyz").is_file():
            return read_points(file).points
        return sample_mesh(self.mesh, count) if self.mesh else None


def load_shapes(folder: str | Path, size: int = PUBLISHED_SIZE) -> list[Shape]:
    """The shapes of a test set with inputs of `size` points.

    Where there is no `input_SIZE`, the published inputs are thinned by farthest point sampling; if
    more points are asked for than were published, meshes are sampled, and the others left out.
    """
    folder = Path(folder)
    inputs = _folder(folder, f"input_{size}") or _folder(folder, f"input_{PUBLISHED_SIZE}")
    if inputs is None:
        raise ValueError(f"{folder}: no folder input_{size} with .xyz files in it")
    meshes = {file.stem: file for file in sorted(folder.rglob("*.off"))}
    shapes = []
    for file in sorted(inputs.glob("*.xyz")):
        mesh = meshes.get(file.stem)
        points = _sized(file, size, mesh)
        shapes += [Shape(file.stem, points, mesh, folder)] if points is not None else []
    if not shapes:
        raise ValueError(f"{folder}: no input has {size} points, and there is no mesh to sample")
    return shapes


def sample_mesh(mesh: Path, count: int) -> np.ndarray:
    """`count` points of a mesh by Poisson-disk sampling, kept in the user's cache (count, 3)."""
    digest = zlib.crc32(mesh.read_bytes())
    cached = cache_folder() / "poisson" / f"{mesh.stem}_{digest:08x}_{count}.npy"
    if cached.is_file():
        return np.load(cached)
    import open3d as o3d

    from ..surface.mesh import read_mesh

    o3d.utility.random.seed(0)
    surface = read_mesh(mesh)
    points = np.asarray(surface.sample_points_poisson_disk(count).points)
    with written_whole(cached) as place:  # others may be reading
        np.save(place, points)
    return points


def cache_folder() -> Path:
    """Where things that can be made again are kept: $XDG_CACHE_HOME/apusmog, else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "apusmog"


def _folder(root: Path, name: str) -> Path | None:
    """The first folder of this name, at any depth, that holds clouds."""
    found = [f for f in sorted([root / name, *root.rglob(name)]) if any(f.glob("*.xyz"))]
    return found[0] if found else None


def _sized(file: Path, size: int, mesh: Path | None) -> np.ndarray | None:
    from apusmog_core.evaluation.baselines import thin

    points = read_points(file).points
    if size > len(points):
        return sample_mesh(mesh, size) if mesh else None
    return points if size == len(points) else thin(points, size)
