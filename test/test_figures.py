# SPDX-License-Identifier: Apache-2.0
import re

import numpy as np
import pytest
from scipy.spatial import cKDTree

from apusmog_core.evaluation.metrics import distances
from tools import figures, motion

image = pytest.importorskip("matplotlib.image")
o3d = pytest.importorskip("open3d")


@pytest.fixture
def box(tmp_path):
    path = tmp_path / "box.ply"
    assert o3d.io.write_triangle_mesh(str(path), o3d.geometry.TriangleMesh.create_box())
    return path


def ink(pixels: np.ndarray) -> np.ndarray:
    """Which pixels are not paper."""
    return (pixels[..., :3] < 0.97).any(axis=-1)


def test_the_command_draws_every_picture_with_the_shipped_weights(
    tmp_path, box, monkeypatch, capsys
):
    monkeypatch.setattr(figures, "RATIOS", (1.5, 2.0))
    monkeypatch.setattr(figures, "SHAPE_POINTS", 300)
    assert figures.main([str(tmp_path / "docs"), "--mesh", str(box)]) == 0
    written = capsys.readouterr().out.split()
    assert written == [
        str(tmp_path / "docs" / f"{name}.png") for name in ("before_after", "ratios", "mixture")
    ]
    for path in written:
        pixels = image.imread(path)
        height, width, _ = pixels.shape
        assert 1200 <= width <= 2000 and 600 <= height <= 2000
        thirds = np.array_split(ink(pixels), 3, axis=1)
        assert all(0.01 < third.mean() < 0.8 for third in thirds), path


def test_what_the_sensor_returned_lies_on_the_truth_at_every_range():
    for distance in figures.RANGES:
        seen = figures.see("person", distance)
        assert np.median(distances(seen.points, seen.truth)) < 0.03  # noise, and bias of the rings
        gap = cKDTree(seen.truth).query(seen.truth, k=2)[0][:, 1]
        assert np.median(gap) < 0.01


def test_colours_tell_good_from_bad_points():
    colours = figures.grade(np.array([0.01, 0.1, 0.5]))
    assert colours.tolist() == [figures.GOOD, figures.FAIR, figures.BAD]


def test_the_knot_is_closed_and_has_nothing_inside():
    assert figures.knot().is_edge_manifold(allow_boundary_edges=False)


@pytest.mark.parametrize(
    "options, reason",
    [
        (["--weights", "shape"], "shape.*'sensor'.*try 'lidar'"),
        (["--surface-weights", "lidar"], "lidar.*'canonical'.*try 'shape'"),
        (["--mesh", "missing.ply"], "missing.ply: no triangles"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_is_drawn(tmp_path, capsys, options, reason):
    assert figures.main([str(tmp_path / "docs"), *options]) == 2
    assert re.search(reason, capsys.readouterr().err)
    assert not (tmp_path / "docs").exists()


def test_the_moving_picture_shows_more_and_more_points(tmp_path, monkeypatch, capsys):
    Image = pytest.importorskip("PIL.Image")
    monkeypatch.setattr(motion, "STEPS", 4)
    out = tmp_path / "docs" / "dense.gif"
    assert motion.main([str(out)]) == 0
    assert out.stat().st_size < 2_000_000 and str(out) in capsys.readouterr().out
    with Image.open(out) as moving:
        lit = []
        for number in range(moving.n_frames):
            moving.seek(number)
            lit.append(int((np.asarray(moving.convert("RGB"))[60:].max(axis=2) > 120).sum()))
    assert len(lit) == 4 and lit == sorted(lit) and lit[-1] > 1.5 * lit[0]


def test_an_unknown_sensor_of_the_moving_picture_is_named(tmp_path, capsys):
    assert motion.main([str(tmp_path / "out.gif"), "--sensor", "X1"]) == 2
    assert "unknown sensor 'X1'" in capsys.readouterr().err
