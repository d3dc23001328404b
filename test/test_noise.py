# SPDX-License-Identifier: Apache-2.0
"""Noisy clouds are denoised; clean clouds stay as they are."""

import numpy as np
import pytest
from scipy.spatial import cKDTree

from apusmog_core import cli
from apusmog_core.geometry import farthest, typical_spacing
from apusmog_core.surface.choose import push_apart
from apusmog_core.surface.denoise import (
    BANDWIDTHS,
    MAX_MOVE,
    find_noise,
    find_normals,
    fit,
    load_denoiser,
)
from apusmog_core.upsampler import Upsampler


def sphere(count: int = 2048) -> np.ndarray:
    points = np.random.default_rng(0).normal(size=(8 * count, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    return points[farthest(points, count)]


def box(count: int) -> np.ndarray:
    points = np.random.default_rng(0).uniform(-1, 1, size=(8 * count, 3))
    points /= np.abs(points).max(axis=1, keepdims=True)
    return points[farthest(points, count)]


def plate(count: int = 2048) -> np.ndarray:
    points = np.zeros((8 * count, 3))
    points[:, :2] = np.random.default_rng(0).uniform(-1, 1, (8 * count, 2))
    return points[farthest(points, count)]


def noisy(points: np.ndarray, spacings: float) -> np.ndarray:
    noise = np.random.default_rng(1).normal(size=points.shape)
    return points + spacings * typical_spacing(points) * noise


def denoised(points: np.ndarray) -> np.ndarray:
    return find_noise(points).project(points)


def off_sphere(points: np.ndarray) -> float:
    return float(np.sqrt(np.mean((np.linalg.norm(points, axis=1) - 1) ** 2)))


# --- how noisy a cloud is ------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1024, 2048, 8192])
@pytest.mark.parametrize("shape", [sphere, box, plate])
def test_a_clean_cloud_is_known_as_clean(shape, count):
    assert find_noise(shape(count)) is None


def test_a_little_noise_passes_as_clean():
    assert find_noise(noisy(sphere(), 0.05)) is None


def test_few_points_pass_as_clean():
    assert find_noise(noisy(sphere(1000), 0.3)) is None


@pytest.mark.parametrize("spacings", [0.2, 0.3, 0.45])
@pytest.mark.parametrize("shape", [sphere, box, plate])
def test_the_noise_of_a_cloud_is_known(shape, spacings):
    true = spacings * typical_spacing(shape(2048))
    assert find_noise(noisy(shape(2048), spacings)).noise == pytest.approx(true, rel=0.35)


# --- where its surface is ------------------------------------------------------------------------


@pytest.mark.parametrize("spacings", [0.2, 0.3, 0.45])
def test_noise_is_more_than_halved_on_a_sphere(spacings):
    points = noisy(sphere(), spacings)
    assert off_sphere(denoised(points)) < 0.5 * off_sphere(points)


def test_points_beside_a_noisy_cloud_move_onto_its_surface():
    beside = sphere(1000) * 1.02
    assert off_sphere(find_noise(noisy(sphere(), 0.3)).project(beside)) < 0.5 * off_sphere(beside)


def test_no_point_moves_farther_than_its_noise_explains():
    points = noisy(sphere(), 0.3)
    points[0] *= 1.5  # an outlier, or the tip of something thin
    moved = np.linalg.norm(denoised(points) - points, axis=1)
    assert moved.max() <= MAX_MOVE * find_noise(points).noise * (1 + 1e-6)


def test_twins_are_denoised_alike():
    points = noisy(sphere(1024), 0.3)
    np.testing.assert_allclose(denoised(np.repeat(points, 2, axis=0))[::2], denoised(points))


def test_turned_scaled_and_shifted_clouds_are_denoised_alike():
    points = noisy(sphere(1024), 0.3)
    turn = np.linalg.qr(np.random.default_rng(2).normal(size=(3, 3)))[0]
    again = (denoised(30 * points @ turn + 5) - 5) @ turn.T / 30
    np.testing.assert_allclose(again, denoised(points), atol=1e-4)


def test_long_clouds_are_denoised_piece_by_piece_and_show_progress(monkeypatch, capsys):
    points = noisy(sphere(1024), 0.3)
    whole = denoised(points)
    monkeypatch.setattr("apusmog_core.compute.CHUNK", 300)
    monkeypatch.setattr("apusmog_core.compute.PROGRESS_FROM", 1000)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    np.testing.assert_allclose(denoised(points), whole, atol=1e-9)
    assert "denoising" in capsys.readouterr().err


def test_fits_of_what_faces_the_same_way_do_not_cut_a_corner():
    along, out = (c.ravel() for c in np.meshgrid(np.arange(-10.0, 10), np.arange(20.0)))
    floor, wall = np.stack((out, along, 0 * out), axis=1), np.stack((0 * out, along, out), axis=1)
    points = np.unique(np.concatenate((floor, wall)), axis=0)
    tree, row = cKDTree(points), np.flatnonzero((points == (2, 0, 0)).all(axis=1))
    heights = fit(tree, find_normals(tree), points[row]).signed.reshape(3, -1, len(BANDWIDTHS))
    every, _, same = np.abs(heights[:, 0, -1])  # the widest plane
    assert every > 0.2
    assert same < 0.02


# --- upsampling ----------------------------------------------------------------------------------


def test_denoising_can_be_turned_off():
    points = noisy(sphere(1024), 0.4)
    dense, as_is = (
        Upsampler.load("shape", "cpu", denoise=denoise).upsample(points, 2)
        for denoise in (True, False)
    )
    assert off_sphere(dense) < 0.6 * off_sphere(as_is)


def test_a_clean_cloud_is_upsampled_as_without_the_denoiser():
    dense, as_is = (
        Upsampler.load("shape", "cpu", denoise=denoise).upsample(box(1024), 2)
        for denoise in (True, False)
    )
    np.testing.assert_array_equal(dense, as_is)


def test_points_that_are_pushed_apart_leave_smaller_holes_and_stay_on_their_surface():
    points = sphere(1024)
    even = push_apart(points, points[:0])

    def holes(cloud: np.ndarray) -> float:
        return np.mean(cKDTree(cloud).query(sphere(8192))[0] ** 2)

    assert holes(even) < 0.95 * holes(points)
    assert off_sphere(even) < 0.03 * typical_spacing(points)


def test_a_plate_that_is_pushed_apart_does_not_grow():
    beyond = np.abs(push_apart(plate(), plate(0))[:, :2]).max() - 1
    assert beyond < 0.2 * typical_spacing(plate())


def test_points_that_are_pushed_apart_keep_clear_of_those_that_stay():
    fixed, new = sphere(1024), np.random.default_rng(3).normal(size=(1024, 3))
    new /= np.linalg.norm(new, axis=1, keepdims=True)

    def distances(cloud: np.ndarray) -> np.ndarray:
        return cKDTree(fixed).query(cloud)[0]

    near = distances(new) < 0.2 * typical_spacing(fixed)
    assert np.median(distances(push_apart(new, fixed))[near]) > 2 * np.median(distances(new)[near])


# --- weights -------------------------------------------------------------------------------------


def test_a_file_that_is_no_denoiser_is_refused(tmp_path):
    (tmp_path / "notes.pth").write_text("nothing")
    with pytest.raises(ValueError, match="not a denoiser"):
        load_denoiser(tmp_path / "notes.pth")


def test_a_denoiser_is_trained_on_any_meshes(tmp_path, monkeypatch, capsys):
    o3d = pytest.importorskip("open3d", reason="open3d makes the training data")
    monkeypatch.setattr("apusmog_core.training.denoiser.STEPS", 60)
    (tmp_path / "meshes").mkdir()
    for name in ("box", "cylinder", "sphere", "torus"):
        mesh = getattr(o3d.geometry.TriangleMesh, f"create_{name}")()
        o3d.io.write_triangle_mesh(str(tmp_path / "meshes" / f"{name}.ply"), mesh)
    out = tmp_path / "denoiser.pth"
    assert cli.main(["train-denoiser", str(tmp_path / "meshes"), "--out", str(out)]) == 0
    assert f"{out}: written" in capsys.readouterr().out
    points = noisy(sphere(), 0.3)
    found = find_noise(points, load_denoiser(out))
    assert off_sphere(found.project(points)) < 0.6 * off_sphere(points)
