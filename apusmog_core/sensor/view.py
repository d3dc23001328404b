# SPDX-License-Identifier: Apache-2.0
"""A scan as its sensor sees it: rings and columns, and what each object point sees around it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..compute import machine_code
from .grid import measure_steps, to_polar
from .kernels import inverse_sinh

# Neighbours of a point that the network attends to, as (rings, columns) away; itself first.
NEIGHBOURS = np.array(
    [(0, 0), (0, -1), (0, 1)] + [(ring, column) for ring in (-1, 1) for column in (0, -2, 2)]
)
# Where a point looks around in the whole scan, whatever the returns there belong to.
WINDOW = np.array(
    [(0, column) for column in (-8, -4, -2, -1, 1, 2, 4, 8)]
    + [(ring, column) for ring in (-2, -1, 1, 2) for column in (-6, -2, 0, 2, 6)]
)
SCALARS = 14  # of the context, before the window
CONTEXT = SCALARS + 3 * len(WINDOW)
NEAR_COLUMNS = 1  # a return so many columns beside the one asked for still counts
PARTNER_COLUMNS = 1.6  # columns within which points of two rings are partners
LEAST_RETURNS = 8  # of a ring, to fit how its elevation changes with range
MOST_RING_NUMBERS = 4096  # between the least and the greatest, for a table of them
MOST_CELLS = 1 << 24  # rings times columns, 200 MB: crowds of points that no sensor has measured
SAME_SHOT = 1e-5  # radians
WIDEST_COLUMN = np.radians(1.0)
DEFAULT_COLUMN = float(np.radians(0.2))


@dataclass(frozen=True, eq=False)
class ObjectScan:
    """All returns of a scan about the sensor, and which of them belong to objects."""

    points: np.ndarray  # (n, 3) about the sensor
    instance: np.ndarray  # (n,) 1.. for objects, 0 for the rest
    ring: np.ndarray | None = None  # (n,) any integers, one for each laser
    height: np.ndarray | None = None  # (n,) above the ground, nan where that is not known
    whole: bool = True  # False: the surroundings of the objects are missing
    bias: np.ndarray | None = None  # (n,) metres by which ranges are too long, see calibrate.py

    @classmethod
    def of_clouds(cls, clouds, origin) -> ObjectScan:
        """Objects alone: neither rings nor surroundings are known."""
        instance = np.repeat(np.arange(1, len(clouds) + 1), [len(c) for c in clouds])
        return cls(np.concatenate(clouds) - origin, instance, whole=False)


@dataclass(frozen=True, eq=False)
class Rings:
    """Which laser measured a point, from the lowest up, and where the lasers look."""

    number: np.ndarray  # (n,) int64, 0.. by elevation
    elevation: np.ndarray  # (rings,) radians, at infinite range
    height: np.ndarray  # (rings,) metres: a laser that starts higher sees lower with range
    step: float  # radians between shots of one ring


@dataclass(frozen=True, eq=False)
class ObjectGraph:
    """What the network is given: the points of all objects, one object after the other."""

    rows: np.ndarray  # (a,) of the scan
    sizes: np.ndarray  # (objects,)
    polar: np.ndarray  # (a, 3) azimuth, elevation, ln(range)
    neighbours: np.ndarray  # (a, k) rows of this graph, of the same object; itself where none is
    offsets: np.ndarray  # (a, k, 3) to them: columns, rings, ln(range) in steps up
    context: np.ndarray  # (a, CONTEXT) what is around each point
    steps: np.ndarray  # (a, 2) radians to the ring above and to the ring below
    aside: np.ndarray  # (a,) columns to the partner on the ring above, 0 where there is none
    ends: np.ndarray  # (a, 2) bool: no partner above, none below
    border: np.ndarray  # (a, 2) bool: on the sensor's highest ring, on its lowest
    column: float  # radians


def find_rings(polar: np.ndarray, ring: np.ndarray | None) -> Rings:
    """Rings of a scan (n, 3) by their numbers, or by its elevations where they are not known."""
    if ring is None:
        step, up = measure_steps(polar[:, 0], polar[:, 1])
        turn = 2 * np.pi * polar[:, 1] / up
        phase = np.arctan2(np.sin(turn).mean(), np.cos(turn).mean()) / (2 * np.pi)
        ring = np.round(polar[:, 1] / up - phase).astype(np.int64)
        names, number = np.unique(ring, return_inverse=True)
    else:
        names, number = _number_rings(np.asarray(ring))
        step = column_step(polar[:, 0], number, len(names))
    sums = ring_sums(number, polar, len(names))
    fitted, height = fit_rings(sums)
    order = np.argsort(sums[:, 1] / sums[:, 0], kind="stable")
    rank = np.empty(len(names), np.int64)
    rank[order] = np.arange(len(names))
    return Rings(rank[number], fitted[order], height[order], step)


def _number_rings(ring: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Names (rings,) and the place of each point's among them (n,); as np.unique, but quick."""
    low, high = int(ring.min()), int(ring.max())
    if high - low > MOST_RING_NUMBERS:
        return np.unique(ring, return_inverse=True)
    there = np.bincount(ring - low)
    names = np.flatnonzero(there)
    return names + low, (np.cumsum(there > 0) - 1)[ring - low]


