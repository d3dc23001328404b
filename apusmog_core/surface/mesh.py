# SPDX-License-Identifier: Apache-2.0
"""Meshes with Open3D: read, and reconstructed from a dense cloud (Poisson)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ..data import meshes
from .poisson import REFUSED

MESHES = tuple(meshes.MESH_WRITERS)
POISSON = ("-m", "apusmog_core.surface.poisson")


def read_mesh(path: str | Path):
    """The Open3D mesh of a file; ValueError if there is none in it."""
    import open3d as o3d

    if Path(path).suffix.lower() == ".off":
        vertices, triangles = meshes.read_off(path)
        mesh = o3d.geometry.TriangleMesh(
            o3d.utility.Vector3dVector(vertices), o3d.utility.Vector3iVector(triangles)
        )
    else:
        mesh = o3d.io.read_triangle_mesh(str(path))
    if not mesh.has_triangles():
        raise ValueError(f"{path}: no triangles; expected a mesh (.off .obj .ply .stl)")
    return mesh


def reconstruct(
    points: np.ndarray,
    out: str | Path,
    origin: Sequence[float] | None = None,
    depth: int = 8,
    trim: float = 0.0,
) -> tuple[int, int]:
    """Write the surface of a cloud (n, 3) as a mesh; the numbers of its vertices and triangles.

    Normals face the sensor at `origin` where there is one, and agree with each other otherwise.
    `trim` is the share of vertices to cut away where the fewest points support them.
    """
    if len(points) < 16:
        raise ValueError(f"{len(points)} points are too few for a surface; 16 at least")
    centre = points.mean(axis=0, dtype=np.float64)
    spread = np.sqrt(np.maximum(np.linalg.eigvalsh(np.cov((points - centre).T)), 0))
    if not spread[1] > 1e-6 * spread[2] > 0:
        raise ValueError("the points lie in one place or on one line: they show no surface")
    given = dict(points=points - centre, depth=depth, trim=trim)
    if origin is not None:
        given["origin"] = np.asarray(origin, np.float64) - centre
    surface = _poisson_apart(given)
    vertices, triangles = surface["vertices"] + centre, surface["triangles"]
    meshes.write_mesh(out, vertices, triangles, surface["normals"])
    return len(vertices), len(triangles)


def _poisson_apart(given: dict[str, object]) -> dict[str, np.ndarray]:
    """Run poisson.py in a process of its own: on odd clouds Open3D crashes, or talks at length."""
    if find_spec("open3d") is None:
        raise ModuleNotFoundError("No module named 'open3d'", name="open3d")
    with tempfile.TemporaryDirectory(prefix="apusmog-") as folder:
        files = [str(Path(folder, name)) for name in ("points.npz", "surface.npz")]
        np.savez(files[0], **given)
        ended = subprocess.run(
            [sys.executable, *POISSON, *files],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        if ended.returncode < 0:
            raise ValueError(
                f"Open3D's Poisson reconstruction crashed (signal {-ended.returncode}) on these "
                "points; try another depth, or a cloud without far outliers"
            )
        if ended.returncode:
            said = ended.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
            kind = ValueError if ended.returncode == REFUSED else OSError
            raise kind(said[-1])
        with np.load(files[1]) as surface:
            return dict(surface)
