# SPDX-License-Identifier: Apache-2.0
"""The picture of one shape at several ratios, and the surfaces through its points."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from apusmog_core.evaluation.metrics import distance_to_mesh, mesh_surface
from apusmog_core.geometry import farthest
from apusmog_core.show.picture import Camera, aim, look_at
from apusmog_core.simulate import shapes
from apusmog_core.surface.mesh import reconstruct
from apusmog_core.upsampler import Upsampler

from .drawing import (
    HEAD,
    MARGINS,
    TEXT,
    add_panel,
    colours_by_depth,
    draw_dots,
    new_figure,
    save_figure,
)

RATIOS = (1.98, 4.0, 7.72, 16.0)
SHAPE_POINTS = 1024
SKIN = (0.42, 0.62, 0.86)


def ratios(up: Upsampler, out: Path, shape, seed: int = 0) -> Path:
    """An Open3D mesh at several ratios from the same weights, and the Poisson surface of each."""
    sparse, truth = sample_mesh(shape, SHAPE_POINTS, seed), _scene(shape)
    camera = _above(sparse)
    flat, size = camera.project(sparse)[0], np.ptp(sparse, axis=0).max()
    figure = new_figure(15, 6.3)
    grid = figure.add_gridspec(2, 1 + len(RATIOS), hspace=0.02, wspace=0.02, **MARGINS)
    for column, ratio in enumerate((1.0, *RATIOS)):
        points = sparse if column == 0 else up.upsample(sparse, ratio)
        away = distance_to_mesh(points, truth).mean() / size
        top, below = (add_panel(figure, grid[row, column]) for row in range(2))
        name = "input" if column == 0 else f"× {ratio:g}"
        top.set_title(f"{name}: {len(points):,} points", **HEAD)
        draw_dots(top, camera, points, colours_by_depth(camera, points), 150 / np.sqrt(len(points)))
        aim(top, flat.min(axis=0), flat.max(axis=0))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "surface.ply"
            reconstruct(points, file)
            found = mesh_surface(file)
        aim(below, flat.min(axis=0), flat.max(axis=0))
        _render(below, found, camera)
        below.set_xlabel(f"mean error {1000 * away:.2f} ‰ of the size", **TEXT)
    return save_figure(figure, out)


def knot():
    """A trefoil: curved everywhere, with strands that pass close to each other."""
    t = np.linspace(0, 2 * np.pi, 241)
    path = np.stack((np.sin(t) + 2 * np.sin(2 * t), np.cos(t) - 2 * np.cos(2 * t), -np.sin(3 * t)))
    sides = 24
    tube = shapes.tube(path.T, 0.62, 0.5, sides)
    skin = tube.triangles[: -2 * (sides - 2)]  # without the lids at its ends, which meet
    return to_open3d(tube.vertices, skin % (len(tube.vertices) - sides))


def to_open3d(vertices: np.ndarray, triangles: np.ndarray):
    import open3d as o3d

    return o3d.geometry.TriangleMesh(
        o3d.utility.Vector3dVector(vertices), o3d.utility.Vector3iVector(triangles)
    )


def sample_mesh(mesh, count: int, seed: int) -> np.ndarray:
    """Evenly spread points (count, 3) of a mesh."""
    import open3d as o3d

    o3d.utility.random.seed(seed)
    points = np.asarray(mesh.sample_points_uniformly(4 * count).points, np.float32)
    return points[farthest(points, count)]


def _scene(mesh):
    import open3d as o3d

    scene = o3d.t.geometry.RaycastingScene()
    scene.add_triangles(o3d.t.geometry.TriangleMesh.from_legacy(mesh))
    return scene


def _above(points: np.ndarray) -> Camera:
    middle = (points.min(axis=0) + points.max(axis=0)) / 2
    return look_at(
        middle + 2.5 * np.ptp(points, axis=0).max() * np.array([0.25, -0.45, 0.85]), middle
    )


def _render(axes, scene, camera: Camera) -> None:
    """The lit surface, one ray for each pixel of the panel."""
    box = axes.get_window_extent()
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    x, y = np.meshgrid(
        np.linspace(left, right, int(box.width)), np.linspace(low, high, int(box.height))
    )
    ahead = np.stack((x, y, -np.ones_like(x)), axis=-1) @ camera.rotation
    rays = np.concatenate((np.broadcast_to(camera.eye, ahead.shape), ahead), axis=-1)
    hits = scene.cast_rays(rays.astype(np.float32))
    normal = hits["primitive_normals"].numpy() @ camera.rotation.T  # (h, w, 3): right, up, back
    normal *= np.sign(normal[..., 2:])
    light = np.array([-0.45, 0.6, 0.66])
    shade = 0.3 + 0.75 * np.clip(normal @ light, 0, 1)
    pixels = np.dstack(
        [*(np.clip(shade * c, 0, 1) for c in SKIN), np.isfinite(hits["t_hit"].numpy())]
    )
    axes.imshow(pixels, origin="lower", extent=(left, right, low, high), aspect="auto")
