# SPDX-License-Identifier: Apache-2.0
"""Ground by rings, the default: its height, followed outwards from where the sensor stands."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..compute import machine_code
from .rings import Rings

SECTORS = 180
NEAREST, GROWTH = 1.5, 1.06  # metres of the first step outwards; each is longer than the last
LEAST_STEP, FARTHEST = 1.0, 200.0
CLOSE_TO, SLOPE = 0.12, 0.08  # metres, and metres a metre, that ground rises from cell to cell
STEEPEST = 0.12  # metres a metre, beyond which nothing is ground
AHEAD = 8.0  # metres that the ground goes on as steep as it was
SIDEWAYS = 6.0  # metres to the side within which other ground tells the height
WIDEST = 6.0  # metres: rises narrower than this stand on the ground
UNSURE = 0.03  # metres a metre that the ground may have risen since it was seen
STEP = 0.05  # metres of them that may be ground
MISSING = 4  # shots without a return after which there is nothing
LEAST_JUMP = 0.3  # metres of range from shot to shot that end a piece of a ring
HEIGHT_JUMP = 0.08  # ... or as metres of height of flat ground
AGREE = 0.15  # metres within which the lowest points of a cell confirm each other


@dataclass(frozen=True, eq=False)
class Terrain:
    """What n points show of the ground, and how they stand on it."""

    height: np.ndarray  # (n,) float32 above the ground
    stands_out: np.ndarray  # (n,) bool, see `find_standing_out`


def find_terrain(
    points: np.ndarray, rings: Rings, distance: np.ndarray, sensor_height: float
) -> Terrain:
    """The terrain that level points (n, 3), `distance` (n,) away, show."""
    stands_out = find_standing_out(distance, rings, sensor_height)
    edges, azimuth = _edges(), rings.azimuth
    height = _heights(points, azimuth, stands_out, edges, np.float32(sensor_height))
    return Terrain(height, stands_out)


def find_standing_out(distance: np.ndarray, rings: Rings, sensor_height: float) -> np.ndarray:
    """Points (n,) bool on short pieces of a ring beside something farther away, or nothing.

    Ground is wide, or ends where something nearer hides it.
    """
    rows = len(rings.elevation)
    return _stand_out(distance, rings.azimuth, rings.row, rows, rings.step, sensor_height)


@machine_code
def _stand_out(distance, azimuth, row, rows, step, sensor_height):
    columns = max(int(2 * np.pi / step), 8)
    scale = columns / (2 * np.pi)
    image = np.full((rows, columns), np.inf, np.float32)  # the nearest return of each shot
    column = np.empty(len(distance), np.int32)
    for i in range(len(distance)):
        c = min(int((azimuth[i] + np.pi) * scale), columns - 1)
        column[i] = c
        image[row[i], c] = min(image[row[i], c], distance[i])
    flag = np.zeros((rows, columns), np.bool_)
    shots, breaks = np.empty(columns, np.int64), np.empty(columns, np.int64)
    for r in range(rows):
        count = 0
        for c in range(columns):
            if image[r, c] < np.inf:
                shots[count] = c
                count += 1
        found = 0  # breaks[k]: a piece ends at this shot
        for k in range(count):
            here, there = shots[k], shots[(k + 1) % count]
            missing = (there - here) % columns > MISSING
            change = abs(image[r, here] - image[r, there])
            near = min(image[r, here], image[r, there])
            if missing or change > max(LEAST_JUMP, HEIGHT_JUMP * near / sensor_height):
                breaks[found] = k
                found += 1
        for b in range(found):
            before, last = breaks[b - 1] if b else breaks[found - 1], breaks[b]
            first = (before + 1) % count
            left, right = shots[before], shots[(last + 1) % count]
            start, end = shots[first], shots[last]
            span = (end - start) % columns
            if span / scale * image[r, start] > WIDEST:
                continue
            free_left = (start - left) % columns > MISSING or image[r, left] > image[r, start]
            free_right = (right - end) % columns > MISSING or image[r, right] > image[r, end]
            if free_left or free_right:
                for shift in range(span + 1):
                    flag[r, (start + shift) % columns] = True
    result = np.empty(len(distance), np.bool_)
    for i in range(len(distance)):
        result[i] = flag[row[i], column[i]]
    return result


def _edges() -> np.ndarray:
    """Horizontal distances (k + 1,) at which one cell ends and the next begins."""
    edges = [0.0, NEAREST]
    while edges[-1] < FARTHEST:
        edges.append(max(edges[-1] * GROWTH, edges[-1] + LEAST_STEP))
    return np.array(edges, np.float32)


@machine_code
def _heights(points, azimuth, stands_out, edges, sensor_height):
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
        turn = azimuth[i] * np.float32(SECTORS / (2 * np.pi)) + np.float32(SECTORS)
        s = int(turn) % SECTORS
        r = table[min(int(d), len(table) - 1)]
        while r < rings - 1 and d >= edges[r + 1]:
            r += 1
        sector[i], ring_of[i], distance[i] = s, r, d
        if stands_out[i]:
            continue
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
    unsure = np.zeros((rings, SECTORS), np.float32)  # metres; 0 where the ground is seen
    for s in range(SECTORS):
        last = 0  # the cell in which the ground was seen last
        slope = np.float32(0)  # of the ground there
        for r in range(1, rings):
            gap = (edges[r] + edges[r + 1] - edges[last] - edges[last + 1]) / 2
            expected = slope * min(gap, np.float32(AHEAD))
            ground[r, s] = ground[last, s] + expected
            unsure[r, s] = UNSURE * gap
            lowest = _lowest(low, r, s)
            rise = lowest - ground[last, s]
            if rise - expected < CLOSE_TO + SLOPE * gap:
                slope += min(gap / np.float32(AHEAD), np.float32(1)) * (rise / gap - slope)
                slope = min(max(slope, np.float32(-STEEPEST)), np.float32(STEEPEST))
                for between in range(last + 1, r + 1):
                    share = (edges[between] - edges[last]) / (edges[r] - edges[last])
                    ground[between, s] = ground[last, s] + share * rise
                    unsure[between, s] = 0
                last = r
    for r in range(1, rings):
        width = edges[r + 1] * np.float32(2 * np.pi / SECTORS)
        half = int(np.ceil(WIDEST / 2 / width))
        if half <= SECTORS // 8:  # nearer the rings are close anyway
            _cut_rises(ground[r], unsure[r], half)
        _fill_from_the_side(ground[r], unsure[r], int(SIDEWAYS / width))
    return ground


@machine_code
def _cut_rises(ground, unsure, half):
    """An opening by `half` sectors to each side: rises that are narrower go away."""
    least = np.empty(SECTORS, np.float32)  # around each sector, and as high as it may be
    may_be = np.empty(SECTORS, np.float32)
    for s in range(SECTORS):
        least[s] = may_be[s] = np.inf
        for beside in range(s - half, s + half + 1):
            b = beside % SECTORS
            least[s], may_be[s] = min(least[s], ground[b]), min(may_be[s], ground[b] + unsure[b])
    for s in range(SECTORS):
        opened = limit = np.float32(-np.inf)
        for beside in range(s - half, s + half + 1):
            b = beside % SECTORS
            opened, limit = max(opened, least[b]), max(limit, may_be[b])
        if ground[s] > limit + STEP:
            ground[s] = opened


@machine_code
def _fill_from_the_side(ground, unsure, reach):
    """Where the ground is not seen, the height comes from the nearest on either side."""
    for s in range(SECTORS):
        if unsure[s] == 0:
            continue
        total, weight = np.float32(0), np.float32(0)
        for way in (1, -1):
            for step in range(1, min(reach, SECTORS // 2) + 1):
                beside = (s + way * step) % SECTORS
                if unsure[beside] == 0:
                    total += ground[beside] / step
                    weight += np.float32(1) / step
                    break
        if weight > 0:
            ground[s] = total / weight


@machine_code
def _lowest(low, r, s):
    """Lowest height of a cell that another point confirms; the lowest of one or two, otherwise."""
    if low[1, r, s] == np.inf or low[1, r, s] - low[0, r, s] < AGREE:
        return low[0, r, s]
    if low[2, r, s] - low[1, r, s] < AGREE:
        return low[1, r, s]
    return low[0, r, s]
