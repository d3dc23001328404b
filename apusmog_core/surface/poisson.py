# SPDX-License-Identifier: Apache-2.0
"""The surface of a cloud by Open3D: `python -m apusmog_core.surface.poisson POINTS SURFACE`.

A process of its own, since Open3D crashes on some clouds. Both files are .npz; a cloud that has no
surface is one line on standard error and the exit code REFUSED.
"""

from __future__ import annotations

import sys

import numpy as np

REFUSED = 2
NORMAL_NEIGHBOURS = 16
AGREEING_NEIGHBOURS = 10  # more of them reach across to the next part, and turn it inside out


def poisson(
    points: np.ndarray, depth: int, trim: float, origin: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Vertices (n, 3), their normals (n, 3) and triangles (m, 3) around points (k, 3)."""
    import open3d as o3d

    cloud = o3d.geometry.PointCloud(o3d.utility.Vector3dVector(points))
    cloud.estimate_normals(o3d.geometry.KDTreeSearchParamKNN(NORMAL_NEIGHBOURS))
    if origin is None:
        _orient(cloud)
    else:
        cloud.orient_normals_towards_camera_location(origin)
    surface, support = o3d.geometry.TriangleMesh.create_from_point_cloud_poisson(
        cloud, depth=int(depth)
    )
    if trim > 0:
        support = np.asarray(support)
        surface.remove_vertices_by_mask(support < np.quantile(support, trim))
    if not len(surface.triangles):
        raise ValueError("the points show no surface")
    surface.compute_vertex_normals()
    parts = dict(
        vertices=surface.vertices, normals=surface.vertex_normals, triangles=surface.triangles
    )
    return {name: np.asarray(part) for name, part in parts.items()}


def _orient(cloud) -> None:
    """Make the normals of an Open3D cloud agree with each other."""
    import open3d as o3d

    exact = np.asarray(cloud.points).copy()
    size = np.ptp(exact, axis=0).max()
    try:
        cloud.orient_normals_consistent_tangent_plane(AGREEING_NEIGHBOURS)
    except RuntimeError:  # Qhull cannot work on exact spheres and planes
        rng = np.random.default_rng(0)
        cloud.points = o3d.utility.Vector3dVector(exact + rng.normal(0, 1e-5 * size, exact.shape))
        try:
            cloud.orient_normals_consistent_tangent_plane(AGREEING_NEIGHBOURS)
        except RuntimeError as error:
            raise ValueError("the points show no surface: their normals do not agree") from error
        cloud.points = o3d.utility.Vector3dVector(exact)


def main(source: str, target: str) -> None:
    with np.load(source) as given:
        arguments = dict(given)
    try:
        surface = poisson(**arguments)
    except (ValueError, RuntimeError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(REFUSED)
    except MemoryError:
        sys.exit("not enough memory for the surface")
    np.savez(target, **surface)


if __name__ == "__main__":
    main(*sys.argv[1:])
