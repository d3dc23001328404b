# SPDX-License-Identifier: Apache-2.0
import re

import numpy as np
import pytest
from scipy.spatial import cKDTree

from apusmog_core import Upsampler, weights
from apusmog_core.config import PRESETS
from apusmog_core.evaluation.metrics import distances
from apusmog_core.sensor.grid import to_polar
from apusmog_core.sensor.view import look_around
from tools import drawing, figures, mixture, motion, ratios, seen

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


@pytest.fixture(scope="module")
def lidar(tmp_path_factory):
    """Weights of a ray network as it starts."""
    file = tmp_path_factory.mktemp("weights") / "lidar.pt"
    weights.save(weights.build_network(PRESETS["lidar"]), file, card={})
    return str(file)


def test_the_command_draws_every_picture(tmp_path, box, lidar, monkeypatch, capsys):
    monkeypatch.setattr(ratios, "RATIOS", (1.5, 2.0))
    monkeypatch.setattr(ratios, "SHAPE_POINTS", 300)
    arguments = [str(tmp_path / "docs"), "--mesh", str(box), "--weights", lidar]
    assert figures.main(arguments) == 0
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
        person = seen.see("person", distance)
        away = distances(person.points, person.truth)
        assert np.median(away) < 0.03  # noise, and bias of the rings
        gap = cKDTree(person.truth).query(person.truth, k=2)[0][:, 1]
        assert np.median(gap) < 0.01


def test_rays_that_came_back_from_an_object_meet_it_and_those_beside_it_do_not():
    car = seen.see("car", 15.0)
    azimuth, elevation, _ = to_polar(car.points).T
    assert car.meets(azimuth, elevation).mean() > 0.98  # but for rounding at its edges
    assert not car.meets(azimuth + 0.5, elevation).any()
    sparse = seen.keep_rings(car, 4)
    assert set(sparse.scan.ring) == {n for n in set(car.scan.ring) if n % 4 == 0}
    assert len(sparse.points) < 0.35 * len(car.points)


def test_the_ellipses_and_the_heat_of_the_picture_are_those_of_the_mixture(lidar):
    up = Upsampler.load(lidar, "cpu")
    graph = look_around(seen.keep_rings(seen.see("car", 15.0), 4).scan)
    encoded = mixture._encode(up, graph)
    outline, weight = mixture._ellipses(graph, encoded)
    measured = graph.polar[:, :2]
    reach = np.abs(outline - measured[:, None]).max(axis=(0, 1))
    assert (reach < 2 * np.array([graph.column, graph.steps.max()])).all() and (weight > 0).all()
    at = mixture._chance(up, graph, encoded, measured)
    beside = mixture._chance(up, graph, encoded, measured + (0, 3 * graph.steps.max()))
    top = graph.border[:, 0] | (measured[:, 1] > measured[:, 1].max() - 1e-3)
    assert (at > 0.1).all() and (beside[top] == 0).all()


def test_colours_tell_good_from_bad_points():
    colours = figures.grade(np.array([0.01, 0.1, 0.5]))
    assert colours.tolist() == [drawing.GOOD, drawing.FAIR, drawing.BAD]


def test_the_knot_is_closed_and_has_nothing_inside():
    assert ratios.knot().is_edge_manifold(allow_boundary_edges=False)


@pytest.mark.parametrize(
    "options, reason",
    [
        (["--weights", "shape"], "shape.*'sensor'.*try 'lidar'"),
        (["--weights", "{}", "--surface-weights", "{}"], "lidar.*'canonical'.*try 'shape'"),
        (["--weights", "{}", "--mesh", "missing.ply"], "missing.ply: no triangles"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_is_drawn(
    tmp_path, lidar, capsys, options, reason
):
    assert figures.main([str(tmp_path / "docs"), *(o.format(lidar) for o in options)]) == 2
    assert re.search(reason, capsys.readouterr().err)
    assert not (tmp_path / "docs").exists()


def test_the_moving_picture_shows_more_and_more_points(tmp_path, lidar, monkeypatch, capsys):
    Image = pytest.importorskip("PIL.Image")
    monkeypatch.setattr(motion, "STEPS", 4)
    out = tmp_path / "docs" / "dense.gif"
    assert motion.main([str(out), "--weights", lidar]) == 0
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
