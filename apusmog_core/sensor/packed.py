# SPDX-License-Identifier: Apache-2.0
"""What a device needs to know of a scan, in one upload: see `device.py` for what it does with it.

In shapes: N returns, a object points, o objects, R rows of S rays each.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .lattice import GOLDEN, LATTICE, Slots, lattice_slots
from .view import (
    COLUMNS_AROUND,
    NEIGHBOURS,
    RINGS_AROUND,
    WINDOW,
    Grid,
    ObjectScan,
    object_scalars,
)

NOTHING, OUTSIDE = 0, 1  # rows of the table of returns: no return there; no ring of the sensor
# columns of the table of returns; then what is known of object points in advance, and later
AZIMUTH, RING, ELEVATION, DEPTH, INSTANCE, PLACE, STATE, MINUS, HALF = range(9)
HEIGHT, OWNER, SHARE, UP, DOWN, ASIDE, METRES = range(9, 16)
# ... and of the slots for rays
ACROSS, TOWARDS, RISE, ABOVE, BELOW, ORDER, TIER, FACTOR, SPREAD = range(9)
PARTNERS = [(ring, column) for ring in (1, -1) for column in range(-2, 3)]
NEAR = slice(len(PARTNERS), len(PARTNERS) + len(NEIGHBOURS))  # places of the neighbours
AROUND = slice(NEAR.stop, NEAR.stop + len(WINDOW))
MOST_SLOTS = 32  # rays of a row
NO_RAY = 1e6  # place in the order of a slot that holds none


def send(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Arrays to a device in one upload: as int64 and float32, wherefore both travel as 32 bits."""
    kinds = {name: "if"[a.dtype.kind == "f"] for name, a in arrays.items()}
    names = sorted(arrays, key=lambda name: kinds[name], reverse=True)  # integers first
    narrow = {"i": np.int32, "f": np.float32}
    flat = [arrays[name].astype(narrow[kinds[name]]).reshape(-1) for name in names]
    whole = torch.from_numpy(np.concatenate([part.view(np.float32) for part in flat])).to(device)
    integers = sum(part.size for part in flat if part.dtype == np.int32)
    numbers = {"i": whole[:integers].view(torch.int32).long(), "f": whole[integers:]}
    taken, sent = {"i": 0, "f": 0}, {}
    for name, part in zip(names, flat, strict=True):
        kind, begin = kinds[name], taken[kinds[name]]
        sent[name] = numbers[kind][begin : begin + part.size].view(arrays[name].shape)
        taken[kind] += part.size
    return sent


def pack_scan(
    scan: ObjectScan, grid: Grid, rows: np.ndarray, sizes: np.ndarray, seed: int = 0
) -> dict[str, np.ndarray]:
    """Arrays for looking around the points of objects: rows (a,) of the scan, sizes (o,)."""
    returns, image = table_of_returns(scan, grid, rows)
    number, width = grid.lasers.number[rows], image.shape[1]
    # places around a cell: of its own image, then of that of nearest returns, one cell shorter
    places = [r * width + c for r, c in PARTNERS]
    around = (*NEIGHBOURS.tolist(), *WINDOW.tolist())
    places += [image.size - 1 + r * width + c for r, c in around]
    height = np.full(len(rows), np.nan) if scan.height is None else scan.height[rows]
    cloud = np.repeat(np.arange(len(sizes)), sizes)
    objects = object_scalars(grid, rows, sizes, height.astype(np.float32))[cloud]  # (a, 6)
    known, depth = np.isfinite(height), grid.polar[rows, 2]
    height = np.where(known, height, 0.0)
    objects[~known, :2] = 0
    about = (depth - 3, known, np.full(len(rows), scan.whole), height.clip(-1, 6), *objects.T)
    share = ((seed + rows) * GOLDEN) % 1  # of 1, spread evenly
    own = (height * np.exp(-depth), 8.0 * scan.instance[rows], share)  # radians above the ground
    return {
        "image": image,  # (rings, columns) of rows of `returns`
        "cell": (number + RINGS_AROUND) * width + grid.column[rows] + COLUMNS_AROUND,  # (a,)
        "places": np.array(places),
        "cloud": cloud,  # (a,)
        "returns": returns,  # (N, 9)
        "own": np.concatenate((returns[rows + 2], np.stack(own, axis=1)), axis=1),  # (a, 12)
        "others": (NEIGHBOURS != 0).any(axis=1).astype(np.float32),  # all but the point itself
        "spacing": grid.spacing(rows) * (1, -1),  # (a, 2) radians up and down
        "about": np.stack(about, axis=1),  # (a, 10) of the context's scalars
        "measured": np.column_stack((scan.points[rows], rows)).astype(np.float32),  # (a, 4)
    }


