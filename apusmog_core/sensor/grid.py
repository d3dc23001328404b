# SPDX-License-Identifier: Apache-2.0
"""A cloud as its sensor sees it: coordinates in steps of the sensor's own pattern."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..compute import machine_code
from .neighbours import nearest_rays

# --- coordinates ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RayGrid:
    """Log-polar coordinates about the sensor, in steps of its own pattern.

    (azimuth / step_azimuth, elevation / step_elevation, ln(range) / step_elevation): neighbouring
    rays are one apart, and a surface looks the same at any range.
    """

    origin: np.ndarray
    step_azimuth: float  # radians between points of one ring
    step_elevation: float  # radians between rings
    forward: float  # azimuth that becomes zero, so that no object straddles the wrap

    def to_grid(self, points: np.ndarray) -> np.ndarray:
        """Cartesian (n, 3) -> grid coordinates (n, 3)."""
        azimuth, elevation, reach = polar(points, self.origin)
        azimuth = wrap(azimuth - self.forward)
        steps = (self.step_azimuth, self.step_elevation, self.step_elevation)
        return np.stack((azimuth, elevation, np.log(reach)), axis=1) / np.asarray(steps)

    def to_points(self, grid: np.ndarray) -> np.ndarray:
        """Grid coordinates (n, 3) -> Cartesian (n, 3)."""
        return to_points([self], grid, np.array([len(grid)]), np.zeros((1, 3)))


def to_points(
    grids: Sequence[RayGrid], coordinates: np.ndarray, sizes: np.ndarray, centres: np.ndarray
) -> np.ndarray:
    """Coordinates (n, 3), sizes[i] of grid i from its centre (clouds, 3) -> Cartesian (n, 3)."""
    values = np.array([(g.step_azimuth, g.step_elevation, g.forward, *g.origin) for g in grids])
    return _to_points(values.reshape(-1, 6), coordinates, np.asarray(sizes), centres)


@machine_code
def _to_points(values, coordinates, sizes, centres):
    points = np.empty((len(coordinates), 3))
    end = 0
    for grid, size in enumerate(sizes):
        along, up, forward, x, y, z = values[grid]
        start, end = end, end + size
        for i in range(start, end):
            azimuth = (coordinates[i, 0] + centres[grid, 0]) * along + forward
            elevation = (coordinates[i, 1] + centres[grid, 1]) * up
            reach = np.exp((coordinates[i, 2] + centres[grid, 2]) * up)
            level = reach * np.cos(elevation)
            points[i, 0] = x + level * np.cos(azimuth)
            points[i, 1] = y + level * np.sin(azimuth)
            points[i, 2] = z + reach * np.sin(elevation)
    return points


def wrap(angle: np.ndarray) -> np.ndarray:
    """Angles into [-pi, pi)."""
    return (angle + np.pi) % (2 * np.pi) - np.pi


def polar(points: np.ndarray, origin: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Azimuth, elevation and range of points (n, 3) as seen from the origin."""
    ray = np.asarray(points, np.float64) - origin
    reach = np.maximum(np.linalg.norm(ray, axis=1), 1e-3)
    return np.arctan2(ray[:, 1], ray[:, 0]), np.arcsin(np.clip(ray[:, 2] / reach, -1, 1)), reach


RING_JITTER = np.radians(0.1)  # points closer than this in elevation are on one ring
DEFAULT_STEPS = (np.radians(0.17), np.radians(0.42))  # an HDL-64E at 10 Hz
WITNESSES, WITNESS_SEES = 24, 24  # points of each cloud that are asked for their neighbours
WITNESS_CELL = np.radians(0.3)  # about the distance of these
SAME_RAY = 1e-5  # radians


