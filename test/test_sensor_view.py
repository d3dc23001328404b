# SPDX-License-Identifier: Apache-2.0
"""A scan as its sensor sees it: rings, neighbours, what lies around a point, and the way back."""

from dataclasses import replace

import numpy as np
import pytest
from sensor_scans import ALONG, LOWEST, UP, bumpy, grid_scan

from apusmog_core.sensor import view
from apusmog_core.sensor.grid import to_polar
from apusmog_core.sensor.lasers import find_lasers
from apusmog_core.sensor.view import (
    NEIGHBOURS,
    SCALARS,
    WINDOW,
    ObjectGraph,
    ObjectScan,
    look_around,
    part_of,
    ray_points,
)


def neighbour(ring: int, column: int) -> int:
    return NEIGHBOURS.tolist().index([ring, column])


def around(graph: ObjectGraph, ring: int, column: int) -> np.ndarray:
    """What the context says (a, 3) of one place of the window: seen, own, depth."""
    at = SCALARS + 3 * WINDOW.tolist().index([ring, column])
    return graph.context[:, at : at + 3]


# --- rings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names", [range(6), range(5, -1, -1), (40, 3, 17, 900, 5, 12), (-70_000, 1, 2, 8, 5, 90_000)]
)
def test_rings_are_counted_from_the_lowest_whatever_their_numbers_and_order(names):
    scan = grid_scan(bumpy())
    order = np.random.default_rng(0).permutation(len(scan.points))
    found = find_lasers(to_polar(scan.points[order]), np.array(names)[scan.ring[order]])
    assert (found.number == scan.ring[order]).all()
    assert found.elevation == pytest.approx(LOWEST + UP * np.arange(6), abs=1e-6)
    assert found.step == pytest.approx(ALONG, rel=1e-3)


def test_rings_without_numbers_are_found_by_their_elevation():
    scan = grid_scan(bumpy())
    found = find_lasers(to_polar(scan.points), None)
    assert (found.number == scan.ring).all()
    assert found.step == pytest.approx(ALONG, rel=1e-3)


def test_lasers_that_start_higher_are_told_from_those_that_look_higher():
    """An HDL-64E: elevation seen from its middle falls with range towards where a laser looks."""
    reach = np.linspace(5, 40, 200)
    elevation = np.array([0.0, 0.02])[:, None] + np.array([0.0, 0.1])[:, None] / reach
    azimuth = np.broadcast_to(np.arange(200) * ALONG, elevation.shape)
    polar = np.stack((azimuth, elevation, np.broadcast_to(np.log(reach), azimuth.shape)), -1)
    found = find_lasers(polar.reshape(-1, 3), np.repeat([7, 3], 200))
    assert found.elevation == pytest.approx([0.0, 0.02], abs=1e-6)
    assert found.height == pytest.approx([0.0, 0.1], abs=1e-4)


# --- neighbours ----------------------------------------------------------------------------------


def two_things() -> ObjectScan:
    """A near and a far object side by side, with holes; odd rings are shifted."""
    reach = bumpy()
    reach[:, 15:] += 8
    reach[np.random.default_rng(1).random(reach.shape) < 0.1] = np.nan
    instance = np.ones(reach.shape, int)
    instance[:, 15:] = 2
    return grid_scan(reach, instance, shift=0.3)


def check_neighbours(scan: ObjectScan, graph: ObjectGraph) -> None:
    """Each neighbour is of the same object, on its ring and about in its column, as offsets say."""
    polar = to_polar(scan.points)
    mine = graph.rows[:, None]
    other = graph.rows[graph.neighbours]
    assert (graph.neighbours[:, 0] == np.arange(len(graph.rows))).all()
    assert (scan.instance[other] == scan.instance[mine]).all()
    away = polar[other] - polar[mine]
    columns = (away[..., 0] + np.pi) % (2 * np.pi) - np.pi
    expected = (
        columns / ALONG,
        scan.ring[other] - scan.ring[mine],
        away[..., 2] / graph.steps[:, :1],
    )
    assert graph.offsets == pytest.approx(np.stack(expected, axis=-1), abs=2e-3)
    real = graph.neighbours != np.arange(len(graph.rows))[:, None]
    places = np.broadcast_to(NEIGHBOURS, (*real.shape, 2))[real]
    assert (graph.offsets[real][:, 1] == places[:, 0]).all()
    # a column beside the one asked for counts, and rings are shifted
    assert (np.abs(graph.offsets[real][:, 0] - places[:, 1]) < 1.5).all()