def column_step(azimuth: np.ndarray, number: np.ndarray, rings: int) -> float:
    """Median angle between neighbouring shots of one ring, radians."""
    step = _steps_as_stored(azimuth, number, rings)
    step = step[step > SAME_SHOT]
    if len(step) == 0 or np.median(step) > WIDEST_COLUMN:  # stored in no order
        order = np.lexsort((azimuth, number))
        step = np.diff(azimuth[order])[np.diff(number[order]) == 0]
        step = step[step > SAME_SHOT]
    return float(np.median(step)) if len(step) else DEFAULT_COLUMN


@machine_code
def _steps_as_stored(azimuth, number, rings):
    """Angle (n,) of each shot from the one before it on its ring."""
    last = np.full(rings, np.nan)
    steps = np.zeros(len(azimuth))
    for i in range(len(azimuth)):
        before = last[number[i]]
        if before == before:
            steps[i] = abs(_turn(azimuth[i] - before))
        last[number[i]] = azimuth[i]
    return steps


@machine_code
def ring_sums(number, polar, rings):
    """For each ring: count, and sums of e, 1/r, 1/r^2 and e/r."""
    sums = np.zeros((rings, 5))
    for i in range(len(number)):
        e, u, row = polar[i, 1], np.exp(-polar[i, 2]), sums[number[i]]
        row[0] += 1
        row[1] += e
        row[2] += u
        row[3] += u * u
        row[4] += e * u
    return sums


