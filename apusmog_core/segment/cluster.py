# SPDX-License-Identifier: Apache-2.0
"""Instances by Euclidean clustering: voxels, their neighbours, connected components."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.ndimage import maximum_filter, minimum_filter
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from scipy.spatial import cKDTree

from ..config import ClusterConfig

STANDING_CELL = 0.5  # metres
BAND = 10.0  # metres of range that share one tolerance, where it grows with range
BANDS = 64  # beyond the last the voxels do not grow any more


def find_instances(points: np.ndarray, config: ClusterConfig) -> np.ndarray:
    """Instances of level points without ground: (n,) int32, 1.. from near to far, 0 for none."""
    labels = np.zeros(len(points), np.int32)
    standing = np.flatnonzero(where_something_stands(points, config.min_height))
    if len(standing) == 0:
        return labels
    points = points[standing]
    pieces = list(_within_limits(points, components(points, config), config))
    distance = ranges(points)
    pieces.sort(key=lambda piece: distance[piece].min())
    for number, piece in enumerate(pieces, start=1):
        labels[standing[piece]] = number
    return labels


def where_something_stands(points: np.ndarray, height: float) -> np.ndarray:
    """Which points have something of this height around them: (n,) bool.

    The rest is missed ground, which would glue one object to the next.
    """
    if len(points) == 0:
        return np.zeros(0, bool)
    across, along = (_cells(column, STANDING_CELL) for column in points.T[:2])
    shape = (across.max() + 1, along.max() + 1)
    flat = across * shape[1] + along
    highest = np.full(shape, -np.inf, np.float32)
    lowest = np.full(shape, np.inf, np.float32)
    np.maximum.at(highest.reshape(-1), flat, points[:, 2])
    np.minimum.at(lowest.reshape(-1), flat, points[:, 2])
    tall = maximum_filter(highest, 3) - minimum_filter(lowest, 3) >= height
    return tall.reshape(-1)[flat]


def components(points: np.ndarray, config: ClusterConfig) -> np.ndarray:
    """Component number (n,) of points (n, 3): chains of neighbours within the tolerance.

    Points that share a voxel count as one, at their mean; a voxel's diagonal is the tolerance.
    """
    band = np.zeros(len(points), np.int64)
    if config.adaptive > 0.0:
        band = np.minimum(ranges(points) // BAND, BANDS - 1).astype(np.int64)
    edge = ((config.tolerance + config.adaptive * BAND * band) / np.sqrt(3)).astype(np.float32)
    x, y, z = (_cells(column, edge) for column in points.T)
    key = band << 57 | x << 38 | y << 19 | z
    key, inverse, count = np.unique(key, return_inverse=True, return_counts=True)
    centres = np.stack([np.bincount(inverse, column) / count for column in points.T], axis=1)
    first, second = _neighbours(centres, config).T
    graph = coo_matrix((np.ones(len(first), bool), (first, second)), (len(count), len(count)))
    return connected_components(graph, directed=False)[1][inverse]


def rows_by_label(labels: np.ndarray) -> list[np.ndarray]:
    """Rows of each label from 0 to the greatest, in their order."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.cumsum(np.bincount(labels)))[:-1]


def _cells(column: np.ndarray, edge) -> np.ndarray:
    """Number of the cell (n,) of each value, from zero; a column of its own is quicker."""
    column = np.ascontiguousarray(column)
    return ((column - column.min()) / edge).astype(np.int64)


def ranges(points: np.ndarray) -> np.ndarray:
    """Distances (n,) from the sensor; np.linalg.norm takes several times as long."""
    return np.sqrt(np.einsum("nd,nd->n", points, points))


def _neighbours(centres: np.ndarray, config: ClusterConfig) -> np.ndarray:
    """Pairs (m, 2) of centres closer than the tolerance at the nearer one's range."""
    if config.adaptive == 0.0:
        return _tree(centres).query_pairs(config.tolerance, output_type="ndarray")
    distance = ranges(centres)
    found = [np.empty((0, 2), np.int64)]
    for near in np.arange(0.0, distance.max() + BAND, BAND):
        tolerance = config.tolerance + config.adaptive * near
        band = np.flatnonzero((distance >= near) & (distance < near + BAND + tolerance))
        if len(band) > 1:
            found.append(band[_tree(centres[band]).query_pairs(tolerance, output_type="ndarray")])
    return np.concatenate(found)


def _tree(points: np.ndarray) -> cKDTree:
    return cKDTree(points, balanced_tree=False, compact_nodes=False)  # quicker to build


def _within_limits(
    points: np.ndarray, component: np.ndarray, config: ClusterConfig
) -> Iterator[np.ndarray]:
    """Point indices of each component that keeps the limits; large ones in parts, or left out."""
    order = np.argsort(component, kind="stable")
    count = np.bincount(component)
    start = np.cumsum(count) - count
    columns = np.ascontiguousarray(points[order].T)  # (3, n), component after component
    low = np.minimum.reduceat(columns, start, axis=1)
    extent = np.maximum.reduceat(columns, start, axis=1) - low  # (3, components)
    large = _parts(extent, count, config).max(axis=0) > 1
    enough = (count >= config.min_points) & (extent[2] >= config.min_height)
    for number in np.flatnonzero(enough):
        piece = slice(start[number], start[number] + count[number])
        if not large[number]:
            yield order[piece]
        elif config.large == "split":
            for part in _split(columns[:, piece], config):
                yield order[piece][part]


def _split(columns: np.ndarray, config: ClusterConfig) -> Iterator[np.ndarray]:
    """Indices into columns (3, n) of the parts that keep the limits, from repeated cuts."""
    waiting = [np.arange(columns.shape[1])]
    while waiting:
        piece = waiting.pop()
        if len(piece) < config.min_points:
            continue
        extent = np.ptp(columns[:, piece], axis=1)
        parts = _parts(extent, len(piece), config)  # x, y, z, count
        axis = int(parts.argmax())
        if parts[axis] == 1:
            if extent[2] >= config.min_height:
                yield piece
        elif axis < 3:  # too long: slices of equal length
            values = columns[axis, piece]
            share = (values - values.min()) / extent[axis]
            cut = np.minimum(share * parts[axis], parts[axis] - 1).astype(np.int64)
            waiting += [piece[cut == k] for k in range(parts[axis])]
        else:  # too many: slices of equal count along the longest side
            order = np.argsort(columns[extent.argmax(), piece], kind="stable")
            waiting += np.array_split(piece[order], parts[axis])


def _parts(extent: np.ndarray, count, config: ClusterConfig) -> np.ndarray:
    """Into how many parts x, y, z and the count must be cut: (4, ...) int, 1 is within limits."""
    sizes = (
        *extent[:2] / config.max_extent,
        extent[2] / config.max_height,
        np.asarray(count) / config.max_points,
    )
    return np.maximum(np.ceil(np.stack(sizes) - 1e-6), 1).astype(np.int64)