def test_neighbours_are_of_the_same_object_on_the_ring_and_column_asked_for():
    scan = two_things()
    graph = look_around(scan)
    check_neighbours(scan, graph)
    assert (graph.neighbours != np.arange(len(graph.rows))[:, None])[:, 1:].mean() > 0.7
    swapped, columns = graph.neighbours.copy(), graph.offsets.copy()
    swapped[:, [4, 7]] = swapped[:, [7, 4]]  # a neighbour below for one above
    columns[..., 0] *= -1
    for wrong in (replace(graph, neighbours=swapped), replace(graph, offsets=columns)):
        with pytest.raises(AssertionError):
            check_neighbours(scan, wrong)


def test_a_part_of_the_graph_is_the_graph_of_that_object():
    scan = two_things()
    graph = look_around(scan)
    part = part_of(graph, slice(1, 2))
    check_neighbours(scan, part)
    assert part.sizes.tolist() == [(scan.instance == 2).sum()] == [len(part.rows)]
    assert (scan.instance[part.rows] == 2).all()


def test_the_way_up_to_the_partner_ends_at_the_partner():
    """Angles, steps and depth of a ray are those of the neighbour above: in all units at once."""
    scan = grid_scan(bumpy(), shift=0.3)
    graph = look_around(scan)
    n = neighbour(1, 0)
    anchors = np.flatnonzero(~graph.ends[:, 0])
    rays = np.stack((graph.aside[anchors], np.ones(len(anchors))), axis=1)
    ends = ray_points(graph, anchors, rays, graph.offsets[anchors, n, 2])
    partner = scan.points[graph.rows[graph.neighbours[anchors, n]]]
    assert np.abs(graph.aside[anchors]) == pytest.approx(0.3, abs=1e-3)
    assert ends == pytest.approx(partner, abs=1e-3)
    here = ray_points(graph, anchors, 0 * rays, np.zeros(len(anchors)))
    assert here == pytest.approx(scan.points[graph.rows[anchors]], abs=1e-9)


# --- context -------------------------------------------------------------------------------------


def test_the_window_says_what_is_missing_empty_own_or_other_and_nearer_or_farther():
    """Columns 10-19 of rings 1-4 are the object; right of it a nearer thing, left nothing."""
    reach = np.full((6, 40), np.nan)
    reach[0] = 12.0  # the ground before it
    reach[1:5, 10:20] = 20.0
    reach[1:5, 20:] = 15.0
    reach[5] = 60.0  # a wall behind it
    instance = np.zeros(reach.shape, int)
    instance[1:5, 10:20] = 1
    graph = look_around(grid_scan(reach, instance))
    shape = (4, 10)  # rings and columns of the object
    assert (around(graph, -1, 0).reshape(*shape, 3)[0, :, :2] == (1, -1)).all()
    assert (around(graph, -1, 0).reshape(*shape, 3)[0, :, 2] < -1).all()  # ground is nearer
    assert (around(graph, 1, 0).reshape(*shape, 3)[3, :, 2] > 1).all()  # the wall is farther
    assert (around(graph, 2, 0).reshape(*shape, 3)[3] == (-1, 0, 0)).all()  # no such ring
    assert (around(graph, -2, 0).reshape(*shape, 3)[0] == (-1, 0, 0)).all()
    assert (around(graph, 0, -4).reshape(*shape, 3)[:, 0] == (0, 0, 0)).all()  # nothing came back
    right = around(graph, 0, 4).reshape(*shape, 3)[:, 8]
    assert (right[:, :2] == (1, -1)).all() and (right[:, 2] < -1).all()
    assert (around(graph, 0, 1).reshape(*shape, 3)[:, :-2] == (1, 1, 0)).all()  # itself, flat


