# SPDX-License-Identifier: Apache-2.0
"""Exact nearest neighbours by cells of the sensor's view, over which it spreads its points evenly.

Several times quicker than a tree: the search looks into square after square of cells around the
query, until none farther away can hold a nearer point.
"""

from __future__ import annotations

import numpy as np

from ..compute import machine_code

FIRST_RAYS = 2  # cells around a ray that are looked into first


@machine_code
def fill(cell_of, cells):
    """Starts (cells + 1,), order (n,): the points of cell c are order[starts[c]:starts[c + 1]]."""
    starts = np.zeros(cells + 1, np.int32)
    for c in cell_of:
        starts[c + 1] += 1
    for c in range(cells):
        starts[c + 1] += starts[c]
    order = np.empty(len(cell_of), np.int64)
    place = starts[:-1].copy()
    for i in range(len(cell_of)):
        order[place[cell_of[i]]] = i
        place[cell_of[i]] += 1
    return starts, order


# --- rays of one cloud ---------------------------------------------------------------------------


@machine_code
def nearest_rays(rays, sizes, asked, asked_sizes, k):
    """Nearest rays (m, k) of the same cloud, nearest first, itself where there are no more.

    rays (n, 2) about one apart, sizes[i] of cloud i; asked (m,) rows of them, asked_sizes[i] of
    cloud i.
    """
    index = np.empty((len(asked), k), np.int64)
    distance, nearby = np.empty(k), np.empty(k, np.int64)
    begin = done = 0
    for size, queries in zip(sizes, asked_sizes):  # noqa: B905, numba knows no `strict`
        cloud = rays[begin : begin + size]
        x, y, cell, columns, rows = _cells_of(cloud)
        starts, order = fill(x.astype(np.int64) * rows + y.astype(np.int64), columns * rows)
        sorted_rays = cloud[order]
        for query in range(done, done + queries):
            i = asked[query] - begin
            column, row = int(x[i]), int(y[i])
            margin = min(x[i] - column, column + 1 - x[i], y[i] - row, row + 1 - y[i])
            reach, all_of_it = FIRST_RAYS, False
            while not all_of_it:
                all_of_it = reach >= max(columns, rows)
                distance[:] = np.inf
                nearby[:] = i
                for step in range(1, 2 * reach + 2):  # from the middle outwards
                    c = column + (step // 2 if step % 2 else -(step // 2))
                    if c < 0 or c >= columns:
                        continue
                    first = starts[c * rows + max(row - reach, 0)]
                    for place in range(first, starts[c * rows + min(row + reach + 1, rows)]):
                        if distance[k - 1] == 0:
                            break  # as many copies of one ray as are asked for
                        across = sorted_rays[place, 0] - cloud[i, 0]
                        up = sorted_rays[place, 1] - cloud[i, 1]
                        square = across * across + up * up
                        if square < distance[k - 1]:  # goes in its place among the nearest
                            at = k - 1
                            while at > 0 and distance[at - 1] > square:
                                distance[at], nearby[at] = distance[at - 1], nearby[at - 1]
                                at -= 1
                            distance[at], nearby[at] = square, order[place]
                if distance[k - 1] <= (cell * (reach + margin)) ** 2:
                    break
                reach *= 2
            for j in range(k):
                index[query, j] = begin + nearby[j]
        begin, done = begin + size, done + queries
    return index


@machine_code
def _cells_of(cloud):
    """Where rays (n, 2) lie, in cells; the length of a cell, and how many there are."""
    size = len(cloud)
    left, low = cloud[:, 0].min(), cloud[:, 1].min()
    width, height = cloud[:, 0].max() - left, cloud[:, 1].max() - low
    most = 16 * size  # cells: memory for sparse clouds, too
    cell = max(width / most, height / most, np.sqrt(width * height / most))
    cell = max(cell, min(1.0, np.sqrt(width * height / size)), 1e-9)  # smaller in a crowd
    x, y = (cloud[:, 0] - left) / cell, (cloud[:, 1] - low) / cell
    return x, y, cell, int(width / cell) + 1, int(height / cell) + 1


@machine_code
def find_returns(points):
    """Rows (k,) of points (n, 3) that are returns, how many are not finite, and how many lie at
    the sensor itself, exactly: so drivers of organised clouds say that nothing came back."""
    kept, count, not_finite, no_return = np.empty(len(points), np.int64), 0, 0, 0
    for i in range(len(points)):
        x, y, z = points[i, 0], points[i, 1], points[i, 2]
        if not (np.isfinite(x) and np.isfinite(y) and np.isfinite(z)):
            not_finite += 1
        elif x == 0 and y == 0 and z == 0:
            no_return += 1
        else:
            kept[count] = i
            count += 1
    return kept[:count], not_finite, no_return
