# SPDX-License-Identifier: Apache-2.0
"""From one scan to its objects: ground away, then instances of what stands on it."""

from __future__ import annotations

import copy
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from ..config import PipelineConfig
from .cluster import find_instances, ranges
from .ground import Ground
from .join import RingPoints, find_feet
from .mounting import Mounting
from .place import HERE, PlaceEstimate, about_sensor, moved
from .rings import describe_rings, find_rings


@dataclass(frozen=True, eq=False)
class Found:
    """What each point of a scan belongs to."""

    ground: np.ndarray  # (n,) bool
    instance: np.ndarray  # (n,) uint32, 1.. from near to far, 0 for none
    ring: np.ndarray | None  # (n,) int32, as given or found
    ring_source: str  # field, order, elevation or none
    height: np.ndarray | None  # (n,) float32 above the ground, nan where that is not known
    mounting: Mounting
    place: np.ndarray = field(default_factory=lambda: HERE)  # (5,) of the sensor, see place.py
    timings: dict[str, float] = field(default_factory=dict)  # stage -> milliseconds


class Segmenter:
    """Ground and instances of one stream of scans, whose terrain and mounting it learns.

    It may be called from several threads.
    """

    def __init__(self, config: PipelineConfig | None = None):
        self.config = config or PipelineConfig()
        self.ground = Ground(self.config.ground)
        self.place = PlaceEstimate()
        self._seen_from = self.place.place

    def configured(self, config: PipelineConfig) -> Segmenter:
        """This with other settings; what was learned about the ground and the place stays."""
        other = copy.copy(self)
        other.config = config
        same = config.ground == self.config.ground
        other.ground = self.ground if same else Ground(config.ground)
        return other

    @property
    def mounting(self) -> Mounting:
        """Height, roll and pitch of the sensor, as set or as learned so far."""
        return self.ground.mounting

    def __call__(
        self, points: np.ndarray, ring: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which points (n, 3) are ground (n,) bool, and instances (n,) uint32: 1.., 0 for none."""
        found = self.find(points, ring)
        return found.ground, found.instance

    def find(self, points: np.ndarray, ring: np.ndarray | None = None) -> Found:
        """Ground and instances of returns (n, 3), and how they were found."""
        timings: dict[str, float] = {}
        with timed(timings, "filter"):
            ring, ring_source = find_rings(points, ring)
            place = self.place(points, None if ring_source == "elevation" else ring)
            if place is not self._seen_from:  # what was learned was about another place
                self._seen_from, self.ground = place, Ground(self.config.ground)
            distance, limits = ranges(moved(points, place)), self.config.range
            near = np.flatnonzero((distance >= limits.min) & (distance <= limits.max))
            close, rings = points.take(near, axis=0), None
            if ring is not None and len(near):
                rings = describe_rings(about_sensor(close, place), ring.take(near))
            close = moved(close, place)  # the mounting is told, and set, in the frame of the scans
        with timed(timings, "ground"):
            upright, on_ground, terrain = self.ground.find(close, rings, distance.take(near))
        with timed(timings, "cluster"):
            label = np.zeros(len(near), np.uint32)
            rest = np.flatnonzero(~on_ground)
            on_rings = None
            if terrain is not None:
                on_rings = RingPoints.of_all(rings, terrain).of(rest)
            label[rest] = find_instances(upright.take(rest, axis=0), self.config.cluster, on_rings)
            if on_rings is not None:
                label = find_feet(close, terrain.height, rings, label)
            ground, instance = np.zeros(len(points), bool), np.zeros(len(points), np.uint32)
            ground[near], instance[near] = on_ground & (label == 0), label
            above = None
            if terrain is not None:
                above = np.full(len(points), np.nan, np.float32)
                above[near] = terrain.height
        where = (ring, ring_source, above, self.mounting, place)
        return Found(ground, instance, *where, timings)


@contextmanager
def timed(timings: dict[str, float], stage: str):
    """Milliseconds that a stage takes."""
    start = time.perf_counter()
    yield
    timings[stage] = 1e3 * (time.perf_counter() - start)
