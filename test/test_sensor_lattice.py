# SPDX-License-Identifier: Apache-2.0
"""The rays of a denser sensor: where they go, which stay, and how many there are."""

import numpy as np
import pytest
from sensor_scans import ALONG, UP, bumpy, grid_scan

from apusmog_core import Upsampler
from apusmog_core.config import PRESETS
from apusmog_core.sensor.lattice import (
    best_of_each,
    judge_rays,
    lattice_rays,
    lattice_shape,
    ray_confidence,
)
from apusmog_core.sensor.view import ObjectScan, look_around
from apusmog_core.weights import build_network, load_network

LIKELY = 0.2


def rays_of(scan: ObjectScan, columns: int, rings: int, keep_measured: bool = True):
    graph = look_around(scan)
    levels = np.tile((columns, rings), (len(graph.rows), 1))
    return graph, list(lattice_rays(graph, levels, keep_measured))


def test_a_new_ray_lies_midway_between_the_columns_of_two_rings():
    graph, ((anchors, rays, tier), _) = rays_of(grid_scan(bumpy(), shift=0.3), 1, 2)
    inner = ~graph.ends[anchors, 0]
    even = anchors[inner] // 30 % 2 == 0
    assert rays[inner, 0, 0] == pytest.approx(np.where(even, 0.15, -0.15), abs=1e-3)
    assert (rays[:, 0, 1] == 0.5).all() and (tier[:, 0] == 0).all()


def test_rays_leave_upwards_from_every_point_and_downwards_from_the_lowest_of_an_object():
    graph, (up, down) = rays_of(grid_scan(bumpy(rings=3)), 1, 3)
    assert len(up[0]) == 90 and set(down[0]) == set(range(30))
    assert np.allclose(up[1][:, :2, 1], (1 / 3, 2 / 3))
    assert np.allclose(down[1][..., 1], (-1 / 3, -2 / 3))


@pytest.mark.parametrize("keep_measured", [True, False])
def test_no_ray_is_asked_twice(keep_measured):
    scan = grid_scan(bumpy(rings=3))
    graph, groups = rays_of(scan, 2, 3, keep_measured)
    asked = []
    for anchors, rays, _ in groups:
        ring, column = graph.rows[anchors] // 30, graph.rows[anchors] % 30
        asked.append((np.stack((column, ring), axis=1)[:, None] + rays).reshape(-1, 2))
    asked = np.concatenate(asked).round(3)
    assert len(np.unique(asked, axis=0)) == len(asked)
    measured = (asked == asked.round()).all(axis=1)
    assert measured.sum() == (0 if keep_measured else 90)


@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0, 2.1, 3.0, 4.0, 6.5, 16.0, 100.0])
def test_the_lattice_is_dense_enough_and_hardly_denser(ratio):
    across, rings = lattice_shape(ALONG, 2.4 * ALONG, ratio)
    assert ratio <= across * rings <= max(2.0, 2.0 * ratio)
    assert 0.2 < 2.4 / rings * across < 3.0  # neither stripes nor columns


# --- which rays stay -----------------------------------------------------------------------------


def test_likely_rays_of_the_coarse_lattice_come_first():
    owner = np.array([0, 0, 0, 0, 1, 1])
    sure = np.array([0.9, 0.01, 0.5, 0.9, 0.01, 0.02])
    tier = np.array([0, 0, 0, 1, 0, 0])
    assert best_of_each(owner, sure, tier, np.array([2, 1]), 0, LIKELY).tolist() == [0, 2, 5]
    chosen = best_of_each(owner, sure, tier, np.array([3, 2]), 0, LIKELY)
    assert sorted(chosen) == [0, 2, 3, 4, 5]


def test_broken_confidence_does_not_break_the_counts():
    owner, tier = np.repeat([0, 1], 2), np.zeros(4, int)
    sure = np.array([np.nan, 0.5, np.nan, np.nan])
    assert sorted(best_of_each(owner, sure, tier, np.array([1, 2]), 0, LIKELY)) == [1, 2, 3]


def test_confidence_is_the_chance_to_meet_the_object_times_that_of_a_right_depth():
    half = np.log(2)  # of meeting it; and of Cauchy noise, as the median error is the tolerance
    assert ray_confidence(half, np.log(0.1), 1.0, 0.1, 1.0) == pytest.approx(0.25)
    assert ray_confidence(0.0, -5.0, 1.0, 0.1, 12.0) == 0
    assert ray_confidence(np.inf, np.log(0.1 / (1 + 2**0.5)), 1.0, 0.1, 1.0) == pytest.approx(0.75)
    assert ray_confidence(half, np.log(0.1), 1.0, 0.1, 12.0) == pytest.approx(0.8)  # odds


