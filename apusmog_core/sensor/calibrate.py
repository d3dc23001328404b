# SPDX-License-Identifier: Apache-2.0
"""Range bias of each laser, estimated from a stream of scans without labels.

Along any plane 1 / (horizontal distance) is linear in tan(elevation). So on upright, smooth
surfaces a ring that is off from the line through the rings above and below has another bias.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import numpy as np

from ..compute import machine_code
from .grid import to_polar
from .lasers import MOST_RING_NUMBERS, column_step, fit_lasers, laser_sums
from .view import find_columns

BIN, BINS = 0.004, 151  # metres, and how many around zero, of the histograms of residuals


@dataclass(frozen=True)
class CalibrationConfig:
    """How biases are estimated; `floor` from planted biases in simulation, the rest by hand."""

    columns: int = 2  # one in so many is looked at
    half_window: int = 3  # columns to each side that a line along a ring is fitted to
    fewest: int = 5  # returns in that window
    roughness: float = 0.04  # metres, deviation from the line; more is no smooth surface
    lean: float = 0.6  # horizontal metres for each metre of height; more is not upright
    slant: float = 2.0  # tangent of the angle of incidence along a ring
    gap: float = 0.6  # metres between neighbouring rings on the surface
    prior: float = 0.03  # metres: deviation of biases before anything was measured
    floor: float = 0.006  # metres: error of the medians, however many returns: surfaces bend
    enough: int = 100  # residuals of a ring that settle its median, to about 3 mm
    share: float = 0.6  # of the rings that must have them
    scans: int = 8  # fewest
    memory: int = 20_000  # residuals of a ring; older ones fade
    every: int = 10  # once settled, one scan in so many is looked at
    sample: int = 8  # one return in so many tells whether a scan's rings are those of before
    shift: float = 0.3  # of the gap between rings that they may look elsewhere ...
    most: float = 0.9  # ... and the part of them that may not
    patience: int = 20  # scans of other rings, more than of the known ones, that start all anew


CALIBRATION = CalibrationConfig()
ALL_SCANS = replace(CALIBRATION, every=1)  # for recordings


class Calibration:
    """Bias of each ring, learned scan by scan; may be used from several threads."""

    def __init__(self, config: CalibrationConfig = CALIBRATION):
        self.config = config
        self._lock = threading.Lock()
        self.scans = 0  # that were offered
        self.left_out = 0  # of them, since their rings were others
        self._start()

    def _start(self) -> None:
        self._learned = 0  # scans
        self._others = 0  # lately: scans of other rings less those of the known ones
        self.converged = False
        self.bias = np.zeros(0)  # (rings,) metres by which the ranges of a ring are too long
        self._sums = np.zeros((0, 5))  # see laser_sums
        self._residuals = np.zeros((0, BINS))
        self._weights = np.zeros((0, 2))  # of the rings below and above, summed over residuals

    def update(
        self, points: np.ndarray, ring: np.ndarray, counted: bool = True
    ) -> np.ndarray | None:
        """Learn from one scan: returns (n, 3) about the sensor, and the ring (n,) of each.

        Returns the bias (n,) of these points, None until it is known. Rings that were `counted` in
        the scan, not told by a field, have other numbers when one is missing: where they look
        elsewhere than those before, nothing is learned, and the bias is None.
        """
        with self._lock:
            self.scans += 1
            if len(ring) == 0 or ring.min() < 0 or ring.max() >= MOST_RING_NUMBERS:
                return None
            if counted and not self._knows(points, ring):
                self.left_out += 1
                self._others += 1
                if self._others >= self.config.patience:
                    self._start()
                return None
            self._others = max(0, self._others - 1)
            if not self.converged or self.scans % self.config.every == 0:
                self._learn(to_polar(points), ring)
        return self.of_points(ring)

    def _knows(self, points: np.ndarray, ring: np.ndarray) -> bool:
        """Whether the rings of a scan look where those of the scans before did."""
        known = self._order()
        if len(known) < 2:
            return True
        some = slice(None, None, self.config.sample)
        size = max(len(self._sums), int(ring.max()) + 1)
        count, elevation, inverse = laser_sums(ring[some], to_polar(points[some]), size).T[:3]
        mine, height = fit_lasers(self._sums[known])
        away = elevation[known] - mine * count[known] - height * inverse[known]
        seen = count[known] > 0
        if not seen.any():
            return False
        away = np.quantile(np.abs(away[seen] / count[known][seen]), self.config.most)
        return away < self.config.shift * np.median(np.diff(np.sort(mine)))

    def _learn(self, polar: np.ndarray, ring: np.ndarray) -> None:
        self._learned += 1
        self._grow(int(ring.max()) + 1)
        self._sums += laser_sums(ring, polar, len(self._sums))
        self._count(polar, ring)
        self.bias = self._solve()
        settled = self._residuals.sum(axis=1) >= self.config.enough
        rings = np.count_nonzero(self._sums[:, 0])
        enough = np.count_nonzero(settled) >= self.config.share * rings
        self.converged = enough and self._learned >= self.config.scans

    def of_points(self, ring: np.ndarray | None) -> np.ndarray | None:
        """Bias (n,) of points by their rings; None until it is known."""
        bias = self.bias  # another thread may replace it
        if ring is None or not self.converged or len(ring) == 0:
            return None
        if ring.min() < 0 or ring.max() >= len(bias):
            bias = np.append(bias, 0.0)
            ring = np.where((ring >= 0) & (ring < len(bias) - 1), ring, len(bias) - 1)
        return bias[ring]

    def table(self) -> list[dict[str, float]]:
        """A row for each ring, from the highest: what is known of its laser."""
        with self._lock:
            order = self._order()[::-1]
            elevation, height = fit_lasers(self._sums[order])
            found = self._residuals[order]
            columns = (order, np.degrees(elevation), height, self.bias[order])
        spread = [np.ptp(_quantiles(row, (0.25, 0.75))) / 1.35 for row in found]
        names = ("ring", "elevation", "height", "bias", "spread", "residuals")
        rows = zip(*columns, spread, found.sum(axis=1), strict=True)
        return [dict(zip(names, map(float, row), strict=True)) for row in rows]

    def _grow(self, rings: int) -> None:
        more = max(0, rings - len(self._sums))
        for name in ("_sums", "_residuals", "_weights"):
            setattr(self, name, np.pad(getattr(self, name), ((0, more), (0, 0))))

    def _order(self) -> np.ndarray:
        """Rings that were seen, from the lowest up."""
        seen = np.flatnonzero(self._sums[:, 0])
        return seen[np.argsort(self._sums[seen, 1] / self._sums[seen, 0], kind="stable")]

    def _count(self, polar: np.ndarray, ring: np.ndarray) -> None:
        """Add the residuals of one scan to the histograms."""
        c, order = self.config, self._order()
        rank = np.zeros(len(self._sums), np.int64)
        rank[order] = np.arange(len(order))
        number = rank[ring]
        columns = max(8, round(2 * np.pi / column_step(polar[:, 0], number, len(order))))
        column = find_columns(polar[:, 0], columns)
        limits = (c.half_window, c.fewest, c.roughness, c.slant, c.columns)
        lines = _fit_lines(polar, number, column, len(order), columns, *limits)
        found, weights = _residuals(*lines, c.lean, c.gap)
        self._residuals[order] += found
        self._weights[order] += weights
        total = self._residuals.sum(axis=1)
        fade = np.minimum(1.0, c.memory / np.maximum(total, 1))[:, None]
        self._residuals *= fade
        self._weights *= fade

    def _solve(self) -> np.ndarray:
        """Most likely biases (rings,) for the medians of the residuals, and a normal prior."""
        order, prior = self._order(), self.config.prior
        bias = np.zeros(len(self._sums))
        system, right = np.eye(len(order)) / prior**2, np.zeros(len(order))
        for i in range(1, len(order) - 1):
            histogram, weights = self._residuals[order[i]], self._weights[order[i]]
            total = histogram.sum()
            if total < 1:
                continue
            low, middle, high = _quantiles(histogram, (0.25, 0.5, 0.75))
            variance = self.config.floor**2 + (1.25 * (high - low + BIN) / 1.35) ** 2 / total
            row = np.zeros(len(order))
            row[i - 1 : i + 2] = -weights[0] / total, 1.0, -weights[1] / total
            system += np.outer(row, row) / variance
            right += row * middle / variance
        bias[order] = np.linalg.solve(system, right)
        return bias


def _quantiles(histogram: np.ndarray, shares) -> np.ndarray:
    """Values below which these shares of the residuals lie, metres; nan where there are none."""
    total = np.cumsum(histogram)
    if total[-1] <= 0:
        return np.full(len(shares), np.nan)
    edges = (np.arange(BINS + 1) - BINS / 2) * BIN
    return np.interp(np.asarray(shares) * total[-1], np.append(0, total), edges)


@machine_code
def _fit_lines(polar, number, column, rings, columns, half, fewest, roughness, slant, every):
    """1 / horizontal distance and tan(elevation) (rings, columns) of smooth surfaces, else nan.

    A line along the ring is fitted around the middle of each column, so that all rings have the
    same azimuths."""
    size = 2 * np.pi / columns
    aside = np.full((rings, columns), np.nan)  # radians from the middle of the column
    flat, tangent = np.empty((rings, columns)), np.empty((rings, columns))
    for i in range(len(number)):
        ring, c = number[i], column[i]
        aside[ring, c] = (polar[i, 0] + np.pi - c * size + np.pi) % (2 * np.pi) - np.pi
        flat[ring, c] = 1 / (np.exp(polar[i, 2]) * np.cos(polar[i, 1]))
        tangent[ring, c] = np.tan(polar[i, 1])
    inverse = np.full((rings, columns), np.nan)
    rise = np.full((rings, columns), np.nan)
    for ring in range(rings):
        for c in range(0, columns, every):
            if not aside[ring, c] == aside[ring, c]:
                continue
            n, sx, sxx, sq, sxq, sqq, st = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
            for k in range(-half, half + 1):
                at = (c + k) % columns
                x, q = aside[ring, at] + k * size, flat[ring, at]
                if x == x:  # not nan
                    n += 1
                    sx += x
                    sxx += x * x
                    sq += q
                    sxq += x * q
                    sqq += q * q
                    st += tangent[ring, at]
            if n < fewest:
                continue
            vx, vq, vxq = sxx - sx * sx / n, sqq - sq * sq / n, sxq - sx * sq / n
            slope, mean = vxq / vx, sq / n
            rest = max(vq - slope * vxq, 0.0) / n
            if np.sqrt(rest) < roughness * mean * mean and abs(slope) < slant * mean:
                inverse[ring, c] = mean - slope * sx / n
                rise[ring, c] = st / n
    return inverse, rise


@machine_code
def _residuals(inverse, rise, lean, gap):
    """Histograms (rings, BINS) of how much farther a ring measured than the line through the two
    beside it, and sums (rings, 2) of the weights that these have in it."""
    rings, columns = inverse.shape
    found, weights = np.zeros((rings, BINS)), np.zeros((rings, 2))
    for ring in range(1, rings - 1):
        for c in range(columns):
            q, below, above = inverse[ring, c], inverse[ring - 1, c], inverse[ring + 1, c]
            if not (q > 0 and below > 0 and above > 0):  # nan: no surface there
                continue
            low, high = rise[ring - 1, c], rise[ring + 1, c]
            tall = high / above - low / below
            if not (0 < tall < 2 * gap) or abs(1 / above - 1 / below) > lean * tall:
                continue
            way = (rise[ring, c] - low) / (high - low)
            if not 0.1 < way < 0.9:
                continue
            line = below + way * (above - below)
            secant = np.sqrt(1 + rise[ring, c] ** 2)
            bin = int(np.floor((1 / q - 1 / line) * secant / BIN + BINS / 2))
            if 0 <= bin < BINS:
                found[ring, bin] += 1
                weights[ring, 0] += (1 - way) * (below / line) ** 2
                weights[ring, 1] += way * (above / line) ** 2
    return found, weights
