# SPDX-License-Identifier: Apache-2.0
"""What answers scans while the network loads and compiles: interpolation between rings, in numpy.

Objects are what hangs together along rings and from ring to ring; new points lie between such
neighbours. Nothing here is compiled, so that it never waits for the compiler.
"""

from __future__ import annotations

import copy

import numpy as np

from .config import ClusterConfig, PipelineConfig
from .dense import Dense
from .pipeline import DenseScan, Segments
from .segment.ground import grid_ground
from .segment.join import FARTHEST_JOIN, SLANT
from .segment.mounting import Mounting, MountingEstimate
from .segment.rings import find_rings

TURN = 8.0  # more than the azimuths of a ring span: rings one after the other
ASIDE = 0.01  # radians of azimuth between neighbours on two rings
FEWEST = 8  # points of an object, though fewer than `min_points`: far ones have few
STEEPEST = 0.5  # metres of range from ring to ring that new points lie between
CONFIDENCE = 0.7  # share of new points within 10 cm of the full scan, half of it held out, on KITTI

Pairs = tuple[np.ndarray, np.ndarray]  # rows (k,) and those of their partners (k,)


class InterimPipeline:
    """Stands in for a `ScanPipeline` that is not ready; scans without rings only pass through."""

    device = "none"

    def __init__(self, config: PipelineConfig):
        self.config = config
        self._mounting = MountingEstimate(config.ground)

    def configured(self, config: PipelineConfig) -> InterimPipeline:
        """This with other settings; what was learned about the mounting stays."""
        other = copy.copy(self)
        other.config = config
        if config.ground != self.config.ground:
            other._mounting = MountingEstimate(config.ground)
        return other

    def restarted(self) -> InterimPipeline:
        """This for another stream of scans."""
        return InterimPipeline(self.config)

    @property
    def mounting(self) -> Mounting:
        """Height, roll and pitch of the sensor, as set or as learned so far."""
        return self._mounting.mounting

    def segment(
        self,
        points: np.ndarray,
        intensity: np.ndarray | None = None,
        ring: np.ndarray | None = None,
    ) -> Segments:
        """What is ground and which points form an object."""
        finite, no_return = np.isfinite(points).all(axis=1), ~points.any(axis=1)
        rows = np.flatnonzero(finite & ~no_return)
        points = points[rows].astype(np.float32, copy=False)
        ring, ring_source = find_rings(points, None if ring is None else ring[rows])
        ground, instance = np.zeros(len(rows), bool), np.zeros(len(rows), np.uint32)
        if ring is not None:
            distance = np.linalg.norm(points, axis=1)
            limits = self.config.range
            near = np.flatnonzero((distance >= limits.min) & (distance <= limits.max))
            ground[near] = self._ground(points[near])
            rest = near[~ground[near]]
            instance[rest] = find_connected(points[rest], ring[rest], self.config.cluster)
        intensity = np.zeros(len(ground)) if intensity is None else intensity[rows]
        return Segments(
            points=points,
            intensity=intensity.astype(np.float32, copy=False),
            ground=ground,
            instance=instance,
            rows=rows,
            ring=ring,
            ring_source=ring_source,
            not_finite=int(np.count_nonzero(~finite)),
            no_return=int(np.count_nonzero(no_return)),
        )

    def densify(self, segments: Segments, ratio: float | None = None) -> DenseScan:
        """The objects with round(ratio * n) points, or as many as `max_points_out` allows."""
        ratio = self.config.ratio if ratio is None else ratio
        measured = np.flatnonzero(segments.instance)
        count = round(ratio * len(measured))
        if self.config.max_points_out:
            count = min(count, self.config.max_points_out)
        if count < len(measured):
            kept, new = measured[_evenly(len(measured), count)], 0
        elif self.config.keep_measured:
            kept, new = measured, count - len(measured)
        else:
            kept, new = measured[:0], count
        dense = Dense.measured(segments.points, kept)
        if new:
            dense = Dense.concatenate((dense, self._interpolate(segments, measured, new)))
        dense = dense.by_object(segments.instance)
        return DenseScan(
            dense.points,
            segments.intensity[dense.source],
            segments.instance[dense.source],
            dense.generated,
            dense.confidence,
            dense.source,
            segments,
            ratio,
        )

    def _ground(self, points: np.ndarray) -> np.ndarray:
        if self.config.ground.method == "none" or len(points) == 0:
            return np.zeros(len(points), bool)
        mounting = self._mounting(points)
        return grid_ground(mounting.level(points), self.config.ground, mounting.height)

    def _interpolate(self, segments: Segments, measured: np.ndarray, new: int) -> Dense:
        """So many points between the rings of objects, none where no two rings are neighbours."""
        points, instance = segments.points[measured], segments.instance[measured]
        low, high = neighbours(points, segments.ring[measured])[1]
        distance = np.linalg.norm(points, axis=1)
        joined = (instance[low] == instance[high]) & (
            abs(distance[low] - distance[high]) < STEEPEST
        )
        low, high = low[joined], high[joined]
        new = new if len(low) and self.config.min_confidence <= CONFIDENCE else 0
        each = -(-new // max(len(low), 1))  # between two points, of which some are left out
        pair, place = np.divmod(_evenly(each * len(low), new), max(each, 1))
        low, high, way = low[pair], high[pair], ((place + 1) / (each + 1)).astype(np.float32)
        between = points[low] + (points[high] - points[low]) * way[:, None]
        source = measured[np.where(way < 0.5, low, high)]
        return Dense.new(between, np.full(new, CONFIDENCE, np.float32), source)


def find_connected(points: np.ndarray, ring: np.ndarray, config: ClusterConfig) -> np.ndarray:
    """Instances (n,) uint32 of what stands on the ground, 1.. from near to far, 0 for none."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    count = len(points)
    if count == 0:
        return np.zeros(0, np.uint32)
    distance = np.linalg.norm(points, axis=1)
    (left, right), (low, high) = neighbours(points, ring)
    limit = config.tolerance + config.adaptive * distance
    along = np.linalg.norm(points[left] - points[right], axis=1) <= limit[left]
    step = np.abs(distance[low] - distance[high])
    spacing = SLANT * np.abs(points[low, 2] - points[high, 2])
    across = step <= np.minimum(np.maximum(spacing, limit[low]), FARTHEST_JOIN)
    first = np.concatenate((left[along], low[across]))
    second = np.concatenate((right[along], high[across]))
    links = coo_matrix((np.ones(len(first), bool), (first, second)), (count, count))
    components, label = connected_components(links, directed=False)

    order = np.argsort(label, kind="stable")
    starts = np.searchsorted(label[order], np.arange(components))
    extent = np.maximum.reduceat(points[order], starts) - np.minimum.reduceat(points[order], starts)
    size = np.bincount(label)
    valid = (size >= min(config.min_points, FEWEST)) & (size <= config.max_points)
    valid &= (extent[:, 2] >= config.min_height) & (extent[:, 2] <= config.max_height)
    valid &= extent[:, :2].max(axis=1) <= config.max_extent
    nearest = np.where(valid, np.minimum.reduceat(distance[order], starts), np.inf)
    number = np.zeros(components, np.uint32)
    number[np.argsort(nearest, kind="stable")] = np.arange(1, components + 1)
    return np.where(valid, number, 0).astype(np.uint32)[label]


def neighbours(points: np.ndarray, ring: np.ndarray) -> tuple[Pairs, Pairs]:
    """Pairs of points (n, 3) that follow each other on a ring, and each with the nearest in azimuth
    on the ring above."""
    _, ring = np.unique(ring, return_inverse=True)
    elevation = np.arctan2(points[:, 2], np.hypot(points[:, 0], points[:, 1]))
    mean = np.bincount(ring, elevation) / np.bincount(ring)
    rank = np.argsort(np.argsort(mean))[ring]  # numbers need not rise with the elevation
    place = TURN * rank + np.arctan2(points[:, 1], points[:, 0])
    order = np.argsort(place)
    place = place[order]
    next_on_ring = np.flatnonzero(np.diff(place) < ASIDE)
    along = order[next_on_ring], order[next_on_ring + 1]
    after = np.clip(np.searchsorted(place, place + TURN), 1, len(place) - 1)
    gaps = np.abs(place[[after - 1, after]] - (place + TURN))  # (2, n)
    nearest = np.where(gaps[0] < gaps[1], after - 1, after)
    joined = gaps.min(axis=0) < ASIDE
    return along, (order[joined], order[nearest[joined]])


def _evenly(count: int, chosen: int) -> np.ndarray:
    """Indices (chosen,) spread over range(count)."""
    return np.arange(chosen) * count // max(chosen, 1)