def fit_rings(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least squares of elevation = e0 + height / range, for each ring."""
    count, e, u, uu, eu = sums.T
    mean_e, mean_u = e / count, u / count
    spread = uu / count - mean_u**2
    enough = (count >= LEAST_RETURNS) & (spread > 1e-5)
    slope = np.where(enough, (eu / count - mean_e * mean_u) / np.where(enough, spread, 1), 0.0)
    slope = np.where(np.abs(slope) < 0.5, slope, 0.0)  # metres; more is not a laser's place
    return mean_e - slope * mean_u, slope


def look_around(scan: ObjectScan) -> ObjectGraph:
    """The graph of a scan's objects: neighbours by ring and column, and the view around them."""
    polar = to_polar(scan.points)
    if scan.bias is not None:
        polar[:, 2] = np.log(np.maximum(np.exp(polar[:, 2]) - scan.bias, 1e-3))
    rings = find_rings(polar, scan.ring)
    most = max(8, MOST_CELLS // len(rings.elevation))
    columns = min(max(8, round(2 * np.pi / rings.step)), most)
    step = max(rings.step, 2 * np.pi / columns)
    column = find_columns(polar[:, 0], columns)
    images = _images(rings.number, column, polar, scan.instance, len(rings.elevation), columns)
    order = np.argsort(scan.instance, kind="stable")
    rows = order[np.searchsorted(scan.instance[order], 1) :]
    sizes = np.bincount(scan.instance[rows], minlength=1)[1:]
    place = np.full(len(scan.points), -1, np.int64)
    place[rows] = np.arange(len(rows))
    height = np.full(len(rows), np.nan, np.float32)
    if scan.height is not None:
        height[:] = scan.height[rows]
    where = (polar, rings.number, column, scan.instance)
    found = _look(*where, images, rows, place, rings.elevation, rings.height)
    neighbours, offsets, context, steps, aside, ends = found
    objects = _object_scalars(polar, rings.number, rows, sizes, height, len(rings.elevation))
    cloud = np.repeat(np.arange(len(sizes)), sizes)
    _scalars(context, polar, rows, cloud, height, objects, steps, step, scan.whole)
    mine = rings.number[rows]
    border = np.stack((mine == len(rings.elevation) - 1, mine == 0), axis=1)
    links = (neighbours, offsets, context, steps, aside, ends, border)
    return ObjectGraph(rows, sizes, polar[rows], *links, step)


def part_of(graph: ObjectGraph, objects: slice) -> ObjectGraph:
    """The graph of some of the objects, one after the other."""
    edges = np.concatenate(([0], np.cumsum(graph.sizes)))
    rows = slice(edges[objects.start], edges[objects.stop])
    names = ("rows", "polar", "offsets", "context", "steps", "aside", "ends", "border")
    return replace(
        graph,
        sizes=graph.sizes[objects],
        neighbours=graph.neighbours[rows] - rows.start,
        **{name: getattr(graph, name)[rows] for name in names},
    )


def ray_points(
    graph: ObjectGraph, anchors: np.ndarray, rays: np.ndarray, depth: np.ndarray
) -> np.ndarray:
    """Points (A * s, 3) about the sensor, at depths (A, s) along rays (A, s, 2) of anchors (A,)."""
    return _ray_points(graph.polar, graph.steps, anchors, rays, depth, graph.column)


@machine_code
def _ray_points(polar, steps, anchors, rays, depth, column):
    count, per = depth.shape
    points = np.empty((count * per, 3))
    for a in range(count):
        i = anchors[a]
        for q in range(per):
            across, rise = rays[a, q, 0], rays[a, q, 1]
            azimuth = polar[i, 0] + across * column
            elevation = polar[i, 1] + rise * (steps[i, 0] if rise > 0 else steps[i, 1])
            reach = np.exp(polar[i, 2] + depth[a, q] * steps[i, 0])
            level, row = reach * np.cos(elevation), points[a * per + q]
            row[0] = level * np.cos(azimuth)
            row[1] = level * np.sin(azimuth)
            row[2] = reach * np.sin(elevation)
    return points


def find_columns(azimuth: np.ndarray, columns: int) -> np.ndarray:
    """Column (n,) of each shot; where all rings fire together, shots lie in the middle of one."""
    angle = (azimuth[:: len(azimuth) // 4096 + 1] + np.pi) * columns
    phase = np.arctan2(np.sin(angle).mean(), np.cos(angle).mean()) / (2 * np.pi)
    return _columns_of(azimuth, columns, phase)


@machine_code
def _columns_of(azimuth, columns, phase):
    column = np.empty(len(azimuth), np.int32)
    for i in range(len(azimuth)):
        place = (azimuth[i] + np.pi) * (columns / (2 * np.pi)) - phase + 0.5
        column[i] = int(np.floor(place)) % columns
    return column


@machine_code
def _images(number, column, polar, instance, rings, columns):
    """Row, ln(range) and instance (rings, columns) of what was measured there; row -1: nothing."""
    row_at = np.full((rings, columns), -1, np.int32)
    depth = np.zeros((rings, columns), np.float32)
    owner = np.zeros((rings, columns), np.int32)
    for i in range(len(number)):
        ring, c = number[i], column[i]
        row_at[ring, c], depth[ring, c], owner[ring, c] = i, polar[i, 2], instance[i]
    return row_at, depth, owner


@machine_code
def _beside(row_at, ring, column):
    """The column nearest to the one asked for with a return on a ring, or -1."""
    columns = row_at.shape[1]
    for away in range(NEAR_COLUMNS + 1):
        left, right = (column - away) % columns, (column + away) % columns
        if row_at[ring, left] >= 0:
            return left
        if row_at[ring, right] >= 0:
            return right
    return -1


@machine_code
def _turn(angle):
    """An angle into [-pi, pi)."""
    return (angle + np.pi) % (2 * np.pi) - np.pi


@machine_code
def _partner(row_at, owner, polar, i, mine, ring, column, size):
    """The point of the same object nearest in azimuth on another ring, or -1."""
    rings, columns = row_at.shape
    best, found = PARTNER_COLUMNS * size, -1
    if 0 <= ring < rings:
        for away in range(-2, 3):
            c = (column + away) % columns
            j = row_at[ring, c]
            if j >= 0 and owner[ring, c] == mine:
                aside = abs(_turn(polar[j, 0] - polar[i, 0]))
                if aside < best:
                    best, found = aside, j
    return found


@machine_code
def _spacing(elevation, height, ring, other, inverse):
    """Radians between two rings at a range, by where their lasers look; never too little."""
    gap = elevation[other] - elevation[ring] + (height[other] - height[ring]) * inverse
    return max(abs(gap), 1e-3)


@machine_code
def _look(polar, number, columns_of, instance, images, rows, place, elevation, height):
    row_at, depth_at, owner = images
    rings, columns = row_at.shape
    size = 2 * np.pi / columns
    count, k, w = len(rows), len(NEIGHBOURS), len(WINDOW)
    neighbours = np.empty((count, k), np.int64)
    offsets = np.zeros((count, k, 3), np.float32)
    context = np.zeros((count, CONTEXT), np.float32)
    steps, aside = np.empty((count, 2), np.float32), np.zeros(count, np.float32)
    ends = np.empty((count, 2), np.bool_)
    for a in range(count):
        i = rows[a]
        ring, column, depth = number[i], columns_of[i], polar[i, 2]
        mine = instance[i]
        inverse = np.exp(-depth)
        # the rings above and below: measured where there is a partner, else as they are spaced
        above = _partner(row_at, owner, polar, i, mine, ring + 1, column, size)
        below = _partner(row_at, owner, polar, i, mine, ring - 1, column, size)
        up = _spacing(elevation, height, ring, min(ring + 1, rings - 1), inverse)
        down = _spacing(elevation, height, ring, max(ring - 1, 0), inverse)
        if ring == rings - 1:
            up = down
        if ring == 0:
            down = up
        if above >= 0:
            measured = polar[above, 1] - polar[i, 1]
            if measured > 0.3 * up and measured < 3 * up:
                up = measured
            aside[a] = _turn(polar[above, 0] - polar[i, 0]) / size
        if below >= 0:
            measured = polar[i, 1] - polar[below, 1]
            if measured > 0.3 * down and measured < 3 * down:
                down = measured
        steps[a, 0], steps[a, 1] = up, down
        ends[a, 0], ends[a, 1] = above < 0, below < 0
        neighbours[a, 0] = a
        for n in range(1, k):
            neighbours[a, n] = a
            other = ring + NEIGHBOURS[n, 0]
            if other < 0 or other >= rings:
                continue
            c = _beside(row_at, other, column + NEIGHBOURS[n, 1])
            if c >= 0 and owner[other, c] == mine:
                j = row_at[other, c]
                neighbours[a, n] = place[j]
                offsets[a, n, 0] = _turn(polar[j, 0] - polar[i, 0]) / size
                offsets[a, n, 1] = NEIGHBOURS[n, 0]
                offsets[a, n, 2] = (depth_at[other, c] - depth) / up
        scale = np.float32(1 / up)
        for n in range(w):
            other, at = ring + WINDOW[n, 0], SCALARS + 3 * n
            if other < 0 or other >= rings:
                context[a, at] = -1.0
                continue
            c = _beside(row_at, other, column + WINDOW[n, 1])
            if c >= 0:
                context[a, at] = 1.0
                context[a, at + 1] = 1.0 if owner[other, c] == mine else -1.0
                away = (depth_at[other, c] - np.float32(depth)) * scale
                context[a, at + 2] = np.float32(0.5) * inverse_sinh(away)
    return neighbours, offsets, context, steps, aside, ends


@machine_code
def _object_scalars(polar, number, rows, sizes, height, rings):
    """For each object (objects, 6): bottom and top above ground, width, depth, rings, and how many
    rings of the sensor lie above its highest."""
    result = np.zeros((len(sizes), 6), np.float32)
    begin = 0
    for o in range(len(sizes)):
        low, high, near, far = np.inf, -np.inf, np.inf, -np.inf
        left, right, lowest, highest = np.inf, -np.inf, rings, -1
        first = polar[rows[begin], 0]
        for a in range(begin, begin + sizes[o]):
            i = rows[a]
            low, high = min(low, height[a]), max(high, height[a])  # nan compares as false
            near, far = min(near, polar[i, 2]), max(far, polar[i, 2])
            turn = _turn(polar[i, 0] - first)
            left, right = min(left, turn), max(right, turn)
            lowest, highest = min(lowest, number[i]), max(highest, number[i])
        result[o, 0], result[o, 1] = low, high
        result[o, 2] = (right - left) * np.exp(near)
        result[o, 3] = np.exp(far) - np.exp(near)
        result[o, 4], result[o, 5] = highest - lowest + 1, rings - 1 - highest
        begin += sizes[o]
    return result


@machine_code
def _scalars(context, polar, rows, cloud, height, objects, steps, column, whole):
    for a in range(len(rows)):
        i, o, row = rows[a], cloud[a], context[a]
        known = np.isfinite(height[a])
        row[0] = polar[i, 2] + np.log(steps[a, 0])  # ln of metres between rings
        row[1] = np.log(steps[a, 0] / column) - 1
        row[2] = np.log(steps[a, 0] / steps[a, 1])
        row[3] = polar[i, 2] - 3
        row[4] = 1.0 if known else 0.0
        row[5] = 1.0 if whole else 0.0
        if known:
            row[6] = min(max(height[a], -1.0), 6.0)
            row[7] = min(max(objects[o, 0], -1.0), 6.0)
            row[8] = min(max(objects[o, 1], -1.0), 6.0)
            row[13] = min(height[a] / np.exp(row[0]), 8.0)  # rings down to the ground
        row[9] = np.log1p(objects[o, 2])
        row[10] = np.log1p(objects[o, 3])
        row[11] = np.log(objects[o, 4])
        row[12] = min(objects[o, 5], 2.0)
