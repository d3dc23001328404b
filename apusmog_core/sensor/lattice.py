# SPDX-License-Identifier: Apache-2.0
"""The rays of a denser sensor: which are asked, how sure the answers are, which stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..compute import machine_code
from .neighbours import fill
from .view import ObjectGraph

GOLDEN = 0.6180339887498949  # multiples of it fill the unit interval evenly
MOST_RINGS = 1 << 32  # more than a lattice can have


@dataclass(frozen=True)
class LatticeConfig:
    """How rays are chosen; where the values come from: docs/results.md."""

    tolerance: float = 0.1  # metres by which a right answer may be off
    odds: float = 5.0  # times those of the ray alone, where rings are 1 m apart
    likely: float = 0.7  # confidence below which a candidate is a last resort
    unseen: float = 0.01  # factor of the confidence beyond the sensor's highest and lowest ring


LATTICE = LatticeConfig()
Slots = tuple[np.ndarray, np.ndarray]  # columns, part of the way to the next ring


@machine_code
def lattice_shape(step_azimuth, step_elevation, ratio):
    """How many times the pattern gets denser, in columns and in rings; at least `ratio` together.

    Few rays more than needed, and about as far apart across as along.
    """
    best, across, rings = np.inf, 1, 2
    for r in range(2, max(2, int(np.rint(ratio))) + 1):  # 2.1 is a ring midway, a few points more
        a = max(1, int(np.ceil(ratio / r - 1e-9)))
        shape = np.log(step_elevation / r * a / step_azimuth)
        price = np.log(r * a) + 0.5 * abs(shape)
        if price < best:
            best, across, rings = price, a, r
    return across, rings


def lattice_levels(
    ratios: np.ndarray, sizes: np.ndarray, spread: str, column: float, spacing: np.ndarray
) -> np.ndarray:
    """How many times denser in columns and rings (objects, 2) the lattice of each object is.

    `rings`: one denser sensor for the whole scan; `even`: as dense across as along. column and
    spacing (points, 2) are radians between columns, and to the rings above and below each point.
    """
    if spread == "rings":
        rings = max(2, round(float(ratios @ sizes / sizes.sum())))
        columns = np.maximum(1, np.ceil(ratios / rings - 1e-9))
        return np.stack((columns, np.full(len(ratios), rings)), axis=1).astype(np.int64)
    cloud = np.repeat(np.arange(len(sizes)), sizes)
    steps = np.bincount(cloud, spacing[:, 0]) / sizes  # in the mean over each object
    pairs = zip(steps, ratios, strict=True)
    return np.array([lattice_shape(column, s, r) for s, r in pairs])


def lattice_rays(
    graph: ObjectGraph, levels: np.ndarray, keep_measured: bool
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields anchors (a,), rays (a, s, 2) and tiers (a, s): the denser sensor's rays, each once.

    levels (points, 2) are columns and rings of the lattice at each point. A point looks after the
    gap above it, and after the gap below where it is the lowest. Tier 0 is on the way from measured
    points to their partners above (the columns of two rings are seldom the same), tier 1 between
    these columns.
    """
    size = levels[:, 0] * MOST_RINGS + levels[:, 1]
    for across, rings in (divmod(n, MOST_RINGS) for n in np.unique(size).tolist()):
        up, down = lattice_slots(across, rings, keep_measured)
        anchors = np.flatnonzero(size == across * MOST_RINGS + rings)
        yield anchors, *_rays_of(graph.aside[anchors], 1.0, *up)
        lowest = anchors[graph.ends[anchors, 1]]
        if len(lowest):
            straight = np.zeros(len(lowest), np.float32)
            yield lowest, *_rays_of(straight, -1.0, *down)


def lattice_slots(across: int, rings: int, keep_measured: bool) -> tuple[Slots, Slots]:
    """Rays of a point upwards and, of the lowest, downwards: columns (s,), part of the way (s,)."""
    x, y = (a.ravel() for a in np.meshgrid(np.arange(across), np.arange(rings)))
    x, way = x / across, y / rings
    own = 1 if keep_measured else 0  # the ray of the point itself is the first
    return (x[own:], way[own:]), (x[across:], way[across:])


