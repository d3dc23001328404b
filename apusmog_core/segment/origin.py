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
POINTS = 8000  # of a scan
SCANS, TRIES = 10, 50  # scans whose median is the origin (the first one counts already), at most
LEAST = 0.4  # metres: in the sensor's own frame, too, lasers leave from up to .25 m off its centre
NEAR = 3.0  # metres within which points do not count for more
OUTLIER = 3.0  # times the median error
ROUNDS = 3
VARIED = 2e-4  # variance of range along rings, below which they tell nothing: all is flat


class OriginEstimate:
    """Place of the sensor in one stream of scans, learned from the first of them."""

    def __init__(self):
        self.origin = HERE
        self._found: list[np.ndarray] = []
        self._scans = 0
        self._lock = threading.Lock()

    def __call__(self, points: np.ndarray, ring: np.ndarray | None) -> np.ndarray:
        """The place (3,) in metres, given one more scan (n, 3) and the ring (n,) of each point."""
        with self._lock:
            if len(self._found) < SCANS and self._scans < TRIES and ring is not None:
                self._scans += 1
                tip = find_tip(points, ring)
                if tip is not None:
                    self._found.append(tip)
                    place = np.median(self._found, axis=0)
                    far = np.linalg.norm(place) >= LEAST
                    self.origin = place.round(2).astype(np.float32) if far else HERE
            return self.origin


def about_sensor(points: np.ndarray, origin: np.ndarray) -> np.ndarray:
    """Points (n, 3) as seen from the sensor's place (3,)."""
    return points - origin if origin.any() else points


def find_tip(points: np.ndarray, ring: np.ndarray) -> np.ndarray | None:
    """The common tip (3,) of the cones that rings lie on, or None where they do not tell.

    Seen from a tip at (x0, y0, z0), a point of ring k, at distance rho from the axis, has about

        z = z0 + a x + b y + t_k (rho - (x x0 + y y0) / rho),

    where a and b are a slight tilt. Least squares give all but the t_k, which are projected out.
    """
    every = max(1, len(points) // POINTS)
    some, number = points[::every].astype(np.float64), ring[::every]
    number = np.unique(number, return_inverse=True)[1]
    x, y, z = some.T
    rho = np.maximum(np.hypot(x, y), 1e-6)
    square = np.bincount(number, rho**2)
    used, tip = np.ones(len(z), bool), np.zeros(3)
    for turn in range(ROUNDS):
        slope = (np.bincount(number, rho * (z - tip[2])) / square)[number]
        columns = np.stack((-slope * x / rho, -slope * y / rho, np.ones(len(z)), x, y, z), axis=1)
        for c in columns.T:
            c -= rho * (np.bincount(number, rho * c) / square)[number]
        columns /= np.maximum(rho, NEAR)[:, None]
        first = 2 if turn == 0 else 0  # x0 and y0 need slopes that know z0
        cone, right = columns[:, first:5], columns[:, 5]
        if len(z) == 0 or np.mean(columns[:, 2] ** 2) < VARIED:
            return None
        for _ in range(ROUNDS):
            solution = np.linalg.lstsq(cone[used], right[used], rcond=None)[0]
            error = np.abs(right - cone @ solution)
            used = error <= OUTLIER * np.median(error) + 1e-9
        tip[first:] = solution[: 3 - first]
    return tip
