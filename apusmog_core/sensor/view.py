# SPDX-License-Identifier: Apache-2.0
"""A scan as its sensor sees it: rings and columns, and what each object point sees around it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..compute import machine_code
from .grid import to_polar, turn
from .kernels import inverse_sinh
from .lasers import Lasers, find_lasers, ring_spacing
from .neighbours import fill

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
RINGS_AROUND = 2  # that the window looks above and below
COLUMNS_AROUND = 8 + NEAR_COLUMNS  # ... and to the sides
OUTSIDE = -2  # in place of an instance: no ring of the sensor
PARTNER_COLUMNS = 1.6  # columns within which points of two rings are partners
MOST_CELLS = 1 << 24  # rings times columns, 200 MB: crowds of points that no sensor has measured


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

    def only(self, numbers: np.ndarray) -> ObjectScan:
        """These objects (k,), numbered anew from 1; the others become surroundings."""
        number = np.zeros(int(self.instance.max()) + 1, np.int64)
        number[numbers] = np.arange(1, len(numbers) + 1)
        return replace(self, instance=number[self.instance])


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
    spacing: np.ndarray  # (a, 2) the same, as the lasers are spaced
    aside: np.ndarray  # (a,) columns to the partner on the ring above, 0 where there is none
    ends: np.ndarray  # (a, 2) bool: no partner above, none below
    border: np.ndarray  # (a, 2) bool: on the sensor's highest ring, on its lowest
    column: float  # radians


@dataclass(frozen=True, eq=False)
class Grid:
    """Where the returns of a scan lie among the rings and columns of its sensor."""

    polar: np.ndarray  # (n, 3) azimuth, elevation, ln(range)
    lasers: Lasers
    column: np.ndarray  # (n,) 0..
    columns: int
    step: float  # radians of a column

    def spacing(self, rows: np.ndarray) -> np.ndarray:
        """Radians (a, 2) to the rings above and below points (a,), as the lasers are spaced."""
        return ring_spacing(self.lasers, self.lasers.number[rows], np.exp(-self.polar[rows, 2]))


def find_grid(scan: ObjectScan) -> Grid:
    polar = to_polar(scan.points)
    if scan.bias is not None:
        polar[:, 2] = np.log(np.maximum(np.exp(polar[:, 2]) - scan.bias, 1e-3))
    lasers = find_lasers(polar, scan.ring)
    most = max(8, MOST_CELLS // len(lasers.elevation))
    columns = min(max(8, round(2 * np.pi / lasers.step)), most)
    step = max(lasers.step, 2 * np.pi / columns)
    return Grid(polar, lasers, find_columns(polar[:, 0], columns), columns, step)


def objects_in_order(instance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows (a,) of the points of all objects, one object after the other, and their sizes."""
    starts, order = fill(instance, int(instance.max()) + 1)
    return order[starts[1] :], np.diff(starts[1:]).astype(np.int64)


def look_around(scan: ObjectScan) -> ObjectGraph:
    """The graph of a scan's objects: neighbours by ring and column, and the view around them."""
    grid = find_grid(scan)
    polar, lasers, column = grid.polar, grid.lasers, grid.column
    where = (lasers.number, column, polar, scan.instance)
    images = _images(*where, len(lasers.elevation), grid.columns)
    rows, sizes = objects_in_order(scan.instance)
    place = np.full(len(scan.points), -1, np.int64)
    place[rows] = np.arange(len(rows))
    height = np.full(len(rows), np.nan, np.float32)
    if scan.height is not None:
        height[:] = scan.height[rows]
    where = (polar, lasers.number, column, scan.instance)
    spacing = grid.spacing(rows)
    found = _look(*where, images, rows, place, spacing)
    neighbours, offsets, context, steps, aside, ends = found
    objects = object_scalars(grid, rows, sizes, height)
    cloud = np.repeat(np.arange(len(sizes)), sizes)
    _scalars(context, polar, rows, cloud, height, objects, steps, grid.step, scan.whole)
    mine = lasers.number[rows]
    border = np.stack((mine == len(lasers.elevation) - 1, mine == 0), axis=1)
    links = (neighbours, offsets, context, steps, spacing, aside, ends, border)
    return ObjectGraph(rows, sizes, polar[rows], *links, grid.step)


