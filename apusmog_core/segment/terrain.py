# SPDX-License-Identifier: Apache-2.0
"""The height of the ground around the sensor, followed outwards from where the sensor stands."""

from __future__ import annotations

import numpy as np

from ..compute import machine_code

SECTORS = 180
NEAREST, GROWTH = 1.5, 1.06  # metres of the first step outwards; each is longer than the last
LEAST_STEP, FARTHEST = 1.0, 120.0
CLOSE_TO, SLOPE = 0.12, 0.04  # metres, and metres a metre, that ground rises from cell to cell
STEEPEST = 0.12  # metres a metre, beyond which nothing is ground
AHEAD = 8.0  # metres that the ground goes on as steep as it was
WIDEST = 6.0  # metres: rises narrower than this stand on the ground
STEP = 0.05  # metres of them that may be ground
AGREE = 0.15  # metres within which the lowest points of a cell confirm each other


def height_above_ground(points: np.ndarray, sensor_height: float) -> np.ndarray:
    """Height (n,) float32 of level points above the terrain that they show."""
    edges = _edges()
    return _heights(points, edges, np.float32(sensor_height))


def _edges() -> np.ndarray:
    """Horizontal distances (k + 1,) at which one cell ends and the next begins."""
    edges = [0.0, NEAREST]
    while edges[-1] < FARTHEST:
        edges.append(max(edges[-1] * GROWTH, edges[-1] + LEAST_STEP))
    return np.array(edges, np.float32)


@machine_code
def _heights(points, edges, sensor_height):
    rings = len(edges) - 1
    sector, distance = np.empty(len(points), np.int32), np.empty(len(points), np.float32)
    ring_of = np.empty(len(points), np.int32)
    # a table instead of a search in the edges
    table = np.empty(int(edges[-1]) + 2, np.int32)
    for metre in range(len(table)):
        table[metre] = min(np.searchsorted(edges, np.float32(metre), "right") - 1, rings - 1)
    low = np.full((3, rings, SECTORS), np.inf, np.float32)  # the three lowest of each cell
    for i in range(len(points)):
        x, y, z = points[i, 0], points[i, 1], points[i, 2]
        d = np.sqrt(x * x + y * y)
        turn = np.arctan2(y, x) * np.float32(SECTORS / (2 * np.pi)) + np.float32(SECTORS)
        s = int(turn) % SECTORS
        r = table[min(int(d), len(table) - 1)]
        while r < rings - 1 and d >= edges[r + 1]:
            r += 1
        sector[i], ring_of[i], distance[i] = s, r, d
        if z < low[2, r, s] and abs(z + sensor_height) < 1.0 + STEEPEST * d:
            low[2, r, s] = z
            if z < low[1, r, s]:
                low[2, r, s], low[1, r, s] = low[1, r, s], z
                if z < low[0, r, s]:
                    low[1, r, s], low[0, r, s] = low[0, r, s], z
    ground = _follow(low, edges, sensor_height)
    above = np.empty(len(points), np.float32)
    for i in range(len(points)):
        r, s = ring_of[i], sector[i]
        inner, outer = edges[r], edges[r + 1]
        share = (distance[i] - inner) / (outer - inner) - np.float32(0.5)
        other = r + 1 if share > 0 else r - 1
        height = ground[r, s]
        if 0 <= other < rings:
            rise = ground[other, s] - height
            height += abs(share) * rise + abs(rise) / 2  # a cell's lowest point is at its lower end
        above[i] = points[i, 2] - height
    return above


@machine_code
def _follow(low, edges, sensor_height):
    """Height of the ground in each cell (rings, sectors).

    From the inside to the outside, a cell is ground where its lowest points continue the ground
    further in; between such cells the height is interpolated. What a few rings see of an object
    may pass for a rise of the ground then, so rises narrower than an object are cut off.
    """
    rings = len(edges) - 1
    ground = np.full((rings, SECTORS), -sensor_height, np.float32)
    for s in range(SECTORS):
        last = 0  # the cell in which the ground was seen last
        slope = np.float32(0)  # of the ground there
        for r in range(1, rings):
            gap = (edges[r] + edges[r + 1] - edges[last] - edges[last + 1]) / 2
            expected = slope * min(gap, np.float32(AHEAD))
            ground[r, s] = ground[last, s] + expected
            lowest = _lowest(low, r, s)
            if lowest == np.inf:
                continue
            rise = lowest - ground[last, s]
            if rise - expected < CLOSE_TO + SLOPE * gap:
                slope += min(gap / np.float32(AHEAD), np.float32(1)) * (rise / gap - slope)
                slope = min(max(slope, np.float32(-STEEPEST)), np.float32(STEEPEST))
                for between in range(last + 1, r):
                    share = (edges[between] - edges[last]) / (edges[r] - edges[last])
                    ground[between, s] = ground[last, s] + share * rise
                ground[r, s] = lowest
                last = r
    eroded, opened = np.empty(SECTORS, np.float32), np.empty(SECTORS, np.float32)
    for r in range(1, rings):
        width = edges[r + 1] * np.float32(2 * np.pi / SECTORS)
        half = int(np.ceil(WIDEST / 2 / width))
        if half > SECTORS // 8:
            continue  # so near that the rings are close
        for s in range(SECTORS):
            eroded[s] = np.inf
            for beside in range(s - half, s + half + 1):
                eroded[s] = min(eroded[s], ground[r, beside % SECTORS])
        for s in range(SECTORS):
            opened[s] = -np.inf
            for beside in range(s - half, s + half + 1):
                opened[s] = max(opened[s], eroded[beside % SECTORS])
        for s in range(SECTORS):
            if ground[r, s] > opened[s] + STEP:
                ground[r, s] = opened[s]
    return ground


@machine_code
def _lowest(low, r, s):
    """Lowest height of a cell that another point confirms; the lowest of one or two, otherwise."""
    if low[1, r, s] == np.inf or low[1, r, s] - low[0, r, s] < AGREE:
        return low[0, r, s]
    if low[2, r, s] - low[1, r, s] < AGREE:
        return low[1, r, s]
    return low[0, r, s]
