# SPDX-License-Identifier: Apache-2.0
"""Angles about the sensor, and how far apart its shots are."""

from __future__ import annotations

import numpy as np

from ..compute import machine_code
from .neighbours import nearest_rays

RING_JITTER = np.radians(0.1)  # points closer than this in elevation are on one ring
DEFAULT_STEPS = (np.radians(0.17), np.radians(0.42))  # an HDL-64E at 10 Hz
STEP_SAMPLES, STEP_NEIGHBOURS = 512, 24  # points that are asked how far their neighbours are
STEP_CELL = np.radians(0.3)  # about the distance of these
SAME_RAY = 1e-5  # radians


def wrap(angle: np.ndarray) -> np.ndarray:
    """Angles into [-pi, pi)."""
    return (angle + np.pi) % (2 * np.pi) - np.pi


@machine_code
def turn(angle):
    """An angle into [-pi, pi)."""
    return (angle + np.pi) % (2 * np.pi) - np.pi


def to_polar(points: np.ndarray) -> np.ndarray:
    """Azimuth, elevation and ln(range) (n, 3) float64 of points (n, 3) about the sensor.

    NumPy does many at once in float32; errors stay below a millionth of the range.
    """
    x, y, z = np.ascontiguousarray(points.T)
    level = x * x + y * y
    reach = np.log(np.maximum(level + z * z, 1e-6)) / 2
    return np.stack((np.arctan2(y, x), np.arctan2(z, np.sqrt(level)), reach), 1, dtype=np.float64)


def measure_steps(azimuth: np.ndarray, elevation: np.ndarray) -> tuple[float, float]:
    """Typical steps along a ring and between rings, radians, of points without ring numbers."""
    count = len(azimuth)
    asked = np.unique(np.linspace(0, count - 1, min(count, STEP_SAMPLES)).astype(np.int64))
    rays = np.stack((azimuth, elevation), axis=1)
    sizes = (np.array([count]), np.array([len(asked)]))
    index = nearest_rays(rays / STEP_CELL, sizes[0], asked, sizes[1], STEP_NEIGHBOURS)
    least = _least_steps(rays, asked, index)
    known = [column[np.isfinite(column)] for column in least.T]
    steps = [np.median(k) if len(k) else d for k, d in zip(known, DEFAULT_STEPS, strict=True)]
    return float(steps[0]), float(max(steps))  # rings are never closer than the points of one


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