def table_of_returns(
    scan: ObjectScan, grid: Grid, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (N, 9): azimuth, ring, elevation, ln(range), instance, place among the object points,
    1 (0 for NOTHING, -1 for OUTSIDE), -1 and a half (0 for both); and the image (rings, columns) of
    their rows in the table.

    Beyond the image's ends the turn goes on, with rows of their own: so azimuths never wrap.
    """
    count, columns, number = len(grid.column), grid.columns, grid.lasers.number
    azimuth, turn = grid.polar[:, 0], 2 * np.pi
    azimuth = azimuth - turn * np.round((azimuth + np.pi) / turn - grid.column / columns)
    place = np.full(count, -1)
    place[rows] = np.arange(len(rows))
    table = np.zeros((2 + count, 9), np.float32)
    table[:2, INSTANCE], table[OUTSIDE, STATE] = -1, -1
    columns_of = (azimuth, number, *grid.polar[:, 1:].T, scan.instance, place)
    for axis, values in enumerate((*columns_of, 1, -1, 0.5)):
        table[2:, axis] = values
    rings = len(grid.lasers.elevation)
    shape = (rings + 2 * RINGS_AROUND, columns + 2 * COLUMNS_AROUND)
    image = np.full(shape, OUTSIDE)
    inside = image[RINGS_AROUND:-RINGS_AROUND]
    inside[:] = NOTHING
    inside[number, grid.column + COLUMNS_AROUND] = np.arange(2, count + 2)
    tables, total = [table], len(table)
    last = columns + COLUMNS_AROUND
    for to, begin, shift in ((0, columns, -turn), (last, COLUMNS_AROUND, turn)):
        rows_there = inside[:, begin : begin + COLUMNS_AROUND].copy()
        there = (rows_there > OUTSIDE) & (rows_there < len(table))
        again = table[rows_there[there]]
        again[:, AZIMUTH] += shift
        rows_there[there] = total + np.arange(len(again))
        inside[:, to : to + COLUMNS_AROUND] = rows_there
        tables.append(again)
        total += len(again)
    return np.concatenate(tables), image


def pack_lattice(
    levels: np.ndarray,
    sizes: np.ndarray,
    border: np.ndarray,
    new: np.ndarray,
    first: np.ndarray,
    keep_measured: bool,
) -> tuple[dict[str, np.ndarray], int]:
    """The rays of a lattice as rows of slots, and how many rows a lowest point has downwards.

    levels (o, 2) columns and rings, border (a, 2) on the sensor's highest ring, on its lowest,
    `first` (o,) the numbers of the objects.
    `blocks` (kinds, S, 9) are the kinds of rows there are. Slots: where a ray goes in columns, how
    much of the way aside to the partner, in rings, in rings up, in rings down, place in the order
    of the choice, tier, factor of the confidence (negative for filler), a share of 1 that spreads
    evenly.
    """
    kinds, level = np.unique(levels, axis=0, return_inverse=True)
    up, down = zip(*(_slots(*kind, keep_measured) for kind in kinds.tolist()), strict=True)
    level = level.reshape(-1)
    usual = np.bincount(np.array([len(x) for x, _ in up])[level], weights=sizes).argmax()
    slots = min(max(int(usual), 1), MOST_SLOTS)
    down_rows = max(-(-len(x) // slots) for x, _ in down)
    blocks, up_kinds, down_kinds = [], [], []
    for across, (x, way), (x_down, way_down) in zip(kinds[:, 0], up, down, strict=True):
        up_kinds.append(len(blocks))
        up_rows = -(-len(x) // slots)
        for unseen in (1.0, LATTICE.unseen):
            blocks += _blocks(x, way, way, slots, up_rows, unseen, with_filler=across == 1)
        down_kinds.append(len(blocks))
        for unseen in (1.0, LATTICE.unseen):
            blocks += _blocks(x_down, 0 * x_down, -way_down, slots, down_rows, unseen)
    cloud = np.repeat(np.arange(len(sizes)), sizes)
    up_rows = np.array([-(-len(x) // slots) for x, _ in up])[level]  # of each object
    per = up_rows[cloud]
    anchors = np.repeat(np.arange(len(cloud)), per)
    row = np.arange(len(anchors)) - np.repeat(np.cumsum(per) - per, per)
    kind = np.array(up_kinds)[level][cloud] + border[:, 0] * per
    down_kind = np.array(down_kinds)[level][cloud] + border[:, 1] * down_rows
    packed = {
        "blocks": np.array(blocks),
        "rows": np.stack((anchors, kind[anchors] + row), axis=1),  # (R, 2) upwards: anchor, kind
        # (a, 2) itself, and the kind of its row downwards
        "down": np.stack((np.arange(len(cloud)), down_kind), axis=1),
        "new": new,  # (o,)
        "begin": np.cumsum(new) - new,  # (o,)
        "first": 8.0 * first - 5.5,  # (o,) below the keys of each object's rays
    }
    return packed, down_rows


def _slots(across: int, rings: int, keep_measured: bool) -> tuple[Slots, Slots]:
    """As `lattice_slots`, and last a ray beside each point, where the lattice has one column: for
    objects with too few likely rays. To ask only where they are missing would be to wait for it."""
    (x, way), down = lattice_slots(across, rings, keep_measured)
    if across == 1:
        x, way = np.append(x, 0.5), np.append(way, 0.0)
    return (x, way), down


def _blocks(
    x, aside, way, slots: int, rows: int, unseen: float, with_filler: bool = False
) -> list[np.ndarray]:
    """Rows of slots (rows, slots, 9), the last filled up with slots that hold no ray;
    `with_filler`: rays along the ring are filler."""
    tier = x > 0
    factor = np.where(way != 0, unseen, np.where(with_filler & tier, -1.0, 1.0))
    even = np.arange(len(x)) / len(x)
    up, down = np.maximum(way, 0), np.maximum(-way, 0)
    filled = np.stack((x, aside, way, up, down, 2.0 * tier, tier, factor, even), axis=1)
    table = np.zeros((rows * slots, 9))
    table[:, ORDER] = NO_RAY
    table[: len(x)] = filled
    return list(table.reshape(rows, slots, 9))