def part_of(graph: ObjectGraph, objects: slice) -> ObjectGraph:
    """The graph of some of the objects, one after the other."""
    edges = np.concatenate(([0], np.cumsum(graph.sizes)))
    rows = slice(edges[objects.start], edges[objects.stop])
    names = ("rows", "polar", "offsets", "context", "steps", "spacing", "aside", "ends", "border")
    return replace(
        graph,
        sizes=graph.sizes[objects],
        neighbours=graph.neighbours[rows] - rows.start,
        **{name: getattr(graph, name)[rows] for name in names},
    )


def ray_points(
    graph: ObjectGraph, anchors: np.ndarray, rays: np.ndarray, depth: np.ndarray
) -> np.ndarray:
    """Points (m, 3) about the sensor, at depths (m,) along rays (m, 2) of anchors (m,)."""
    return _ray_points(graph.polar, graph.steps, anchors, rays, depth, graph.column)


@machine_code
def _ray_points(polar, steps, anchors, rays, depth, column):
    points = np.empty((len(anchors), 3))
    for a in range(len(anchors)):
        i, across, rise = anchors[a], rays[a, 0], rays[a, 1]
        azimuth = polar[i, 0] + across * column
        elevation = polar[i, 1] + rise * (steps[i, 0] if rise > 0 else steps[i, 1])
        reach = np.exp(polar[i, 2] + depth[a] * steps[i, 0])
        level = reach * np.cos(elevation)
        points[a, 0] = level * np.cos(azimuth)
        points[a, 1] = level * np.sin(azimuth)
        points[a, 2] = reach * np.sin(elevation)
    return points


def nearest_measured(
    scan: ObjectScan, graph: ObjectGraph, anchors: np.ndarray, points: np.ndarray
) -> np.ndarray:
    """Rows (m,) of the scan: the measured points nearest to new points (m, 3) of anchors (m,)."""
    return _nearest(scan.points, graph.rows, graph.neighbours, anchors, points)


@machine_code
def _nearest(measured, rows, neighbours, anchors, points):
    """From neighbour to neighbour, as long as one is nearer."""
    found = np.empty(len(points), np.int64)
    for i in range(len(points)):
        least, here, nearer = np.inf, -1, anchors[i]
        while nearer != here:
            here = nearer
            for j in neighbours[here]:
                square = 0.0
                for axis in range(3):
                    square += (measured[rows[j], axis] - points[i, axis]) ** 2
                if square < least:
                    least, nearer = square, j
        found[i] = rows[here]
    return found


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
    """What was measured at each place (rings, columns): its row and instance; -1 for nothing.

    Then row, instance and ln(range) of the return nearest to it along the ring. RINGS_AROUND rings
    more above and below are OUTSIDE; to the sides the turn goes on for COLUMNS_AROUND.
    """
    shape = (rings + 2 * RINGS_AROUND, columns + 2 * COLUMNS_AROUND)
    row_at, owner_at = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
    row_near, owner_near = np.full(shape, -1, np.int32), np.full(shape, OUTSIDE, np.int32)
    depth_near = np.zeros(shape, np.float32)
    for i in range(len(number)):
        ring, c = number[i] + RINGS_AROUND, column[i] + COLUMNS_AROUND
        row_at[ring, c], owner_at[ring, c] = i, instance[i]
    for ring in range(RINGS_AROUND, rings + RINGS_AROUND):
        _go_around(row_at[ring], columns)
        _go_around(owner_at[ring], columns)
        for c in range(NEAR_COLUMNS, shape[1] - NEAR_COLUMNS):
            near = _beside(row_at[ring], c)
            row_near[ring, c], owner_near[ring, c] = row_at[ring, near], owner_at[ring, near]
            if row_at[ring, near] >= 0:
                depth_near[ring, c] = polar[row_at[ring, near], 2]
    return row_at, owner_at, row_near, owner_near, depth_near


@machine_code
def _go_around(line, columns):
    """Both ends of a line of cells repeat those of the other end."""
    line[:COLUMNS_AROUND] = line[columns : columns + COLUMNS_AROUND]
    line[columns + COLUMNS_AROUND :] = line[COLUMNS_AROUND : 2 * COLUMNS_AROUND]


@machine_code
def _beside(line, column):
    """The column nearest to the one asked for with a return, or itself."""
    for away in range(NEAR_COLUMNS + 1):
        if line[column - away] >= 0:
            return column - away
        if line[column + away] >= 0:
            return column + away
    return column


@machine_code
def _between(one, other):
    """From one azimuth to another, the short way around."""
    angle = other - one
    if angle >= np.pi:
        return angle - 2 * np.pi
    return angle + 2 * np.pi if angle < -np.pi else angle


