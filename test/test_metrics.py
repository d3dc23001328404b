# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from apusmog_core.evaluation import baselines, metrics


def brute_distances(a, b):
    return np.linalg.norm(a[:, None] - b[None], axis=2).min(axis=1)


def unit_ball(points):
    centred = points - points.mean(axis=0)
    return centred / np.linalg.norm(centred, axis=1).max()


def test_shape_scores_agree_with_brute_force():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(150, 3)), rng.normal(size=(200, 3))
    scores = metrics.shape_scores(a, b)
    there = brute_distances(unit_ball(a), unit_ball(b)) ** 2
    back = brute_distances(unit_ball(b), unit_ball(a)) ** 2
    assert scores["cd"] == pytest.approx(there.mean() + back.mean())
    assert scores["hd"] == pytest.approx(max(there.max(), back.max()))
    assert scores["hd_sum"] == pytest.approx(there.max() + back.max())
    assert np.isnan(scores["p2f"])


def test_identical_clouds_score_zero_wherever_they_are():
    cloud = np.random.default_rng(0).normal(size=(100, 3))
    scores = metrics.shape_scores(3 * cloud + 5, cloud)
    assert scores["cd"] < 1e-20 and scores["hd_sum"] < 1e-20


def test_distance_to_a_mesh_is_unsquared_and_in_its_own_units(tmp_path):
    pytest.importorskip("open3d")
    plate = tmp_path / "plate.off"  # 20 x 20 in the plane z = 0
    plate.write_text("OFF\n4 2 0\n-10 -10 0\n10 -10 0\n10 10 0\n-10 10 0\n3 0 1 2\n3 0 2 3\n")
    points = np.array([[0, 0, 1.0], [3, 0, -3.0], [13, 0, 4.0]])
    scores = metrics.shape_scores(points, points, metrics.mesh_surface(plate))
    assert scores["p2f"] == pytest.approx((1 + 3 + 5) / 3, rel=1e-6)
    assert scores["p2f_std"] == pytest.approx(np.std([1, 3, 5]), rel=1e-6)


def test_a_mesh_file_without_triangles_is_refused_by_name(tmp_path):
    pytest.importorskip("open3d")
    empty = tmp_path / "empty.off"
    empty.write_text("OFF\n1 0 0\n0 0 0\n")
    with pytest.raises(ValueError, match="empty.off: no triangles"):
        metrics.mesh_surface(empty)


def test_ring_scores_of_a_case_counted_by_hand():
    points = np.array([[10, 0, 0], [10, 0, 0.4]])
    held = np.array([[10, 0, 0.2], [10, 0, 0.6]])
    full = np.concatenate([points, held])
    output = np.concatenate([points, [[10.0, 0, 0.23], [10.0, 0, 0.9]]])
    scores = metrics.ring_scores(output, held, full)
    assert scores["completeness"] == pytest.approx((0.03 + 0.2) / 2)
    assert scores["hallucination"] == pytest.approx((0 + 0 + 0.03 + 0.3) / 4)
    for name in ("f_5", "f_10"):  # one held point of two is found, three output points are right
        assert scores[name] == pytest.approx(2 * 0.5 * 0.75 / 1.25)
    assert scores["f_20"] == pytest.approx(2 * 1 * 0.75 / 1.75)


def test_output_equal_to_the_measurement_is_perfect():
    full = np.random.default_rng(0).normal(size=(50, 3))
    scores = metrics.ring_scores(full, full[::2], full)
    assert scores["completeness"] == scores["hallucination"] == 0
    assert scores["f_5"] == scores["f_20"] == 1


def test_thickness_is_the_spread_across_the_surface_not_along_it():
    rng = np.random.default_rng(0)
    plane = np.concatenate([rng.uniform(size=(4000, 2)), np.zeros((4000, 1))], axis=1)
    assert metrics.surface_thickness(plane) < 1e-9
    noisy = plane + [0, 0, 1] * rng.normal(0, 0.002, (4000, 1))
    assert metrics.surface_thickness(noisy) == pytest.approx(0.002, rel=0.15)


def test_only_a_generated_point_in_front_of_a_measured_return_hangs_in_free_space():
    wall = np.stack(np.broadcast_arrays(10.0, np.linspace(-1, 1, 101), 0.0), axis=1)
    rays = metrics.MeasuredRays(wall)
    asked = np.array([[9.0, 0, 0], [9.8, 0, 0], [11.0, 0, 0], [9.0, 0, 1.0]])
    assert rays.free(asked).tolist() == [True, False, False, False]
    output = np.concatenate([wall, asked])
    assert metrics.free_space_share(output, wall, rays) == 1 / 4
    assert metrics.free_space_share(wall, wall, rays) == 0


@pytest.mark.parametrize("n", [1, 2, 5, 60])
@pytest.mark.parametrize("ratio", [0.5, 1, 2.3, 4, 16])
def test_midpoint_gives_the_count_asked_for_inside_the_cloud(n, ratio):
    cloud = np.random.default_rng(n).normal(size=(n, 3))
    count = max(1, round(ratio * n))
    dense = baselines.midpoint(cloud, count)
    assert dense.shape == (count, 3)
    assert (dense >= cloud.min(axis=0)).all() and (dense <= cloud.max(axis=0)).all()
    if n == 60:
        assert len(np.unique(dense, axis=0)) == count
    assert (dense[0] == cloud[0]).all()


def test_range_interpolation_joins_rings_across_the_azimuth_cut_but_not_across_a_depth_step():
    def at(azimuth, distance, z):
        return [distance * np.cos(azimuth), distance * np.sin(azimuth), z]

    points = np.array([at(np.pi - 0.001, 10, 0.0), at(-np.pi + 0.001, 10, 0.4), at(0, 10, 0)])
    points = np.concatenate([points, [at(0, 11, 0.4)]])
    ring = np.array([4, 6, 4, 6])
    dense = baselines.range_interpolation(points, ring)
    assert len(dense) == 5
    assert dense[4] == pytest.approx([-10, 0, 0.2], abs=1e-4)
    denser = baselines.range_interpolation(points, 2 * ring, stride=4)
    assert len(denser) == 7  # a quarter, half and three quarters of the way
    assert denser[4:, 2] == pytest.approx([0.1, 0.2, 0.3], abs=1e-4)
