# SPDX-License-Identifier: Apache-2.0
"""From a dense cloud to a surface: Poisson reconstruction with Open3D."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

MESHES = (".ply", ".obj", ".stl", ".off")
NORMAL_NEIGHBOURS = 16


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
    import open3d as o3d

    if len(points) < 16:
        raise ValueError(f"{len(points)} points are too few for a surface; 16 at least")
    centre = points.mean(axis=0, dtype=np.float64)
    cloud = o3d.geometry.PointCloud(o3d.utility.Vector3dVector(points - centre))
    cloud.estimate_normals(o3d.geometry.KDTreeSearchParamKNN(NORMAL_NEIGHBOURS))
    if origin is None:
        cloud.orient_normals_consistent_tangent_plane(NORMAL_NEIGHBOURS)
    else:
        cloud.orient_normals_towards_camera_location(np.asarray(origin, np.float64) - centre)
    surface, support = o3d.geometry.TriangleMesh.create_from_point_cloud_poisson(cloud, depth=depth)
    if trim > 0:
        support = np.asarray(support)
        surface.remove_vertices_by_mask(support < np.quantile(support, trim))
    surface.translate(centre)
    surface.compute_vertex_normals()
    if not o3d.io.write_triangle_mesh(str(out), surface):
        raise OSError(f"{out}: the mesh could not be written")
    return len(surface.vertices), len(surface.triangles)