@machine_code
def _rays_of(aside, gap, x, way):
    """Rays (a, s, 2) and tiers (a, s) at x (s,) of a column, part of the `way` (s,) up."""
    rays = np.empty((len(aside), len(x), 2), np.float32)
    tiers = np.empty((len(aside), len(x)), np.int8)
    for i in range(len(aside)):
        for j in range(len(x)):
            rays[i, j, 0] = x[j] + aside[i] * way[j]
            rays[i, j, 1] = gap * way[j]
            tiers[i, j] = x[j] > 0
    return rays, tiers


@machine_code
def rays_along(sizes, missing, across):
    """Anchors (m,) and rays (m, 1, 2) along the rings: missing[i] in all, between the points of
    object i, which has sizes[i] of them; evenly spread, beside its lattice of across[i] columns."""
    anchors = np.empty(missing.sum(), np.int64)
    rays = np.zeros((len(anchors), 1, 2), np.float32)
    begin = end = 0
    for i in range(len(sizes)):
        per = -(-missing[i] // sizes[i])  # rays beside each point, at most
        for n in range(missing[i]):
            place = n * sizes[i] * per // missing[i]
            anchors[end] = begin + place // per
            rays[end, 0, 0] = (place % per + 1) / ((per + 1) * across[i])
            end += 1
        begin += sizes[i]
    return anchors, rays


@machine_code
def ray_confidence(intensity, log_scale, metres, tolerance, odds):
    """How likely a surface is within the tolerance of the answer to a ray.

    The mixture tells whether the ray meets the object at all (a Poisson process has at least one
    return there), the decoder how far off its depth is (Cauchy); metres is the length of a ring
    step. Beside a ray a surface is often nearer than along it, the more so the closer the rings
    are: `odds` says how much, by the true surfaces of simulated streets.
    """
    met = 1 - np.exp(-intensity)
    right = np.arctan(tolerance / (np.exp(log_scale) * metres)) * 2 / np.pi
    along = met * right
    return odds * along / (metres * (1 - along) + odds * along)


@machine_code
def judge_rays(intensity, log_scale, rays, anchors, metres, border, tolerance, odds, unseen):
    """Confidence (A * s,) of the answers (A, s) to rays (A, s, 2) of anchors (A,).

    metres (N,) is the length of a ring step at each point; border (N, 2) says which points lie on
    the sensor's highest and lowest ring, beyond which no ring of a denser sensor looks.
    """
    count, per = intensity.shape
    sure = np.empty(count * per, np.float32)
    for a in range(count):
        i = anchors[a]
        for q in range(per):
            value = ray_confidence(intensity[a, q], log_scale[a, q], metres[i], tolerance, odds)
            beyond = (rays[a, q, 1] > 0 and border[i, 0]) or (rays[a, q, 1] < 0 and border[i, 1])
            sure[a * per + q] = unseen * value if beyond else value
    return sure


@machine_code
def best_of_each(owner, sure, tier, counts, seed, likely):
    """Rows of the candidates that stay, counts[i] of owner i, together in the order of owners.

    Coarse tiers of the lattice come before fine ones, and likely points before unlikely ones. The
    last tier is seldom needed whole: there the choice is arbitrary, so that it stays even.
    """
    starts, order = fill(owner, len(counts))
    chosen, end = np.empty(len(owner), np.int64), 0
    for i in range(len(counts)):
        mine = order[starts[i] : starts[i + 1]]
        place = np.empty(len(mine))
        for rank in range(len(mine)):
            row = mine[rank]
            unsure = not sure[row] >= likely  # nan, too, of weights training has broken
            even = ((rank + seed) * GOLDEN) % 1
            place[rank] = 2 * (tier[row] + 2 * unsure)
            place[rank] += even if tier[row] else 1 - (sure[row] if sure[row] >= 0 else 0)
        count = min(counts[i], len(mine))
        if count == 0:
            continue
        last = np.partition(place, count - 1)[count - 1]
        equal = count - np.sum(place < last)
        for rank in range(len(mine)):
            equal -= place[rank] == last
            if place[rank] < last or (place[rank] == last and equal >= 0):
                chosen[end] = mine[rank]
                end += 1
    return chosen[:end]
