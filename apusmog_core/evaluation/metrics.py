# SPDX-License-Identifier: Apache-2.0
"""How good an upsampled cloud is: scores on shapes, and on rings that were held out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy.spatial import cKDTree

from ..surface.mesh import read_mesh

F_DISTANCES = (0.05, 0.10, 0.20)  # metres
THICKNESS_NEIGHBOURS = 16
RAY_ANGLE = 0.003  # radians: about the azimuth step of a spinning LiDAR
FREE_BEYOND = 0.3  # metres
SAME_POINT = 1e-5  # metres: an output point this close to an input point is that point


def distances(points: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Distance from each point to the nearest of the reference (n,)."""
    return cKDTree(reference).query(points)[0]


# --- shapes --------------------------------------------------------------------------------------


def unit_ball(points: np.ndarray) -> np.ndarray:
    """Centred on the mean, divided by the largest distance to it."""
    centred = points - points.mean(axis=0, dtype=np.float64)
    return centred / max(np.linalg.norm(centred, axis=1).max(), 1e-12)


def shape_scores(prediction: np.ndarray, truth: np.ndarray, mesh=None) -> dict[str, float]:
    """CD, HD, HD-sum (squared distances, each cloud in its own unit ball) and P2F, unscaled.

    HD is the larger of the two one-way maxima, HD-sum their sum (what PU-GAN's script prints).
    P2F is the mean distance to the mesh in original coordinates; NaN where there is no mesh.
    """
    predicted, true = unit_ball(prediction), unit_ball(truth)
    there, back = distances(predicted, true) ** 2, distances(true, predicted) ** 2
    p2f = np.array([np.nan]) if mesh is None else distance_to_mesh(prediction, mesh)
    return {
        "cd": float(there.mean() + back.mean()),
        "hd": float(max(there.max(), back.max())),
        "hd_sum": float(there.max() + back.max()),
        "p2f": float(p2f.mean()),
        "p2f_std": float(p2f.std()),
    }


def mesh_surface(path: str | Path):
    """The triangles of a mesh file as an Open3D scene that answers distance queries."""
    import open3d as o3d

    mesh = read_mesh(path)
    scene = o3d.t.geometry.RaycastingScene()
    scene.add_triangles(o3d.t.geometry.TriangleMesh.from_legacy(mesh))
    return scene


def distance_to_mesh(points: np.ndarray, scene) -> np.ndarray:
    """Unsquared distance from each point to the surface of an Open3D RaycastingScene (n,)."""
    return scene.compute_distance(np.ascontiguousarray(points, dtype=np.float32)).numpy()


# --- ring hold-out -------------------------------------------------------------------------------


class MeasuredRays:
    """The rays of one scan: what they say about the space in front of their returns."""

    def __init__(self, points: np.ndarray, origin: np.ndarray | None = None):
        self.origin = np.zeros(3) if origin is None else np.asarray(origin, dtype=np.float64)
        direction, self.range = self._polar(points)
        self.tree = cKDTree(direction)

    def _polar(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rays = points - self.origin
        distance = np.linalg.norm(rays, axis=1)
        return rays / np.maximum(distance, 1e-9)[:, None], distance

    def free(self, points: np.ndarray) -> np.ndarray:
        """Which points hang in free space: the measured ray nearest in direction, if within
        RAY_ANGLE, went on at least FREE_BEYOND past the point (n,) bool."""
        direction, distance = self._polar(points)
        angle, ray = self.tree.query(direction, distance_upper_bound=RAY_ANGLE)
        seen = np.isfinite(angle)
        beyond = np.full(len(points), -np.inf)
        beyond[seen] = self.range[ray[seen]] - distance[seen]
        return beyond >= FREE_BEYOND


def ring_scores(output: np.ndarray, held: np.ndarray, full: np.ndarray) -> dict[str, float]:
    """Scores of one object of which the `held` points of all, `full`, were not given, metres.

    completeness   mean distance from a held point to the nearest output point
    hallucination  mean distance from an output point to the nearest measured point
    f_5 f_10 f_20  harmonic mean of the share of held points within 5, 10, 20 cm of the output
                   and the share of output points within it of a measured point
    thickness      mean over the output of the standard deviation of the 16 nearest output points
                   along the normal of their plane: 0 for a clean flat surface
    """
    missed, invented = distances(held, output), distances(output, full)
    scores = {"completeness": float(missed.mean()), "hallucination": float(invented.mean())}
    for d in F_DISTANCES:
        scores[f"f_{round(100 * d)}"] = harmonic((missed <= d).mean(), (invented <= d).mean())
    scores["thickness"] = surface_thickness(output)
    return scores


def harmonic(a: float, b: float) -> float:
    return float(2 * a * b / (a + b)) if a + b > 0 else 0.0


def surface_thickness(points: np.ndarray, neighbours: int = THICKNESS_NEIGHBOURS) -> float:
    """Mean deviation of neighbouring points from their common plane, metres."""
    k = min(neighbours, len(points))
    if k < 4:  # three points always share a plane
        return 0.0
    _, index = cKDTree(points).query(points, k=k)
    patch = points[index].astype(np.float64)  # (n, k, 3)
    patch -= patch.mean(axis=1, keepdims=True)
    least = np.linalg.eigvalsh(np.einsum("nki,nkj->nij", patch, patch) / k)[:, 0]
    return float(np.sqrt(np.maximum(least, 0)).mean())


def free_space_share(output: np.ndarray, points: np.ndarray, rays: MeasuredRays) -> float:
    """Share of the generated points (output that is not input) that hang in measured free space."""
    generated = output[distances(output, points) > SAME_POINT]
    return float(rays.free(generated).mean()) if len(generated) else 0.0
