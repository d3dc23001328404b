# SPDX-License-Identifier: Apache-2.0
"""Instances by Euclidean clustering: voxels, their neighbours, connected components."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..compute import machine_code
from ..config import ClusterConfig
from ..sensor.neighbours import fill
from .join import RingPoints
from .sets import find_root, number_sets

STANDING_CELL = 0.5  # metres
STANDING_HEIGHT = 0.25  # metres above the ground that something near a point must reach
TOLERANCES = (1.0, 0.5)  # shares of the tolerance, one after the other for what is too large
PLENTIFUL = 8.0  # metres within which an object must have the fewest points that are set
FEWEST = 4  # ... and beyond which no object has fewer, where no rings tell what to expect
MOST_CELLS = 1000  # to each side, for small tolerances in a wide scan
BAND = 10.0  # metres of range that share one tolerance, where it grows with range
SCATTER = 0x9E3779B97F4A7C15 - (1 << 64)  # odd and irregular: sends like keys to unlike places
BANDS = 64  # beyond the last the voxels do not grow any more


def find_instances(
    points: np.ndarray, config: ClusterConfig, on_rings: RingPoints | None = None
) -> np.ndarray:
    """Instances of level points without ground: (n,) int32, 1.. from near to far, 0 for none.

    Where their places `on_rings` are known, they follow the rings: see `join.py`.
    """
    labels = np.zeros(len(points), np.int32)
    if on_rings is None:
        stands = where_something_stands(points, config.min_height)
    else:
        stands = where_something_stands(points, STANDING_HEIGHT, on_rings.height)
    standing = np.flatnonzero(stands)
    if len(standing) == 0:
        return labels
    points = points.take(standing, axis=0)
    pieces = list(_pieces(points, config, on_rings and on_rings.of(standing)))
    if pieces:
        sizes, members = np.array([len(piece) for piece in pieces]), np.concatenate(pieces)
        nearest = np.minimum.reduceat(ranges(points[members]), np.cumsum(sizes) - sizes)
        rank = np.empty(len(pieces), np.int32)
        rank[np.argsort(nearest, kind="stable")] = np.arange(1, len(pieces) + 1)
        labels[standing[members]] = np.repeat(rank, sizes)
    return labels


def _pieces(
    points: np.ndarray, config: ClusterConfig, on_rings: RingPoints | None
) -> Iterator[np.ndarray]:
    """Point indices of each instance.

    A component that exceeds the limits, such as a car beside a hedge, is tried again with smaller
    tolerances; what is left of it is passed over or split.
    """
    waiting = np.arange(len(points))
    for share in TOLERANCES:
        part, seen = points, on_rings
        if len(waiting) < len(points):
            part, seen = points.take(waiting, axis=0), on_rings and on_rings.of(waiting)
        component = components(part, config, share, seen)
        start, order = fill(component, int(component.max()) + 1)
        count = np.diff(start)
        low, high = _extents(part, component, len(count))
        large = _parts((high - low).T, count, config).max(axis=0) > 1
        if seen is None:
            enough = count >= _fewest(ranges((low + high) / 2), config)
            enough &= high[:, 2] - low[:, 2] >= config.min_height
        else:
            enough = seen.look_like_objects(component, count, low, high, config)
        for number in np.flatnonzero(enough & ~large):
            yield waiting[order[start[number] : start[number + 1]]]
        if config.large == "split" or not large.any():
            break
        waiting = waiting[large[component]]
    if config.large == "split":
        for number in np.flatnonzero(large):
            piece = waiting[order[start[number] : start[number + 1]]]
            for within in _split(np.ascontiguousarray(points[piece].T), config):
                yield piece[within]


def _fewest(reach: np.ndarray, config: ClusterConfig) -> np.ndarray:
    """Points (k,) that objects must have at these ranges: far ones get fewer rays."""
    rays = (PLENTIFUL / np.maximum(reach, PLENTIFUL)) ** 2
    return np.maximum(config.min_points * rays, min(FEWEST, config.min_points))


@machine_code
def _extents(points, component, count):
    """Lowest and highest coordinates (count, 3) of each component."""
    low = np.full((count, 3), np.inf, np.float32)
    high = np.full((count, 3), -np.inf, np.float32)
    for i in range(len(points)):
        for axis in range(3):
            c, value = component[i], np.float32(points[i, axis])
            low[c, axis], high[c, axis] = min(low[c, axis], value), max(high[c, axis], value)
    return low, high


def where_something_stands(
    points: np.ndarray, height: float, above: np.ndarray | None = None
) -> np.ndarray:
    """Which points have something of this height around them: (n,) bool.

    The rest is missed ground, which would glue one object to the next. Height counts from the
    lowest point around, or from the ground where it is known how far (n,) they are above it.
    """
    if len(points) == 0:
        return np.zeros(0, bool)
    z, floor = (points[:, 2], np.inf) if above is None else (above, 0.0)
    return _standing(points, z, points[:, 0].min(), points[:, 1].min(), height, floor)


@machine_code
def _standing(points, z, left, low, height, floor):
    columns = int((points[:, 0].max() - left) / STANDING_CELL) + 3  # a border of empty cells
    rows = int((points[:, 1].max() - low) / STANDING_CELL) + 3
    top = np.full((columns, rows), -np.inf, np.float32)
    bottom = np.full((columns, rows), floor, np.float32)
    for i in range(len(points)):
        x = int((points[i, 0] - left) / STANDING_CELL) + 1
        y = int((points[i, 1] - low) / STANDING_CELL) + 1
        top[x, y], bottom[x, y] = max(top[x, y], z[i]), min(bottom[x, y], z[i])
    tall = np.zeros((columns, rows), np.bool_)
    for x in range(1, columns - 1):
        for y in range(1, rows - 1):
            if top[x, y] > -np.inf:
                high, deep = top[x, y], bottom[x, y]
                for across in range(x - 1, x + 2):
                    for along in range(y - 1, y + 2):
                        high, deep = max(high, top[across, along]), min(deep, bottom[across, along])
                tall[x, y] = high - deep >= height
    stands = np.empty(len(points), np.bool_)
    for i in range(len(points)):
        x = int((points[i, 0] - left) / STANDING_CELL) + 1
        stands[i] = tall[x, int((points[i, 1] - low) / STANDING_CELL) + 1]
    return stands


def components(
    points: np.ndarray,
    config: ClusterConfig,
    share: float = 1.0,
    on_rings: RingPoints | None = None,
) -> np.ndarray:
    """Component number (n,) of points (n, 3): chains of neighbours within a share of the tolerance.

    Points that share a voxel count as one, at their mean; a voxel's diagonal is the tolerance.
    """
    tolerance, adaptive = share * config.tolerance, share * config.adaptive
    if on_rings is not None:
        adaptive = max(adaptive, on_rings.least_adaptive)
    key = _voxels(points, tolerance, adaptive)
    inverse = _number(key)
    count = np.bincount(inverse)
    centres = np.stack([np.bincount(inverse, column) / count for column in points.T], axis=1)
    component = _connect(centres, tolerance, adaptive)[inverse]
    if on_rings is None:
        return component
    return on_rings.join(points, component, tolerance, adaptive, share)


@machine_code
def _voxels(points, tolerance, adaptive):
    """A number (n,) for the voxel of each point, by band of range, x, y and z."""
    low = points[0].copy()
    for i in range(len(points)):
        for axis in range(3):
            low[axis] = min(low[axis], points[i, axis])
    key = np.empty(len(points), np.int64)
    for i in range(len(points)):
        reach = np.sqrt(points[i, 0] ** 2 + points[i, 1] ** 2 + points[i, 2] ** 2)
        band = min(int(reach / BAND), BANDS - 1) if adaptive > 0 else 0
        edge = np.float32((tolerance + adaptive * BAND * band) / np.sqrt(3))
        key[i] = band
        for axis in range(3):
            key[i] = key[i] << 19 | int((points[i, axis] - low[axis]) / edge)
    return key


def rows_by_label(labels: np.ndarray) -> list[np.ndarray]:
    """Rows of each label from 0 to the greatest, in their order."""
    starts, order = fill(labels, int(labels.max()) + 1 if len(labels) else 0)
    edges = starts.tolist()
    return [order[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]


def ranges(points: np.ndarray) -> np.ndarray:
    """Distances (n,) from the sensor; np.linalg.norm takes several times as long."""
    return np.sqrt(np.einsum("nd,nd->n", points, points))


@machine_code
def _number(keys):
    """Number (n,) of each distinct key, as they appear: a hash table is quicker than a sort."""
    size = 1
    while size < 2 * len(keys):
        size *= 2
    table, number, count = np.full(size, -1), np.empty(len(keys), np.int64), 0
    for i in range(len(keys)):
        if i > 0 and keys[i] == keys[i - 1]:  # as neighbours on a ring often are
            number[i] = number[i - 1]
            continue
        place = (keys[i] * SCATTER >> 20) & (size - 1)
        while table[place] >= 0 and keys[table[place]] != keys[i]:
            place = (place + 1) & (size - 1)
        if table[place] < 0:
            table[place], number[i], count = i, count, count + 1
        else:
            number[i] = number[table[place]]
    return number


@machine_code
def _connect(centres, tolerance, adaptive):
    """Component number (m,) of centres (m, 3): chains of pairs closer than the tolerance at the
    nearer one's range. Each looks at those before it in its own and the neighbouring cells."""
    reach = np.sqrt(centres[:, 0] ** 2 + centres[:, 1] ** 2 + centres[:, 2] ** 2)
    allowed = tolerance + adaptive * BAND * np.floor(reach / BAND)
    left, low = centres[:, 0].min(), centres[:, 1].min()
    across, along = centres[:, 0].max() - left, centres[:, 1].max() - low
    cell = max(allowed.max(), across / MOST_CELLS, along / MOST_CELLS)
    x = ((centres[:, 0] - left) / cell).astype(np.int64) + 1
    y = ((centres[:, 1] - low) / cell).astype(np.int64) + 1
    rows = y.max() + 2  # a border of empty cells
    cell_of = x * rows + y
    starts, order = fill(cell_of, (x.max() + 2) * rows)
    centres, allowed, cell_of = centres[order], allowed[order], cell_of[order]
    parent = np.arange(len(centres))
    for i in range(len(centres)):
        below, before = cell_of[i] - 1, cell_of[i] - rows - 1
        for first, last in ((starts[before], starts[before + 3]), (starts[below], np.int32(i))):
            for j in range(first, last):
                limit = min(allowed[i], allowed[j]) ** 2
                u, v = centres[i, 0] - centres[j, 0], centres[i, 1] - centres[j, 1]
                if u * u + v * v + (centres[i, 2] - centres[j, 2]) ** 2 <= limit:
                    parent[find_root(parent, i)] = find_root(parent, j)
    component = np.empty_like(parent)
    component[order] = number_sets(parent)
    return component


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
