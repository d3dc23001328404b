# SPDX-License-Identifier: Apache-2.0
"""Objects joined across the sensor's rings, and which of them are objects at all.

Euclidean distance does not hold across rings that are farther apart than an object is high. There,
points join with those above them on the next ring.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..compute import machine_code
from ..config import ClusterConfig
from ..sensor.neighbours import fill
from .rings import Rings
from .sets import find_root, number_sets
from .terrain import Terrain

SHOTS = 1.5  # to either side on the next ring
SPACINGS = 2.5  # of shots along a ring, that always join
SLANT = 1.2  # metres farther or nearer for each metre from ring to ring
FARTHEST_JOIN = 1.6  # metres farther or nearer on the next ring
THING = (1.5, 1.0)  # metres, width and height of what must be found
SHARE = 0.15  # of the returns that it could give
FEWEST = 2  # points of an instance
APART = 0.35  # metres from ring to ring, from which on an object may be seen by a single one
FOOT = (0.03, 0.3)  # metres above the ground of what may be the foot of an object
UPRIGHT = 0.1  # metres farther or nearer than the object above
MOSTLY = 0.5  # of the points of an object on a single ring must stand out
GROUND_KNOWN = 75.0  # metres: farther away an object needs two rings
CLEAR, WIDE = 0.25, 0.3  # metres above the ground, and across, of an object on a single ring


@dataclass(frozen=True, eq=False)
class RingPoints:
    """Where n points are on the sensor's grid, and how high above the ground."""

    row: np.ndarray  # (n,) ring by rising elevation
    azimuth: np.ndarray  # (n,) float32, in the sensor's frame
    height: np.ndarray  # (n,) float32, above the ground
    stands_out: np.ndarray  # (n,) bool, on a short piece of a ring before something farther away
    rings: Rings

    @classmethod
    def of_all(cls, rings: Rings, terrain: Terrain) -> RingPoints:
        """The points of a scan."""
        return cls(rings.row, rings.azimuth, terrain.height, terrain.stands_out, rings)

    def of(self, chosen: np.ndarray) -> RingPoints:
        """That of some of the points."""
        columns = (self.row, self.azimuth, self.height, self.stands_out)
        return RingPoints(*(column.take(chosen) for column in columns), self.rings)

    @property
    def least_adaptive(self) -> float:
        """Metres a metre of range that neighbours on a ring are apart, with room for lost shots."""
        return SPACINGS * self.rings.step

    def join(
        self,
        points: np.ndarray,
        component: np.ndarray,
        tolerance: float,
        adaptive: float,
        share: float,
    ) -> np.ndarray:
        """Component number (n,) after joins across rings that are apart more than the tolerance."""
        return _join(
            points,
            component,
            self.row,
            self.azimuth,
            self.rings.elevation,
            self.rings.step,
            tolerance,
            adaptive,
            share,
        )

    def look_like_objects(
        self,
        component: np.ndarray,
        count: np.ndarray,
        low: np.ndarray,
        high: np.ndarray,
        config: ClusterConfig,
    ) -> np.ndarray:
        """Which components (k,) have as many points, and stand as clear, as objects there would.

        They have `count` (k,) points between `low` and `high` (k, 3).
        """
        top, mean, first, last = _heights_and_rings(component, self.height, self.row, len(count))
        outstanding = np.bincount(component, self.stands_out, minlength=len(count)) / count
        middle, across = (low + high) / 2, high - low
        reach = np.sqrt(np.einsum("kd,kd->k", middle, middle))
        gap = self.rings.gap[(first + last) // 2]
        possible = THING[0] / (reach * self.rings.step) * (THING[1] / (reach * gap))
        least = np.clip(SHARE * possible, min(FEWEST, config.min_points), config.min_points)
        width = np.hypot(across[:, 0], across[:, 1]) + reach * self.rings.step
        one_ring = first == last
        alone = one_ring & (reach * gap >= APART) & (mean >= CLEAR) & (width >= WIDE)
        stands = (across[:, 2] >= config.min_height) | alone
        # the ring of a slope may be high above flat ground, but goes on to both sides; farther away
        # the ground is not known well enough
        stands &= ~one_ring | ((outstanding >= MOSTLY) & (reach <= GROUND_KNOWN))
        return (count >= least) & (top >= CLEAR) & stands


@machine_code
def _heights_and_rings(component, height, row, count):
    """Greatest and mean height, first and last ring, each (count,), of each component."""
    top, total, size = np.full(count, -np.inf), np.zeros(count), np.zeros(count)
    first, last = np.full(count, 1 << 30), np.zeros(count, np.int64)
    for i in range(len(component)):
        c = component[i]
        top[c], total[c], size[c] = max(top[c], height[i]), total[c] + height[i], size[c] + 1
        first[c], last[c] = min(first[c], row[i]), max(last[c], row[i])
    return top, total / size, first, last


@machine_code
def _join(points, component, row, azimuth, elevation, step, tolerance, adaptive, share):
    columns = max(int(2 * np.pi / step), 8)
    width = 2 * np.pi / columns
    rows = len(elevation)
    column = np.empty(len(points), np.int64)
    cell = np.empty(len(points), np.int64)
    for i in range(len(points)):
        column[i] = int((azimuth[i] + np.pi) / width) % columns
        cell[i] = row[i] * columns + column[i]
    starts, order = fill(cell, rows * columns)
    parent = np.arange(component.max() + 1)
    side = int(np.ceil(SHOTS))
    for i in range(len(points)):
        above = row[i] + 1
        if above >= rows:
            continue
        flat = np.sqrt(points[i, 0] ** 2 + points[i, 1] ** 2)
        apart = (elevation[above] - elevation[row[i]]) * flat
        if apart * 1.5 < tolerance + adaptive * flat:
            continue  # close enough to be joined already
        farthest = share * min(max(SLANT * apart, tolerance + adaptive * flat), FARTHEST_JOIN)
        for shift in range(-side, side + 1):
            there = above * columns + (column[i] + shift) % columns
            for place in range(starts[there], starts[there + 1]):
                j = order[place]
                a, b = find_root(parent, component[i]), find_root(parent, component[j])
                if a == b:
                    continue
                other = np.sqrt(points[j, 0] ** 2 + points[j, 1] ** 2)
                if abs(other - flat) <= farthest:
                    parent[a] = b
    return number_sets(parent)[component]


def find_feet(
    points: np.ndarray, height: np.ndarray, rings: Rings, label: np.ndarray
) -> np.ndarray:
    """Labels (n,) after objects got back what the ground took of their lowest parts.

    A point just above the ground belongs to the object that stands upright on top of it.
    """
    return _feet(points, height, rings.row, rings.azimuth, label, rings.elevation, rings.step)


@machine_code
def _apart(points, i, j):
    """How much farther away one point is than the other, on the ground."""
    one = np.sqrt(points[i, 0] ** 2 + points[i, 1] ** 2)
    return abs(one - np.sqrt(points[j, 0] ** 2 + points[j, 1] ** 2))


@machine_code
def _feet(points, height, row, azimuth, label, elevation, step):
    rows, columns = len(elevation), max(int(2 * np.pi / step), 8)
    label = label.copy()
    lowest = np.full((2, columns), -1, np.int64)  # labelled point of each shot, this ring and above
    starts, order = fill(row, rows)
    for r in range(rows - 1, -1, -1):
        here, above = lowest[r % 2], lowest[(r + 1) % 2]
        here[:] = -1
        for place in range(starts[r], starts[r + 1]):
            i = order[place]
            column = int((azimuth[i] + np.pi) / (2 * np.pi) * columns) % columns
            if label[i] == 0 and FOOT[0] < height[i] < FOOT[1]:
                for shift in (0, -1, 1):
                    j = above[(column + shift) % columns]
                    if j >= 0 and _apart(points, i, j) < UPRIGHT and height[j] < height[i] + 0.4:
                        label[i] = label[j]
                        break
            if label[i] > 0:
                here[column] = i
    return label
