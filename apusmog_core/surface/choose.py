# SPDX-License-Identifier: Apache-2.0
"""Which candidates stay: farthest points in blocks, then one step of relaxation."""

from __future__ import annotations

import numpy as np

from ..geometry import farthest, search

BLOCK = 3072  # candidates that are spread out at once
AREA_NEIGHBOURS = 6  # candidates whose distance tells how much area one of them stands for


# --- choice -----------------------------------------------------------------------


def spread_out(points: np.ndarray, count: int) -> np.ndarray:
    """Indices of `count` points far from each other, in blocks that get their share of them.

    Blocks make it linear in time, and even at large: farthest point sampling of a whole cloud
    serves thin and curved parts less than others, which shifts its mean.
    """
    if len(points) <= BLOCK:
        return farthest(points, count)
    half = len(points) // 2
    order = np.argpartition(points[:, np.ptp(points, axis=0).argmax()], half)
    mine = round(count * half / len(points))
    sides = ((order[:half], mine), (order[half:], count - mine))
    return np.concatenate([side[spread_out(points[side], share)] for side, share in sides])


def farthest_from(points: np.ndarray, others: np.ndarray, count: int) -> np.ndarray:
    """Indices of `count` points far from `others` and from each other."""
    away, _ = search(others, points, 1)
    # Half of the best distance keeps clear of the others, and leaves enough to choose from.
    enough = min(len(points), max(count, len(points) // 2))
    clear = np.argpartition(-away, enough - 1)[:enough]
    return clear[spread_out(points[clear], count)]


def relax(chosen: np.ndarray, candidates: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """Moves each chosen point (m, 3) to the mean of the candidates that are nearest to it.

    That evens out their distances, and what the network does not know for sure. A candidate counts
    for the area it stands for, so that crowds of them do not pull. Points of `fixed` stay.
    """
    k = min(AREA_NEIGHBOURS + 1, len(candidates))
    area = search(candidates, candidates, [k])[0][:, 0] ** 2 + 1e-12
    nearest_one = search(np.concatenate((chosen, fixed)), candidates, 1)[1]
    count = len(chosen) + len(fixed)
    weight = np.bincount(nearest_one, area, minlength=count)[: len(chosen)]
    columns = [np.bincount(nearest_one, area * c, minlength=count) for c in candidates.T]
    total = np.stack(columns, axis=1)[: len(chosen)]
    alone = weight == 0  # duplicates of others
    return np.where(alone[:, None], chosen, total / np.where(alone, 1.0, weight)[:, None])