def scan_grids(clouds: Sequence[np.ndarray], origin) -> tuple[list[RayGrid], np.ndarray]:
    """The sensor's grid as each cloud shows it, and all points (n, 3) in grid steps.

    A cloud that does not show its steps (a single ring, a handful of points) takes the median of
    the others.
    """
    origin = np.asarray(origin, np.float64)
    sizes = np.array([len(c) for c in clouds])
    cloud = np.repeat(np.arange(len(sizes)), sizes)
    azimuth, elevation, reach = polar(np.concatenate(clouds), origin)
    starts = np.cumsum(sizes) - sizes
    forward = np.arctan2(
        np.add.reduceat(np.sin(azimuth), starts), np.add.reduceat(np.cos(azimuth), starts)
    )
    azimuth = wrap(azimuth - forward[cloud])
    steps = _measure_steps(azimuth, elevation, sizes)
    for column, fallback in zip(steps.T, DEFAULT_STEPS, strict=True):
        known = column[np.isfinite(column)]
        column[~np.isfinite(column)] = np.median(known) if len(known) else fallback
    steps[:, 1] = steps.max(axis=1)  # rings are never closer than the points of one
    unit = np.stack((steps[cloud, 0], steps[cloud, 1], steps[cloud, 1]), axis=1)
    grid = np.stack((azimuth, elevation, np.log(reach)), axis=1) / unit
    grids = [RayGrid(origin, *s, f) for s, f in zip(steps.tolist(), forward.tolist(), strict=True)]
    return grids, grid


def ray_grid(points: np.ndarray, origin) -> RayGrid:
    """The grid that the points of one cloud show."""
    return scan_grids([points], origin)[0][0]


def _measure_steps(azimuth: np.ndarray, elevation: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Typical steps (clouds, 2) along a ring and between rings, radians; nan: cannot be seen."""
    starts = np.cumsum(sizes) - sizes
    spread = (np.arange(WITNESSES) + 0.5) / WITNESSES
    asked = starts[:, None] + np.minimum(spread * sizes[:, None], sizes[:, None] - 1).astype(int)
    asked = asked.ravel()
    rays = np.stack((azimuth, elevation), axis=1)
    witnesses = np.full(len(sizes), WITNESSES)
    index = nearest_rays(rays / WITNESS_CELL, sizes, asked, witnesses, WITNESS_SEES)
    return _median_of_finite(_least_steps(rays, asked, index).reshape(-1, WITNESSES, 2))


@machine_code
def _least_steps(rays, asked, index):
    """Least steps (m, 2) along a ring and to another among the neighbours (m, k) of rays asked."""
    steps = np.full((len(asked), 2), np.inf)
    for i in range(len(asked)):
        for j in index[i]:
            across = abs(rays[j, 0] - rays[asked[i], 0])
            up = abs(rays[j, 1] - rays[asked[i], 1])
            if up >= RING_JITTER:
                steps[i, 1] = min(steps[i, 1], up)
            elif across > SAME_RAY:
                steps[i, 0] = min(steps[i, 0], across)
    return steps


def _median_of_finite(values: np.ndarray) -> np.ndarray:
    """Median (n, c) over the second axis of values (n, m, c) that are not infinite; or nan."""
    count = np.isfinite(values).sum(axis=1, keepdims=True)
    middle = [np.maximum(count - 1, 0) // 2, np.minimum(count // 2, values.shape[1] - 1)]
    values = np.sort(values, axis=1)  # infinite ones last
    low, high = (np.take_along_axis(values, m, axis=1)[:, 0] for m in middle)
    return np.where(count[:, 0] > 0, (low + high) / 2, np.nan)


def ray_neighbours(grid: np.ndarray, sizes: np.ndarray, k: int) -> np.ndarray:
    """Nearest rays (n, k) of the same cloud, whatever their depth, itself first."""
    rays, sizes = np.ascontiguousarray(grid[:, :2], np.float64), np.asarray(sizes)
    return nearest_rays(rays, sizes, np.arange(len(rays)), sizes, k)


def grid_context(grids: list[RayGrid], coordinates: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """What a network is told of the scale (n, 2): ln(metres between rings), ln(step ratio).

    coordinates (n, 3) are those of all grids, sizes[i] of grid i.
    """
    up = np.repeat([g.step_elevation for g in grids], sizes)
    along = np.repeat([g.step_azimuth for g in grids], sizes)
    gap = coordinates[:, 2] * up + np.log(up)
    return np.stack((gap, np.log(up / along)), axis=1).astype(np.float32)
