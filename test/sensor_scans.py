# SPDX-License-Identifier: Apache-2.0
"""Scans of a plain sensor for tests: even rings and columns, any object at any range."""

import numpy as np

from apusmog_core.sensor.view import ObjectScan

ALONG, UP = 2 * np.pi / 1800, np.radians(0.8)
LOWEST = -0.03  # radians


def grid_scan(
    reach: np.ndarray,
    instance: np.ndarray | int = 1,
    shift: float = 0.0,
    start: float = 3.1,
    **rest,
) -> ObjectScan:
    """Returns at ranges (rings, columns), nan for none, ring by ring from the lowest.

    Odd rings are shifted by a share of a column; the first column is at the azimuth `start`, so
    that most scans cross the cut at pi. `instance` has the shape of the ranges, or is one for all.
    """
    ring, column = np.indices(reach.shape)
    azimuth = start + (column + shift * (ring % 2)) * ALONG
    elevation = LOWEST + ring * UP
    level = reach * np.cos(elevation)
    axes = (level * np.cos(azimuth), level * np.sin(azimuth), reach * np.sin(elevation))
    there = np.isfinite(reach)
    points = np.stack(axes, axis=-1)[there]
    instance = np.broadcast_to(instance, reach.shape)[there].astype(np.int64)
    rest.setdefault("ring", ring[there])
    return ObjectScan(points, instance, **rest)


def bumpy(rings: int = 6, columns: int = 30, seed: int = 0, middle: float = 20.0) -> np.ndarray:
    """Ranges (rings, columns) that differ everywhere."""
    return middle + np.random.default_rng(seed).normal(0, 0.2, (rings, columns))
