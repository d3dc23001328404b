# SPDX-License-Identifier: Apache-2.0
"""Which ring of the sensor a point is on: by a field, by the order, or by the elevations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..compute import machine_code
from ..sensor.neighbours import fill
from .place import about_sensor, elevations, find_place, ring_levels

if TYPE_CHECKING:
    from ..data import Scan

FEWEST_RINGS, MOST_RINGS = 4, 512
FEWEST_A_RING = 8  # points; a ring that saw less does not count as one
ELEVATION_BIN = np.radians(0.01)
FILLED = 0.3  # of the bins between lowest and highest: more are no levels (rings fill .03)
SPREAD = 0.35  # of the gap between neighbouring rings: a wider ring is none
ORDER_POINTS = 20_000  # points that tell whether an order or levels of elevation hold rings
FIELD_POINTS, FIELD_RINGS = 4000, 4  # ... and whether a field does
JUMP = np.radians(1.0)  # from shot to shot of a ring, between usual shots: that is none
LEVEL_POINTS = 64  # points of a ring that tell its elevation


@dataclass(frozen=True, eq=False)
class Rings:
    """The sensor's rings as a scan shows them, sorted by elevation."""

    row: np.ndarray  # (n,) int64, 0 is the lowest ring
    azimuth: np.ndarray  # (n,) radians
    elevation: np.ndarray  # (rings,) radians, rising, in the sensor's frame
    step: float  # radians between neighbouring shots of a ring

    @property
    def gap(self) -> np.ndarray:
        """Radians from each ring to its neighbours (rings,), the greater of the two."""
        between = np.diff(self.elevation)
        padded = np.concatenate([between[:1], between, between[-1:]])
        return np.maximum(padded[:-1], padded[1:])


def find_rings(points: np.ndarray, ring: np.ndarray | None = None) -> tuple[np.ndarray | None, str]:
    """Ring number (n,) int32 of points (n, 3), and what told it: field, order, elevation, none."""
    if ring is not None and _is_plausible(ring) and _turn_level(points, np.asarray(ring)):
        return np.asarray(ring).astype(np.int32, copy=False), "field"
    if len(points) >= FEWEST_RINGS * FEWEST_A_RING:
        order = rings_from_order(points)
        if order is not None and not _is_plausible(order):
            order = None
        if order is not None and _are_levels(points, order):
            return order, "order"
        found = rings_from_elevation(points)
        if found is not None and _is_plausible(found) and _are_levels(points, found):
            return found, "elevation"
        # the order may hold levels about a sensor elsewhere
        place = None if order is None else find_place(points, order)
        if place is not None and place.any() and _are_levels(about_sensor(points, place), order):
            return order, "order"
    return None, "none"


def require_rings(scan: Scan, where) -> tuple[np.ndarray, bool]:
    """Ring of each point of a scan that was read from `where`, and whether they were counted in it;
    ValueError where it shows none, or none about its origin."""
    ring, source = find_rings(scan.points, scan.ring)
    if ring is None:
        raise ValueError(
            f"{where}: {scan.name} shows no rings; record a field `ring`, or give a folder of "
            "KITTI's files"
        )
    place = None if source == "elevation" else find_place(scan.points, ring)
    if place is not None and place.any():
        at = " ".join(f"{metres:.1f}" for metres in place[:3])
        tilt = np.degrees(np.arcsin(np.linalg.norm(place[3:])))
        raise ValueError(
            f"{where}: {scan.name} was measured from ({at}), tilted by {tilt:.0f} degrees; "
            "record scans in the sensor's own frame"
        )
    return ring, source != "field"


def describe_rings(points: np.ndarray, ring: np.ndarray) -> Rings | None:
    """Rings (at least two) by rising elevation, whatever their numbers; None if there are fewer."""
    _, number = (
        np.unique(ring, return_inverse=True) if _is_wild(ring) else (None, ring - ring.min())
    )
    starts, order = fill(number, int(number.max()) + 1)
    middle = _middle_elevations(points, starts, order)
    seen = np.flatnonzero(np.isfinite(middle))
    if len(seen) < 2:
        return None
    by_height = seen[np.argsort(middle[seen], kind="stable")]
    row = np.zeros(len(middle), np.int64)
    row[by_height] = np.arange(len(by_height))
    rising = np.maximum.accumulate(middle[by_height] + 1e-9 * np.arange(len(by_height)))
    azimuth = np.arctan2(points[:, 1], points[:, 0])
    return Rings(row.take(number), azimuth, rising, _shot_step(points, starts, order))