def test_scalars_say_how_far_apart_rings_are_and_what_is_known_of_height_and_surroundings():
    scan = grid_scan(np.full((4, 20), 20.0))
    height = scan.points[:, 2] + 1.5
    known = look_around(replace(scan, height=height)).context
    alone = look_around(replace(scan, whole=False)).context
    assert np.exp(known[:, 0]) == pytest.approx(20 * UP, rel=1e-3)
    assert np.exp(known[:, 1] + 1) == pytest.approx(UP / ALONG, rel=1e-3)
    assert (known[:, 4:6] == (1, 1)).all() and (alone[:, 4:6] == (0, 0)).all()
    assert known[:, 6] == pytest.approx(height, abs=1e-5)
    assert known[:, 7] == pytest.approx(height.min(), abs=1e-5)
    assert known[:, 8] == pytest.approx(height.max(), abs=1e-5)
    assert (alone[:, [6, 7, 8, 13]] == 0).all()


def test_only_the_sensors_own_highest_and_lowest_ring_are_its_border():
    reach = np.full((6, 20), 20.0)
    instance = np.zeros(reach.shape, int)
    instance[2:4] = 1  # in the middle of the view
    graph = look_around(grid_scan(reach, instance))
    assert not graph.border.any() and graph.ends[:20, 1].all() and graph.ends[20:, 0].all()
    whole = look_around(grid_scan(reach))
    assert (whole.border[:, 0] == (np.arange(120) >= 100)).all()
    assert (whole.border[:, 1] == (np.arange(120) < 20)).all()


def test_a_crowd_of_points_has_coarser_columns_and_not_more_memory(monkeypatch):
    scan = grid_scan(bumpy())
    monkeypatch.setattr(view, "MOST_CELLS", 6 * 900)
    graph = look_around(scan)
    assert graph.column == pytest.approx(2 * np.pi / 900)
    real = graph.neighbours != np.arange(len(graph.rows))[:, None]
    polar = graph.polar
    away = polar[graph.neighbours][..., 0] - polar[:, None, 0]
    columns = ((away + np.pi) % (2 * np.pi) - np.pi) / graph.column
    assert graph.offsets[real][:, 0] == pytest.approx(columns[real], abs=1e-3)


def test_a_point_knows_how_far_the_rings_above_and_below_it_are():
    """A wall seen by rings that are unevenly apart; the outermost have one neighbour."""
    elevation = np.array([-0.02, -0.01, 0.02, 0.04])
    azimuth, tilt = np.meshgrid(np.arange(12) * ALONG, elevation)
    axes = (np.cos(tilt) * np.cos(azimuth), np.cos(tilt) * np.sin(azimuth), np.sin(tilt))
    ring = np.repeat(np.arange(4), 12)
    points = 20 * np.stack([axis.ravel() for axis in axes], axis=1)
    graph = look_around(ObjectScan(points, np.ones(48, np.int64), ring))
    expected = np.array([(0.01, 0.01), (0.03, 0.01), (0.02, 0.03), (0.02, 0.02)])
    np.testing.assert_allclose(graph.steps, expected[ring[graph.rows]], rtol=1e-3)
    metres, to_columns, up_to_down = np.exp(graph.context[:, :3].T)  # as the network is told
    np.testing.assert_allclose(metres, 20 * graph.steps[:, 0], rtol=1e-3)
    np.testing.assert_allclose(to_columns, graph.steps[:, 0] / ALONG / np.e, rtol=1e-3)
    np.testing.assert_allclose(up_to_down, graph.steps[:, 0] / graph.steps[:, 1], rtol=1e-3)
