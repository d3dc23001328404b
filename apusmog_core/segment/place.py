# SPDX-License-Identifier: Apache-2.0
"""Where the sensor stands in the frame of its scans, and how it is turned, from the first scans.

Drivers publish scans about the sensor, but some systems move them to the vehicle (base_link), and
elevations from there tell nothing about rings. What a laser meets on its way around lies on a cone;
the cones of all rings have their tip in the sensor, and its axis.
"""

from __future__ import annotations

import threading

import numpy as np

HERE = np.zeros(5, np.float32)  # a place: x, y, z, and x and y of the upward axis; in its own frame
HERE.setflags(write=False)
FEWEST, POINTS = 300, 8000  # of a scan
SCANS, TRIES, AGAIN = 10, 50, 50  # scans whose median it is, tried at first, and then every so many
LEAST, MOST = 0.5, 10.0  # metres: lasers leave from up to .25 m off the centre; no car is larger
TILTED = np.sin(np.radians(2.0))  # ... or turned by more
MOVED, TURNED = 0.2, 0.01  # metres, radians: the place stays while the median is as near to it
NEAR = 3.0  # metres within which points do not count for more
OUTLIER = 3.0  # times the median error
ROUNDS, STRIDE = 8, 3.0  # steps to the tip, each at most so many metres along an axis
VARIED = 2e-4  # variance of range along rings, below which they tell nothing: all is flat
SHARPER = 0.5  # how wide rings may be about the place, as share of what they are about the origin
FEWEST_A_RING = 8  # points that tell how wide it is


class PlaceEstimate:
    """Place of the sensor in one stream of scans, learned from the first of them."""

    def __init__(self):
        self.place = HERE
        self._found: list[np.ndarray] = []
        self._scans = 0
        self._lock = threading.Lock()

    def __call__(self, points: np.ndarray, ring: np.ndarray | None) -> np.ndarray:
        """The place (5,), given one more scan (n, 3) and the ring (n,) of each point.

        It is the same array until the place is another.
        """
        with self._lock:
            if ring is not None and len(self._found) < SCANS:
                self._scans += 1
                if self._scans <= TRIES or self._scans % AGAIN == 0:
                    self._learn(find_place(points, ring))
            return self.place

    def _learn(self, found: np.ndarray | None) -> None:
        if found is not None:
            self._found.append(found)
            place = np.median(self._found, axis=0).round(3).astype(np.float32)
            away = np.abs(place - self.place) > np.array([MOVED] * 3 + [TURNED] * 2)
            if away.any():
                self.place = place if is_elsewhere(place) else HERE
                self.place.setflags(write=False)


def is_elsewhere(place: np.ndarray) -> bool:
    """Whether a place (5,) is too far from the origin, or too tilted, to be the origin itself."""
    return bool(np.linalg.norm(place[:3]) >= LEAST or np.linalg.norm(place[3:]) >= TILTED)


def about_sensor(points: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Points (n, 3) as seen from the sensor's place (5,)."""
    return turned(moved(points, place), upright(place[3:])) if place.any() else points


def moved(points: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Points (n, 3) with the sensor's place (5,) as their origin, and not turned."""
    return points - place[:3].astype(points.dtype) if place.any() else points


def from_sensor(points: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Points (n, 3) about the sensor in the frame of its scans, where it has this place (5,)."""
    return turned(points, upright(place[3:]).T) + place[:3]


def upright(axis: np.ndarray) -> np.ndarray:
    """The shortest turn (3, 3) of an upward axis, given by its x and y, to z."""
    x, y = axis.astype(np.float64)
    z = np.sqrt(max(1 - x * x - y * y, 1e-6))
    cross = np.array([(0, 0, -x), (0, 0, -y), (x, y, 0)])
    return np.eye(3) + cross + cross @ cross / (1 + z)


def turned(points: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Points (n, 3) turned; threads of a matrix product would wait for cores that others use."""
    x, y, z = points.T
    return np.stack([a * x + b * y + c * z for a, b, c in turn.astype(points.dtype)], axis=1)


def find_place(points: np.ndarray, ring: np.ndarray) -> np.ndarray | None:
    """The common tip and axis of the cones that rings lie on: a place (5,), HERE where that is as
    good, or None where they do not tell.

    Seen from near the tip, which is at (x0, y0, z0) then, a point of ring k, at distance rho from
    the axis, has about

        z = z0 + a x + b y + t_k (rho - (x x0 + y y0) / rho),

    where a and b are the tilt. Least squares give all but the t_k, which are projected out; after
    each solution the points are seen from there.
    """
    every = max(1, len(points) // POINTS) | 1  # odd, or of 32 rings stored in turn one is left
    some, number = points[::every].astype(np.float64), ring[::every]
    if len(some) < FEWEST:
        return None
    number = np.unique(number, return_inverse=True)[1]
    tip, turn, used = np.zeros(3), np.eye(3), np.ones(len(some), bool)
    for step in range(ROUNDS):
        x, y, z = turned(some - tip, turn).T
        rho = np.maximum(np.hypot(x, y), 1e-6)
        square = np.bincount(number, rho**2)
        slope = (np.bincount(number, rho * z) / square)[number]
        columns = [np.ones(len(z)), x, y, z]
        if step:  # x0 and y0 need slopes that know z0
            columns += [-slope * x / rho, -slope * y / rho]
        # what slopes of the rings do not explain, as angles
        columns = [c - rho * (np.bincount(number, rho * c) / square)[number] for c in columns]
        one, x, y, z, *aside = (c / np.maximum(rho, NEAR) for c in columns)
        if not np.mean(one**2) >= VARIED:  # nor where a number is not finite
            return None
        cone = np.column_stack((one, x, y, *aside))
        z0, a, b, *beside = np.linalg.lstsq(cone[used], z[used], rcond=None)[0]
        error = np.abs(z - cone @ np.array([z0, a, b, *beside]))
        used = error <= OUTLIER * np.median(error) + 1e-9
        tip = tip + turn.T @ np.clip((*(beside or (0, 0)), z0), -STRIDE, STRIDE)
        turn = upright(np.array([-a, -b]) / np.sqrt(1 + a * a + b * b)) @ turn
    place = np.concatenate((tip, turn[2, :2]))
    if not is_elsewhere(place) or np.linalg.norm(tip) > MOST:
        return np.zeros(5)
    sharp, wide = (ring_width(about_sensor(some, at), number) for at in (place, HERE))
    return place if sharp < SHARPER * wide else np.zeros(5)


def ring_width(points: np.ndarray, ring: np.ndarray) -> float:
    """Median of the widths of `ring_levels`; 0 where no ring has enough points."""
    _, width = ring_levels(points, ring, FEWEST_A_RING)
    return float(np.median(width)) if len(width) else 0.0


def ring_levels(
    points: np.ndarray, ring: np.ndarray, fewest: float
) -> tuple[np.ndarray, np.ndarray]:
    """Of rings 0.. with at least so many points: median elevations (k,), and median deviations."""
    order = np.argsort(ring, kind="stable")
    parts = np.split(elevations(points)[order], np.cumsum(np.bincount(ring))[:-1])
    parts = [part for part in parts if len(part) >= fewest]
    middle = np.array([np.median(part) for part in parts])
    width = [np.median(np.abs(part - m)) for part, m in zip(parts, middle, strict=True)]
    return middle, np.array(width)


def elevations(points: np.ndarray) -> np.ndarray:
    """Radians (n,) above the horizon of the origin."""
    return np.arctan2(points[:, 2], np.hypot(points[:, 0], points[:, 1]))