def rings_from_order(points: np.ndarray) -> np.ndarray | None:
    """Ring numbers of a scan stored ring after ring (KITTI), each turning once from straight ahead.

    A new ring starts where the azimuth falls back; None where the order holds no rings.
    """
    if len(points) < 2:
        return None
    azimuth = np.mod(np.arctan2(points[:, 1], points[:, 0]), 2 * np.pi)
    step = np.diff(azimuth)
    if np.median(step) < 0:  # a sensor that turns clockwise
        step = -step
    starts = step < -1.0
    returns = step > 2 * np.pi - 0.05  # noise across straight ahead: still the ring before
    ring = np.zeros(len(points), np.int32)
    np.cumsum(starts.astype(np.int32) - returns, out=ring[1:])
    ring -= ring.min()
    return ring if 0 < ring.max() < 256 else None


def rings_from_elevation(points: np.ndarray) -> np.ndarray | None:
    """Ring numbers (n,) where the elevations show clear levels, 0 the lowest; None otherwise."""
    elevation = elevations(points)
    low = elevation.min()
    level = ((elevation - low) / ELEVATION_BIN).astype(np.int64)
    filled = np.bincount(level) > 0
    starts = np.flatnonzero(filled & ~np.r_[False, filled[:-1]])
    if filled.mean() > FILLED:  # as of rosettes, or of a sensor that is not at the origin
        return None
    if not FEWEST_RINGS <= len(starts) <= MOST_RINGS:
        return None
    return (np.searchsorted(starts, level, "right") - 1).astype(np.int32)


def _is_plausible(ring: np.ndarray) -> bool:
    """Whether there are several ring numbers; some drivers fill the field with zeros."""
    sample = np.asarray(ring)[:: max(1, len(ring) // FIELD_POINTS) | 1]
    return len(sample) > 0 and 2 <= len(np.unique(sample)) <= MOST_RINGS


def _turn_level(points: np.ndarray, ring: np.ndarray) -> bool:
    """Whether lasers go around, however their frame is tilted: neighbours look equally high.

    The lines of a sensor that draws rosettes do not; nor do rows that are anything else.
    """
    numbers = np.unique(ring[:: max(1, len(ring) // FIELD_POINTS) | 1])
    jumps = []
    for number in numbers[:: -(-len(numbers) // FIELD_RINGS)]:
        mine = points[ring == number]
        order = np.argsort(np.arctan2(mine[:, 1], mine[:, 0]), kind="stable")
        jumps.append(np.abs(np.diff(elevations(mine)[order])))
    jumps = np.concatenate(jumps)
    return len(jumps) == 0 or bool(np.nanmedian(jumps) < JUMP)


def _is_wild(ring: np.ndarray) -> bool:
    """Whether the numbers span so much that a table of all of them would be a waste."""
    return int(ring.max()) - int(ring.min()) >= 16 * MOST_RINGS


def _are_levels(points: np.ndarray, ring: np.ndarray) -> bool:
    """Whether most points keep to their ring's elevation, closer than rings are to each other."""
    every = max(1, len(points) // ORDER_POINTS)
    _, number, count = np.unique(ring[::every], return_inverse=True, return_counts=True)
    large = count >= FEWEST_A_RING / 2
    if np.count_nonzero(large) < FEWEST_RINGS or count[large].sum() < 0.9 * len(number):
        return False
    middle, width = ring_levels(points[::every], number, FEWEST_A_RING / 2)
    return bool(np.median(width) < SPREAD * np.median(np.diff(np.sort(middle))))


@machine_code
def _middle_elevations(points, starts, order):
    """Median elevation of each ring, nan where it has no point."""
    middle = np.full(len(starts) - 1, np.nan)
    for ring in range(len(middle)):
        count = starts[ring + 1] - starts[ring]
        if count:
            some = order[starts[ring] : starts[ring + 1] : max(1, count // LEVEL_POINTS)]
            elevation = np.empty(len(some))
            for k in range(len(some)):
                x, y, z = points[some[k], 0], points[some[k], 1], points[some[k], 2]
                elevation[k] = np.arctan2(z, np.sqrt(x * x + y * y))
            middle[ring] = np.median(elevation)
    return middle


@machine_code
def _shot_step(points, starts, order):
    """Median azimuth (radians) between neighbours on their ring, at most a turn by the fullest."""
    bins = 4096
    width = 0.0002
    count, total, fullest = np.zeros(bins, np.int64), 0, 1
    for ring in range(len(starts) - 1):
        fullest = max(fullest, starts[ring + 1] - starts[ring])
        for place in range(starts[ring], starts[ring + 1] - 1, 7):
            i, j = order[place], order[place + 1]
            cross = points[i, 0] * points[j, 1] - points[i, 1] * points[j, 0]
            dot = points[i, 0] * points[j, 0] + points[i, 1] * points[j, 1]
            step = abs(np.arctan2(cross, dot))
            if step > 1e-5:
                count[min(int(step / width), bins - 1)] += 1
                total += 1
    turn = 2 * np.pi / fullest
    passed = 0
    for k in range(bins):
        passed += count[k]
        if 2 * passed >= total > 0:
            return min((k + 0.5) * width, turn)
    return turn
