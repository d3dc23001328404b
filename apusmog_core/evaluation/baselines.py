# SPDX-License-Identifier: Apache-2.0
"""What needs no learning: the upsamplers that a network has to beat."""

from __future__ import annotations

import numpy as np
from scipy.spatial import cKDTree

AZIMUTH_GATE = 0.01  # radians between points joined across rings
RANGE_GATE = 0.5  # metres
EXACT_START = 5e7  # distances, some tenths of a second, that "first point first" may cost


def nothing(points: np.ndarray) -> np.ndarray:
    """The input."""
    return points


def midpoint(points: np.ndarray, count: int, neighbours: int = 8) -> np.ndarray:
    """Input points and midpoints to their nearest neighbours, thinned to `count` (count, 3)."""
    if len(points) == 0:
        raise ValueError("midpoint: an empty cloud has no neighbours")
    grown, candidates = _with_midpoints(points, neighbours), points
    while len(grown) < count and len(grown) > len(candidates):  # above ratio 5 once more
        grown, candidates = _with_midpoints(grown, neighbours), grown
    return thin(grown, count)


def range_interpolation(points: np.ndarray, ring: np.ndarray, stride: int = 2) -> np.ndarray:
    """Input points, and `stride` - 1 on the way to the azimuth-nearest point of the next kept
    ring, whose number is higher by `stride`."""
    azimuth = np.arctan2(points[:, 1], points[:, 0])
    distance = np.linalg.norm(points, axis=1)
    added = [points]
    for low in np.unique(ring):
        here, there = np.flatnonzero(ring == low), np.flatnonzero(ring == low + stride)
        if len(there) == 0:
            continue
        nearest, gap = _azimuth_nearest(azimuth[here], azimuth[there])
        there = there[nearest]
        joined = (gap < AZIMUTH_GATE) & (np.abs(distance[here] - distance[there]) < RANGE_GATE)
        first, last = points[here[joined]], points[there[joined]]
        added += [first + (last - first) * (way / stride) for way in range(1, stride)]
    return np.concatenate(added)


def thin(points: np.ndarray, count: int) -> np.ndarray:
    """Farthest point sampling to `count` points; of all but large clouds, the first point first."""
    import fpsample

    if count >= len(points):
        return points[np.arange(count) % len(points)]
    # centred, since the sampler works in float32
    centred = np.ascontiguousarray(points - points.mean(axis=0), dtype=np.float32)
    if len(points) * count < EXACT_START:
        return points[fpsample.fps_sampling(centred, count, start_idx=0)]
    # the fast sampler is as exact, but its start index counts in an order of its own
    return points[fpsample.bucket_fps_kdline_sampling(centred, count, h=7, start_idx=0)]


def _with_midpoints(points: np.ndarray, neighbours: int) -> np.ndarray:
    k = min(neighbours, len(points) - 1)
    if k == 0:
        return points
    _, index = cKDTree(points).query(points, k=np.arange(2, k + 2))  # the nearest is itself
    between = ((points[:, None] + points[index]) / 2).reshape(-1, 3)
    together = np.concatenate([points, between])
    _, first = np.unique(together, axis=0, return_index=True)
    return together[np.sort(first)]


def _azimuth_nearest(query: np.ndarray, azimuth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Index of the nearest azimuth and the angle to it, across the cut at pi too."""
    gap = np.abs(query[:, None] - azimuth[None])  # (q, n); rings of one object are short
    gap = np.minimum(gap, 2 * np.pi - gap)
    nearest = gap.argmin(axis=1)
    return nearest, gap[np.arange(len(query)), nearest]
