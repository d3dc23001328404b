# SPDX-License-Identifier: Apache-2.0
"""The sensor's grid, and the rays of a denser sensor on it."""

import numpy as np
import pytest

from apusmog_core.sensor.grid import RayGrid, ray_neighbours, scan_grids
from apusmog_core.sensor.lattice import (
    best_of_each,
    confidence,
    lattice,
    lattice_rays,
    ring_gaps,
    seen_elevations,
)

ALONG, UP = np.radians(0.2), np.radians(0.8)


def wall(rings: int = 6, shift: float = 0.0, reach: float = 20.0) -> np.ndarray:
    """Points of a sensor whose odd rings are shifted by a share of a column."""
    column, ring = (a.ravel() for a in np.meshgrid(np.arange(30.0), np.arange(rings)))
    azimuth = (column + shift * (ring % 2)) * ALONG + 3.1
    elevation = ring * UP - 0.1
    reach = reach + np.random.default_rng(0).normal(0, 0.02, azimuth.size)
    flat = reach * np.cos(elevation)
    axes = (flat * np.cos(azimuth), flat * np.sin(azimuth), reach * np.sin(elevation))
    return np.stack(axes, axis=1)


def seen(points: np.ndarray) -> tuple[RayGrid, np.ndarray, np.ndarray]:
    """Grid, coordinates about their mean, and gaps of one cloud."""
    (grid,), coordinates = scan_grids([points], np.zeros(3))
    local = coordinates - coordinates.mean(axis=0)
    return grid, local, ring_gaps(local, ray_neighbours(local, np.array([len(local)]), 9))


def test_the_grid_finds_the_steps_of_the_sensor_and_inverts():
    points = wall()
    (grid,), coordinates = scan_grids([points], np.zeros(3))
    assert np.allclose(coordinates, grid.to_grid(points))
    assert grid.step_azimuth == pytest.approx(ALONG, rel=0.02)
    assert grid.step_elevation == pytest.approx(UP, rel=0.02)
    assert np.allclose(grid.to_points(grid.to_grid(points)), points, atol=1e-9)


def test_a_new_ray_lies_midway_between_the_columns_of_two_rings():
    _, local, gaps = seen(wall(shift=0.3))
    levels = np.tile((1, 2), (len(local), 1))
    anchors, rays, tier = next(lattice_rays(gaps, levels, keep_measured=True))
    inner = anchors[(anchors >= 2) & (anchors < 28)]  # of the lowest ring
    assert np.allclose(rays[inner, 0], (0.15, 0.5), atol=0.03)
    assert (tier[inner, 0] == 0).all()


def test_rays_leave_upwards_from_every_point_and_downwards_from_the_lowest_ring():
    _, local, gaps = seen(wall(rings=3))
    up, down = lattice_rays(gaps, np.tile((1, 3), (len(local), 1)), keep_measured=True)
    assert len(up[0]) == 90 and set(down[0]) == set(range(30))
    assert (up[1][..., 1] >= 0).all() and (down[1][..., 1] < 0).all()


@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0, 2.1, 3.0, 4.0, 6.5, 16.0, 100.0])
def test_the_lattice_is_dense_enough_and_hardly_denser(ratio):
    across, rings = lattice(ALONG, 2.4 * ALONG, ratio)
    assert ratio <= across * rings <= max(2.0, 2.0 * ratio)
    assert 0.2 < 2.4 / rings * across < 3.0  # neither stripes nor columns


def test_no_ray_looks_over_the_highest_ring_of_things_as_far_away():
    low, high, far = wall(rings=3), wall(rings=6), wall(rings=9, reach=60.0)
    grids, coordinates = scan_grids([low, high, far], np.zeros(3))
    sizes = np.array([len(low), len(high), len(far)])
    steps = np.array([[grid.step_elevation] for grid in grids])
    limits = np.degrees(seen_elevations(coordinates, grids, sizes) * steps) - np.degrees(-0.1)
    assert limits[:, 1] == pytest.approx([4.2, 4.2, 6.6], abs=0.05)  # 0.8 a ring, and 0.2 more
    assert limits[:, 0] == pytest.approx([-0.2, -0.2, -0.2], abs=0.05)


def test_likely_rays_of_the_coarse_lattice_come_first():
    owner = np.array([0, 0, 0, 0, 1, 1])
    sure = np.array([0.9, 0.01, 0.5, 0.9, 0.01, 0.02])
    tier = np.array([0, 0, 0, 1, 0, 0])
    assert best_of_each(owner, sure, tier, np.array([2, 1]), seed=0).tolist() == [0, 2, 5]
    assert sorted(best_of_each(owner, sure, tier, np.array([3, 2]), seed=0)) == [0, 2, 3, 4, 5]


def test_broken_confidence_does_not_break_the_counts():
    owner, tier = np.repeat([0, 1], 2), np.zeros(4, int)
    sure = np.array([np.nan, 0.5, np.nan, np.nan])
    assert sorted(best_of_each(owner, sure, tier, np.array([1, 2]), seed=0)) == [1, 2, 3]


def test_confidence_falls_with_misses_with_doubtful_depth_and_with_long_steps():
    def sure(hit: float, error: float, gap: float) -> float:
        return confidence(hit, np.log(error), 0.0, gap)

    near = sure(4.0, 0.1, 0.1)
    assert near > sure(0.0, 0.1, 0.1) > sure(-4.0, 0.1, 0.1)
    assert near > sure(4.0, 1.0, 0.1) > 0.1  # ten centimetres
    assert sure(4.0, 1.0, 0.5) < 0.01  # half a metre
