# SPDX-License-Identifier: Apache-2.0
"""Which candidates stay: farthest points in blocks, relaxed; what strays is pulled back before, and
what lies right beside a measured point is put onto it after; even spacing after noise."""

from __future__ import annotations

import numpy as np
from scipy.spatial import cKDTree

from ..compute import in_chunks
from ..geometry import farthest, principal_axes, search, typical_spacing

BLOCK = 3072  # candidates that are spread out at once
AREA_NEIGHBOURS = 6  # candidates whose distance tells how much area one of them stands for
REACH = 0.45  # of the distance between measured points that a candidate may be away from them ...
EVEN = 0.5  # ... in an even cloud; in a less even one (see `reach_of`) more, at most twice as far
BESIDE = 0.5  # of the distance between outputs within which one gives way to a measured point
PUSH_STEPS = 12  # of points away from each other
PUSH_NEIGHBOURS = 12
PUSH_REACH = 1.5  # spacings: points farther away do not push
PUSH_STEP = 0.4  # spacings, from a neighbour in the same place
BORDER = 0.25  # a point whose neighbours lie to one side by more than this is held back


# --- choice -----------------------------------------------------------------------


def pull_back_strays(candidates: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Candidates (m, 3), those that bridge gaps or leave borders pulled back into the reach of the
    nearest measured point (n, 3)."""
    away, index = search(measured, candidates, 1)
    share = np.minimum(1, reach_of(measured)[index] / np.maximum(away, 1e-12))[:, None]
    home = measured[index]
    return home + share.astype(home.dtype) * (candidates - home)


def reach_of(measured: np.ndarray) -> np.ndarray:
    """How far (n,) from each measured point (n, 3) a candidate may be; copies do not count.

    Gaps on the surface are wider where points lie as chance has it, so that distances to the
    neighbours of one point differ much, than in an even cloud.
    """
    distinct, of = np.unique(measured, axis=0, return_inverse=True)
    if len(distinct) < 2:
        return np.full(len(measured), np.inf)  # nothing tells how far apart points are
    k = range(2, min(AREA_NEIGHBOURS + 1, len(distinct)) + 1)
    near = search(distinct, distinct, k)[0]  # without itself
    spacing = near.mean(axis=1)
    uneven = (np.ptp(near, axis=1) / spacing).mean()
    return ((REACH + np.clip(uneven - EVEN, 0, REACH)) * spacing)[of.ravel()]


def settle_on_measured(points: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Points (m, 3), those right beside a measured one (n, 3) put onto it: it is on the surface."""
    if len(points) < 2:
        return points
    away, beside = search(points, measured, 1)
    back = search(measured, points, 1)[1]
    close = away < BESIDE * np.median(search(points, points, [2])[0])
    close &= back[beside] == np.arange(len(measured))
    settled = points.copy()
    settled[beside[close]] = measured[close]
    return settled


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


def push_apart(points: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """Points (m, 3) pushed away from each other and from `fixed` (f, 3), along their surface;
    those at its border stay."""
    spacing = typical_spacing(np.concatenate((points, fixed)))
    for _ in range(PUSH_STEPS):
        tree = cKDTree(np.concatenate((points, fixed)))
        points = points + in_chunks(
            lambda at, tree=tree: _push(tree, at, spacing), points, "spacing evenly"
        )
    return points


def _push(tree: cKDTree, at: np.ndarray, spacing: float) -> np.ndarray:
    """How far the other points of a tree push those at (n, 3)."""
    distance, index = tree.query(at, k=range(2, min(PUSH_NEIGHBOURS, tree.n - 1) + 2))
    away = (tree.data[index] - at[:, None]) / spacing  # (n, k, 3)
    distance = distance / spacing + 1e-9
    force = np.maximum(1 - distance / PUSH_REACH, 0) ** 2 / distance
    push = -PUSH_STEP * (force[:, None] @ away)[:, 0]
    normal = principal_axes(away, np.ones_like(distance))[..., 0]
    push -= (push * normal).sum(axis=1, keepdims=True) * normal
    one_sided = np.linalg.norm(away.mean(axis=1), axis=1) / distance.mean(axis=1)
    return spacing * push * (2 - one_sided / BORDER).clip(0, 1)[:, None]