def test_a_surface_beside_the_ray_counts_more_where_rings_are_close():
    half = np.log(2)
    sure = [ray_confidence(half, np.log(0.1 / m), m, 0.1, 6.0) for m in (0.5, 1.0, 2.0)]
    assert sure == pytest.approx([4 / 5, 2 / 3, 1 / 2])  # odds of 1 / 3, times 12, 6 and 3


def test_rays_beyond_the_sensors_border_are_a_last_resort():
    rays = np.array([[[0, 0.5], [0, -0.5]]] * 3, np.float32)
    border = np.array([[False, False], [True, False], [False, True]])
    answers = np.full((2, 3, 2), 1.0, np.float32)
    sure = judge_rays(*answers, rays, np.arange(3), np.ones(3), border, 0.1, 1.0, 0.01).reshape(
        3, 2
    )
    assert sure / sure[0, 0] == pytest.approx(np.array([[1, 1], [0.01, 1], [1, 0.01]]))


# --- exact counts --------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["machine code", "PyTorch"])
def up(request) -> Upsampler:
    network = build_network(PRESETS["lidar"])
    return Upsampler(network, "cpu", compiled=request.param == "machine code")


@pytest.mark.parametrize("spread", ["rings", "even"])
@pytest.mark.parametrize("ratio", [1.01, 1.5, 2.0, 2.34, 4.0, 7.72, 17.3, 64.0])
def test_counts_are_exact_at_any_ratio_for_large_and_tiny_objects(up, ratio, spread):
    """Two objects of one to four points beside a large one, all in one scan."""
    reach = bumpy(rings=6, columns=60)
    instance = np.zeros(reach.shape, int)
    instance[:, 20:] = 1
    instance[2, 3] = 2
    instance[1:3, 10:12] = 3
    scan = grid_scan(reach, instance)
    sizes = np.bincount(scan.instance)[1:]
    counts = np.round(ratio * sizes).astype(int)
    for keep in (True, False):
        dense = up.upsample_scan(scan, counts, keep_measured=keep, spread=spread)
        assert (scan.instance[dense.source] == np.repeat((1, 2, 3), counts)).all()
        assert np.count_nonzero(~dense.generated) == (sizes.sum() if keep else 0)
        assert np.isfinite(dense.points).all()
        assert ((dense.confidence >= 0) & (dense.confidence <= 1)).all()


@pytest.mark.parametrize("case", ["duplicates", "one ray", "one ring", "huge"])
def test_counts_are_exact_where_rings_and_columns_mean_little(up, case):
    rng = np.random.default_rng(0)
    points = {
        "duplicates": np.tile((10.0, 1.0, 0.2), (50, 1)),
        "one ray": np.outer(np.linspace(5, 9, 40), (1.0, 0.2, 0.1)),
        "one ring": grid_scan(bumpy(rings=1)).points,
        "huge": rng.normal(size=(30_000, 3)) * 2 + (20, 0, 0),
    }[case]
    for ring in (None, np.zeros(len(points), int)):
        scan = ObjectScan(points, np.ones(len(points), np.int64), ring)
        for ratio in (1.2, 3.7):
            dense = up.upsample_scan(scan, [round(ratio * len(points))])
            assert len(dense.points) == round(ratio * len(points))
            assert np.isfinite(dense.points).all()


@pytest.mark.parametrize("compiled", [True, False])
def test_filler_is_what_lies_between_the_points_of_a_ring_for_the_count_alone(compiled):
    reach = bumpy(rings=3)
    reach[:2] = 60.0  # far behind the highest ring, alone in front of it
    scan = grid_scan(reach, np.repeat([[0], [0], [1]], 30, axis=1))
    up = Upsampler(load_network("lidar"), "cpu", compiled=compiled)
    dense = up.upsample_scan(scan, [4 * 30])
    elevation = np.arcsin(dense.points[:, 2] / np.linalg.norm(dense.points, axis=1))
    on_ring = np.abs(elevation - elevation[0]) < 1e-4
    assert (dense.filler == on_ring & dense.generated).all()
    assert 0 < dense.filler.sum() < 90
    columns = up.upsample_scan(scan, [16 * 30], spread="even")
    assert len(np.unique(columns.points.round(6), axis=0)) == 16 * 30  # no ray is asked twice


def test_surroundings_and_other_objects_keep_their_points(up):
    """Only what is asked for grows; the measured points of each come first, in their order."""
    scan = grid_scan(bumpy(), np.repeat([[0, 1, 2]], 10, axis=1).repeat(6, axis=0))
    one, two = up.upsample_scan(scan, [60, 150]).split([60, 150])
    assert (one.points == scan.points[scan.instance == 1]).all() and (one.confidence == 1).all()
    assert (two.points[:60] == scan.points[scan.instance == 2]).all()
    step = np.linalg.norm(two.points[60:, None] - scan.points[scan.instance == 2], axis=2).min(
        axis=1
    )
    assert (step > 0).all() and (step < 2 * 20 * UP).all()