@machine_code
def _partner(rows, owners, polar, i, mine, column, size):
    """The point of the same object nearest in azimuth on another ring's line of cells, or -1."""
    best, found = PARTNER_COLUMNS * size, -1
    for c in range(column - 2, column + 3):
        if owners[c] == mine:
            aside = abs(_between(polar[i, 0], polar[rows[c], 0]))
            if aside < best:
                best, found = aside, rows[c]
    return found


@machine_code
def _look(polar, number, columns_of, instance, images, rows, place, spacing):
    row_at, owner_at, row_near, owner_near, depth_near = images
    columns = row_at.shape[1] - 2 * COLUMNS_AROUND
    size = 2 * np.pi / columns
    count, k, w = len(rows), len(NEIGHBOURS), len(WINDOW)
    neighbours = np.empty((count, k), np.int64)
    offsets = np.zeros((count, k, 3), np.float32)
    context = np.zeros((count, CONTEXT), np.float32)
    steps, aside = np.empty((count, 2), np.float32), np.zeros(count, np.float32)
    ends = np.empty((count, 2), np.bool_)
    away = np.empty(w, np.float32)
    for a in range(count):
        i = rows[a]
        depth, mine = polar[i, 2], instance[i]
        line, column = number[i] + RINGS_AROUND, columns_of[i] + COLUMNS_AROUND  # in the images
        # the rings above and below: measured where there is a partner, else as they are spaced
        beside = (polar, i, mine, column, size)
        above = _partner(row_at[line + 1], owner_at[line + 1], *beside)
        below = _partner(row_at[line - 1], owner_at[line - 1], *beside)
        up, down = spacing[a, 0], spacing[a, 1]
        if above >= 0:
            measured = polar[above, 1] - polar[i, 1]
            if measured > 0.3 * up and measured < 3 * up:
                up = measured
            aside[a] = _between(polar[i, 0], polar[above, 0]) / size
        if below >= 0:
            measured = polar[i, 1] - polar[below, 1]
            if measured > 0.3 * down and measured < 3 * down:
                down = measured
        steps[a, 0], steps[a, 1] = up, down
        ends[a, 0], ends[a, 1] = above < 0, below < 0
        neighbours[a, 0] = a
        for n in range(1, k):
            there, c = line + NEIGHBOURS[n, 0], column + NEIGHBOURS[n, 1]
            neighbours[a, n] = a
            if owner_near[there, c] == mine:
                j = row_near[there, c]
                neighbours[a, n] = place[j]
                offsets[a, n, 0] = _between(polar[i, 0], polar[j, 0]) / size
                offsets[a, n, 1] = NEIGHBOURS[n, 0]
                offsets[a, n, 2] = (depth_near[there, c] - depth) / up
        scale, own_depth = np.float32(1 / up), np.float32(depth)
        for n in range(w):
            seen = depth_near[line + WINDOW[n, 0], column + WINDOW[n, 1]]
            away[n] = (seen - own_depth) * scale
        for n in range(w):  # by itself, so that it is done for many at once
            away[n] = np.float32(0.5) * inverse_sinh(away[n])
        for n in range(w):
            owner, at = owner_near[line + WINDOW[n, 0], column + WINDOW[n, 1]], SCALARS + 3 * n
            if owner >= 0:
                context[a, at] = 1.0
                context[a, at + 1] = 1.0 if owner == mine else -1.0
                context[a, at + 2] = away[n]
            elif owner == OUTSIDE:
                context[a, at] = -1.0
    return neighbours, offsets, context, steps, aside, ends


def object_scalars(
    grid: Grid, rows: np.ndarray, sizes: np.ndarray, height: np.ndarray
) -> np.ndarray:
    """For each object (objects, 6), as the network sees them: bottom and top above ground, width,
    depth, rings, and how many rings of the sensor lie above its highest."""
    lasers = grid.lasers
    extent = _extents(grid.polar, lasers.number, rows, sizes, height, len(lasers.elevation))
    extent[:, :2] = extent[:, :2].clip(-1, 6)
    extent[:, 2:4] = np.log1p(extent[:, 2:4])
    extent[:, 4] = np.log(extent[:, 4])
    extent[:, 5] = extent[:, 5].clip(max=2)
    return extent


@machine_code
def _extents(polar, number, rows, sizes, height, rings):
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
            aside = turn(polar[i, 0] - first)
            left, right = min(left, aside), max(right, aside)
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
            row[7:9] = objects[o, :2]
            row[13] = min(height[a] / np.exp(row[0]), 8.0)  # rings down to the ground
        row[9:13] = objects[o, 2:]
