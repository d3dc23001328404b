# SPDX-License-Identifier: Apache-2.0
"""Where the sensor stands in the frame of its scans, from the first scans.

Drivers publish scans about the sensor, but some systems move them to the vehicle (base_link), and
elevations from there tell nothing about rings. What a laser meets on its way around lies on a cone,
and the cones of all rings have their tip in the sensor.
"""

from __future__ import annotations

import threading

import numpy as np

HERE = np.zeros(3, np.float32)  # where it stands in its own frame
HERE.setflags(write=False)
FEWEST, POINTS = 300, 8000  # of a scan
SCANS, TRIES, AGAIN = 10, 50, 50  # scans whose median it is, tried at first, and then every so many
MOVED = 0.2  # metres by which the median must differ from the place before
LEAST, MOST = 0.5, 10.0  # metres: lasers leave from up to .25 m off the centre; no car is larger
NEAR = 3.0  # metres within which points do not count for more
OUTLIER = 3.0  # times the median error
ROUNDS = 3
VARIED = 2e-4  # variance of range along rings, below which they tell nothing: all is flat
SHARPER = 0.5  # how wide rings may be about the tip, as share of what they are about the origin
FEWEST_A_RING = 8  # points that tell how wide it is


class OriginEstimate:
    """Place of the sensor in one stream of scans, learned from the first of them."""

    def __init__(self):
        self.origin = HERE
        self._found: list[np.ndarray] = []
        self._scans = 0
        self._lock = threading.Lock()

    def __call__(self, points: np.ndarray, ring: np.ndarray | None) -> np.ndarray:
        """The place (3,) in metres, given one more scan (n, 3) and the ring (n,) of each point.

        It is the same array until the place is another.
        """
        with self._lock:
            if ring is not None and len(self._found) < SCANS:
                self._scans += 1
                if self._scans <= TRIES or self._scans % AGAIN == 0:
                    self._learn(find_tip(points, ring))
            return self.origin

    def _learn(self, tip: np.ndarray | None) -> None:
        if tip is not None:
            self._found.append(tip)
            place = np.median(self._found, axis=0).round(2).astype(np.float32)
            place = place if np.linalg.norm(place) >= LEAST else HERE
            if np.linalg.norm(place - self.origin) > MOVED:
                place.setflags(write=False)
                self.origin = place


def about_sensor(points: np.ndarray, origin: np.ndarray) -> np.ndarray:
    """Points (n, 3) as seen from the sensor's place (3,)."""
    return points - origin if origin.any() else points


def find_tip(points: np.ndarray, ring: np.ndarray) -> np.ndarray | None:
    """The common tip (3,) of the cones that rings lie on, HERE where that is as good, or None where
    they do not tell.

    Seen from a tip at (x0, y0, z0), a point of ring k, at distance rho from the axis, has about

        z = z0 + a x + b y + t_k (rho - (x x0 + y y0) / rho),

    where a and b are a slight tilt. Least squares give all but the t_k, which are projected out.
    """
    every = max(1, len(points) // POINTS) | 1  # odd, or of 32 rings stored in turn one is left
    some, number = points[::every].astype(np.float64), ring[::every]
    if len(some) < FEWEST:
        return None
    number = np.unique(number, return_inverse=True)[1]
    x, y, z = some.T
    rho = np.maximum(np.hypot(x, y), 1e-6)
    square = np.bincount(number, rho**2)

    def beside_cone(c: np.ndarray) -> np.ndarray:
        """What of a column (n,) the slopes of the rings do not explain, as angles."""
        return (c - rho * (np.bincount(number, rho * c) / square)[number]) / np.maximum(rho, NEAR)

    fixed = np.stack([beside_cone(c) for c in (np.ones(len(z)), x, y)], axis=1)
    right = beside_cone(z)
    if not np.mean(fixed[:, 0] ** 2) >= VARIED:  # nor where a number is not finite
        return None
    used, columns = np.ones(len(z), bool), fixed
    for _ in range(ROUNDS):
        for _ in range(ROUNDS):
            solution = np.linalg.lstsq(columns[used], right[used], rcond=None)[0]
            error = np.abs(right - columns @ solution)
            used = error <= OUTLIER * np.median(error) + 1e-9
        # x0 and y0 need slopes that know z0
        slope = (np.bincount(number, rho * (z - solution[0])) / square)[number]
        columns = np.column_stack((fixed, *(beside_cone(-slope * c / rho) for c in (x, y))))
    tip = np.append(solution[3:], solution[0])
    if not LEAST <= np.linalg.norm(tip) <= MOST:
        return np.zeros(3)
    tilt = some[:, :2] @ solution[1:3]
    widths = [ring_width(some - (0, 0, 1) * tilt[:, None] - place, number) for place in (tip, HERE)]
    return tip if widths[0] < SHARPER * widths[1] else np.zeros(3)


def ring_width(points: np.ndarray, ring: np.ndarray) -> float:
    """Median over the rings of how far elevations are from their ring's median; 0 without any."""
    elevation = np.arctan2(points[:, 2], np.hypot(points[:, 0], points[:, 1]))
    order = np.argsort(ring, kind="stable")
    parts = np.split(elevation[order], np.cumsum(np.bincount(ring))[:-1])
    large = [part for part in parts if len(part) >= FEWEST_A_RING]
    return float(np.median([np.median(np.abs(part - np.median(part))) for part in large] or [0.0]))
