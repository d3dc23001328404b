# SPDX-License-Identifier: Apache-2.0
"""Noise is found, taken out where there is some, and clean clouds stay as they are."""

import numpy as np
import pytest
from scipy.spatial import cKDTree

from apusmog_core import cli
from apusmog_core.geometry import farthest
from apusmog_core.surface.denoise import (
    BANDWIDTHS,
    LARGEST_MOVE,
    all_normals,
    clean,
    estimate_noise,
    even_out,
    fit,
    load_cleaner,
    settle,
    typical_spacing,
)
from apusmog_core.upsampler import Upsampler


def sphere(count: int = 2048) -> np.ndarray:
    points = np.random.default_rng(0).normal(size=(8 * count, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    return points[farthest(points, count)]


def noisy(points: np.ndarray, spacings: float) -> np.ndarray:
    noise = np.random.default_rng(1).normal(size=points.shape)
    return points + spacings * typical_spacing(points) * noise


def off_sphere(points: np.ndarray) -> float:
    return float(np.sqrt(np.mean((np.linalg.norm(points, axis=1) - 1) ** 2)))


def test_a_clean_cloud_stays_as_it_is():
    points = sphere()
    assert clean(points)[0] is points


def test_few_points_stay_as_they_are():
    points = noisy(sphere(1000), 0.3)
    assert clean(points)[0] is points


@pytest.mark.parametrize("count", [256, 512, 2048])
def test_a_clean_box_keeps_its_corners(count):
    points = np.random.default_rng(0).uniform(-1, 1, size=(8 * count, 3))
    points /= np.abs(points).max(axis=1, keepdims=True)
    points = points[farthest(points, count)]
    off = np.abs(np.abs(clean(points)[0]).max(axis=1) - 1)
    assert np.sqrt(np.mean(off**2)) < 0.02 * typical_spacing(points)


@pytest.mark.parametrize("spacings", [0.15, 0.3, 0.45])
def test_noise_is_estimated_and_more_than_halved_on_a_sphere(spacings):
    points = noisy(sphere(), spacings)
    true = spacings * typical_spacing(sphere())
    assert estimate_noise(points) == pytest.approx(true, rel=0.35)
    assert off_sphere(clean(points)[0]) < 0.5 * off_sphere(points)


def test_no_point_moves_farther_than_its_noise_explains():
    points = noisy(sphere(), 0.3)
    points[0] *= 1.5  # an outlier, or the tip of something thin
    estimate = estimate_noise(points)
    moved = np.linalg.norm(clean(points)[0] - points, axis=1)
    assert moved.max() <= LARGEST_MOVE * estimate * (1 + 1e-6)


def plate(count: int = 2048) -> np.ndarray:
    points = np.zeros((8 * count, 3))
    points[:, :2] = np.random.default_rng(0).uniform(-1, 1, (8 * count, 2))
    return points[farthest(points, count)]


def beyond(cloud: np.ndarray) -> np.ndarray:
    """How far the points of a plate are beyond its border."""
    return np.maximum(np.abs(cloud[:, :2]).max(axis=1) - 1, 0)


def test_points_that_noise_moved_beyond_the_border_of_a_plate_come_back():
    points = noisy(plate(), 0.3)
    assert beyond(clean(points)[0]).sum() < 0.7 * beyond(points).sum()


def test_points_that_are_evened_out_leave_smaller_holes_and_stay_on_their_surface():
    points = sphere(1024)
    even = even_out(points, points[:0])

    def holes(cloud: np.ndarray) -> float:
        return np.mean(cKDTree(cloud).query(sphere(8192))[0] ** 2)

    assert holes(even) < 0.95 * holes(points)
    assert off_sphere(even) < 0.03 * typical_spacing(points)


def test_a_plate_that_is_evened_out_does_not_grow():
    assert beyond(even_out(plate(), plate(0))).max() < 0.2 * typical_spacing(plate())


def test_points_that_are_evened_out_keep_clear_of_those_that_stay():
    fixed, new = sphere(1024), np.random.default_rng(3).normal(size=(1024, 3))
    new /= np.linalg.norm(new, axis=1, keepdims=True)

    def distances(cloud: np.ndarray) -> np.ndarray:
        return cKDTree(fixed).query(cloud)[0]

    near = distances(new) < 0.2 * typical_spacing(fixed)
    assert np.median(distances(even_out(new, fixed))[near]) > 2 * np.median(distances(new)[near])


def test_twins_are_cleaned_alike():
    points = noisy(sphere(1024), 0.3)
    np.testing.assert_allclose(clean(np.repeat(points, 2, axis=0))[0][::2], clean(points)[0])


def test_without_a_cleaner_clouds_are_upsampled_as_they_are():
    points = noisy(sphere(1024), 0.4)
    cleaned, as_is = (
        Upsampler.load("shape", "cpu", denoise=denoise).upsample(points, 2)
        for denoise in (True, False)
    )
    assert off_sphere(cleaned) < 0.85 * off_sphere(as_is)


def test_what_is_made_of_a_noisy_cloud_settles_on_its_surface():
    points = noisy(sphere(), 0.3)
    cleaned, noise = clean(points)
    made = (cleaned + cleaned[cKDTree(cleaned).query(cleaned, k=2)[1][:, 1]]) / 2
    assert off_sphere(settle(made, cleaned, points, noise)) < 0.9 * off_sphere(made)


def test_a_file_that_is_no_cleaner_is_refused(tmp_path):
    (tmp_path / "notes.pth").write_text("nothing")
    with pytest.raises(ValueError, match="not a cleaner"):
        load_cleaner(tmp_path / "notes.pth")


def test_turned_scaled_and_shifted_clouds_are_cleaned_alike():
    points = noisy(sphere(1024), 0.3)
    turn = np.linalg.qr(np.random.default_rng(2).normal(size=(3, 3)))[0]
    again = (clean(30 * points @ turn + 5)[0] - 5) @ turn.T / 30
    np.testing.assert_allclose(again, clean(points)[0], atol=1e-4)


def test_long_clouds_are_cleaned_piece_by_piece(monkeypatch):
    points = noisy(sphere(1024), 0.3)
    whole, _ = clean(points)
    monkeypatch.setattr("apusmog_core.surface.denoise.CHUNK", 300)
    np.testing.assert_allclose(clean(points)[0], whole, atol=1e-9)


def test_fits_of_what_faces_the_same_way_do_not_cut_a_corner():
    along, out = (c.ravel() for c in np.meshgrid(np.arange(-10.0, 10), np.arange(20.0)))
    floor, wall = np.stack((out, along, 0 * out), axis=1), np.stack((0 * out, along, out), axis=1)
    points = np.unique(np.concatenate((floor, wall)), axis=0)
    tree, row = cKDTree(points), np.flatnonzero((points == (2, 0, 0)).all(axis=1))
    without, aligned = (fit(tree, points[row], n).signed for n in (None, all_normals(tree)))
    widest = len(BANDWIDTHS) - 1
    assert np.abs(without[0, widest]) > 0.2
    assert np.abs(aligned[0, widest]) < 0.02


def test_a_cleaner_is_trained_on_any_meshes(tmp_path, monkeypatch, capsys):
    o3d = pytest.importorskip("open3d", reason="open3d makes the training data")
    monkeypatch.setattr("apusmog_core.training.denoiser.LEVEL_STEPS", 300)
    monkeypatch.setattr("apusmog_core.training.denoiser.TRUST_STEPS", 300)
    monkeypatch.setattr("apusmog_core.training.denoiser.PASSES", 2)
    (tmp_path / "meshes").mkdir()
    for name in ("box", "cylinder", "sphere", "torus"):
        mesh = getattr(o3d.geometry.TriangleMesh, f"create_{name}")()
        o3d.io.write_triangle_mesh(str(tmp_path / "meshes" / f"{name}.ply"), mesh)
    out = tmp_path / "cleaner.pth"
    assert cli.main(["train-cleaner", str(tmp_path / "meshes"), "--out", str(out)]) == 0
    assert f"{out}: written" in capsys.readouterr().out
    points = noisy(sphere(), 0.3)
    assert off_sphere(clean(points, load_cleaner(out))[0]) < 0.8 * off_sphere(points)


def test_smooth_copies_have_the_size_of_their_meshes_and_fewer_corners(tmp_path):
    o3d = pytest.importorskip("open3d", reason="open3d makes the copies")
    (tmp_path / "meshes").mkdir()
    box = o3d.geometry.TriangleMesh.create_box()
    o3d.io.write_triangle_mesh(str(tmp_path / "meshes" / "box.ply"), box)
    assert cli.main(["smooth", str(tmp_path / "meshes"), str(tmp_path / "out")]) == 0
    copy = o3d.io.read_triangle_mesh(str(tmp_path / "out" / "box_smooth.ply"))
    assert copy.get_surface_area() == pytest.approx(6, rel=0.15)
    corner = np.linalg.norm(np.asarray(copy.vertices), axis=1).min()
    assert 0.005 < corner < 0.2  # the box's own is at the origin
    assert cli.main(["smooth", str(tmp_path / "none"), str(tmp_path / "out")]) == 2


def test_creatures_are_closed_and_each_is_another(tmp_path):
    o3d = pytest.importorskip("open3d", reason="open3d makes the meshes")
    assert cli.main(["creatures", str(tmp_path), "--count", "2"]) == 0
    meshes = [o3d.io.read_triangle_mesh(str(path)) for path in sorted(tmp_path.glob("*.ply"))]
    assert len(meshes) == 2
    assert all(mesh.is_edge_manifold(allow_boundary_edges=False) for mesh in meshes)
    sizes = [np.ptp(np.asarray(mesh.vertices), axis=0).max() for mesh in meshes]
    assert all(0.3 < size < 4 for size in sizes) and sizes[0] != sizes[1]
