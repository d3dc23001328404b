# SPDX-License-Identifier: Apache-2.0
"""The lasers of a sensor as a scan shows them: where they look and from what height."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..compute import machine_code
from .grid import measure_steps, turn

LEAST_RETURNS = 8  # of a ring, to fit how its elevation changes with range
MOST_RING_NUMBERS = 4096  # between the least and the greatest, for a table of them
SAME_SHOT = 1e-5  # radians
STEP_SAMPLES = 8192  # steps between shots, of which the median is taken
WIDEST_COLUMN = np.radians(1.0)
DEFAULT_COLUMN = float(np.radians(0.2))


@dataclass(frozen=True, eq=False)
class Lasers:
    """Which laser measured a point, from the lowest up, and where the lasers look."""

    number: np.ndarray  # (n,) int64, 0.. by elevation
    elevation: np.ndarray  # (rings,) radians, at infinite range
    height: np.ndarray  # (rings,) metres: a laser that starts higher sees lower with range
    step: float  # radians between shots of one ring


def find_lasers(polar: np.ndarray, ring: np.ndarray | None) -> Lasers:
    """Rings of a scan (n, 3) by their numbers, or by its elevations where they are not known."""
    if ring is None:
        step, up = measure_steps(polar[:, 0], polar[:, 1])
        turn = 2 * np.pi * polar[:, 1] / up
        phase = np.arctan2(np.sin(turn).mean(), np.cos(turn).mean()) / (2 * np.pi)
        ring = np.round(polar[:, 1] / up - phase).astype(np.int64)
        names, number = np.unique(ring, return_inverse=True)
    else:
        names, number = _number_lasers(np.asarray(ring))
        step = column_step(polar[:, 0], number, len(names))
    sums = laser_sums(number, polar, len(names))
    fitted, height = fit_lasers(sums)
    order = np.argsort(sums[:, 1] / sums[:, 0], kind="stable")
    rank = np.empty(len(names), np.int64)
    rank[order] = np.arange(len(names))
    return Lasers(rank[number], fitted[order], height[order], step)


def _number_lasers(ring: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Names (rings,) and the place of each point's among them (n,); as np.unique, but quick."""
    low, high = int(ring.min()), int(ring.max())
    if high - low > MOST_RING_NUMBERS:
        return np.unique(ring, return_inverse=True)
    there = np.bincount(ring - low)
    names = np.flatnonzero(there)
    return names + low, (np.cumsum(there > 0) - 1)[ring - low]


def column_step(azimuth: np.ndarray, number: np.ndarray, rings: int) -> float:
    """Median angle between neighbouring shots of one ring, radians."""
    step = _steps_as_stored(azimuth, number, rings)
    step = step[:: len(step) // STEP_SAMPLES + 1]
    step = step[step > SAME_SHOT]
    if len(step) == 0 or np.median(step) > WIDEST_COLUMN:  # stored in no order
        order = np.lexsort((azimuth, number))
        step = np.diff(azimuth[order])[np.diff(number[order]) == 0]
        step = step[step > SAME_SHOT]
    return float(np.median(step)) if len(step) else DEFAULT_COLUMN


@machine_code
def _steps_as_stored(azimuth, number, rings):
    """Angle (n,) of each shot from the one before it on its ring."""
    last = np.full(rings, np.nan)
    steps = np.zeros(len(azimuth))
    for i in range(len(azimuth)):
        before = last[number[i]]
        if before == before:
            steps[i] = abs(turn(azimuth[i] - before))
        last[number[i]] = azimuth[i]
    return steps


@machine_code
def laser_sums(number, polar, rings):
    """For each ring: count, and sums of e, 1/r, 1/r^2 and e/r."""
    sums = np.zeros((rings, 5))
    for i in range(len(number)):
        e, u, row = polar[i, 1], np.exp(-polar[i, 2]), sums[number[i]]
        row[0] += 1
        row[1] += e
        row[2] += u
        row[3] += u * u
        row[4] += e * u
    return sums


def fit_lasers(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least squares of elevation = e0 + height / range, for each ring."""
    count, e, u, uu, eu = sums.T
    mean_e, mean_u = e / count, u / count
    spread = uu / count - mean_u**2
    enough = (count >= LEAST_RETURNS) & (spread > 1e-5)
    slope = np.where(enough, (eu / count - mean_e * mean_u) / np.where(enough, spread, 1), 0.0)
    slope = np.where(np.abs(slope) < 0.5, slope, 0.0)  # metres; more is not a laser's place
    return mean_e - slope * mean_u, slope


def ring_spacing(lasers: Lasers, number: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    """Radians (n, 2) to the ring above and below, of points on rings (n,), 1 / range away (n,)."""
    last = len(lasers.elevation) - 1
    both = []
    for other in (np.minimum(number + 1, last), np.maximum(number - 1, 0)):
        gap = lasers.elevation[other] - lasers.elevation[number]
        gap += (lasers.height[other] - lasers.height[number]) * inverse
        both.append(np.maximum(np.abs(gap), 1e-3))
    up = np.where(number == last, both[1], both[0])  # the outermost have one neighbour
    return np.stack((up, np.where(number == 0, up, both[1])), axis=1)
