# SPDX-License-Identifier: Apache-2.0
"""Upright boxes around instances, turned to the smallest ground area."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# a rectangle looks the same after 90 degrees
ANGLES = np.radians(np.arange(0, 90, 5)).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Boxes:
    """k boxes; a box's sides are along its own x, y and the vertical."""

    instance: np.ndarray  # (k,) ids
    centre: np.ndarray  # (k, 3)
    size: np.ndarray  # (k, 3)
    yaw: np.ndarray  # (k,) radians, of the longer side


def oriented_boxes(points: np.ndarray, instance: np.ndarray) -> Boxes:
    """The box of each instance id, from points (n, 3) and their ids (n,)."""
    order = np.argsort(instance, kind="stable")
    ids, starts = np.unique(instance[order], return_index=True)
    if len(ids) == 0:
        empty = np.zeros((0, 3))
        return Boxes(ids, empty, empty, np.zeros(0))
    sorted_points = points[order]
    turn = np.stack([np.cos(ANGLES), np.sin(ANGLES)])  # (2, a)
    sides = sorted_points[:, :2] @ np.concatenate([turn, [-turn[1], turn[0]]], axis=1)  # (n, 2a)
    low, high = np.minimum.reduceat(sides, starts), np.maximum.reduceat(sides, starts)  # (k, 2a)
    extent, middle = high - low, (high + low) / 2
    count = len(ANGLES)
    best = np.argmin(extent[:, :count] * extent[:, count:], axis=1)  # (k,)
    row = np.arange(len(ids))
    u, v = middle[row, best], middle[row, best + count]
    length, width = extent[row, best], extent[row, best + count]
    c, s = np.cos(ANGLES[best]), np.sin(ANGLES[best])
    z = sorted_points[:, 2]
    bottom, top = np.minimum.reduceat(z, starts), np.maximum.reduceat(z, starts)
    centre = np.stack([u * c - v * s, u * s + v * c, (bottom + top) / 2], axis=1)
    longer = length >= width
    size = np.stack([np.maximum(length, width), np.minimum(length, width), top - bottom], axis=1)
    return Boxes(ids, centre, size, np.where(longer, ANGLES[best], ANGLES[best] + np.pi / 2))
