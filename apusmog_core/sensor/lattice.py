# SPDX-License-Identifier: Apache-2.0
"""The rays of a denser sensor: which are asked, how sure the answers are, which stay."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..compute import machine_code
from .grid import RayGrid
from .neighbours import fill

# --- the lattice of a denser sensor ---------------------------------------------------------------

LIKELY = 0.2  # confidence below which a candidate is a last resort
DOUBT = 0.01  # factor of the confidence in points that may be far off
MISS = 0.5  # grid steps by which a ray that misses the object is off, typically
FAR_OFF_METRES, FAR_OFF_STEPS = 0.1, 0.35  # together, the expected error that is too much
GOLDEN = 0.6180339887498949  # multiples of it fill the unit interval evenly
DENSITY_POWER = 0.2  # how much the mixture has to say beside the decoder
ALIKE = 1.5  # ratio of ranges at which rings have the same elevations, nearly
SLACK = 0.25  # ring steps by which a ray may look beyond the highest and lowest ring
BESIDE = 1.5  # azimuth steps within which points of two rings are partners
OTHER_RING, NEXT_RING = 0.4, 1.9  # ring steps: more is another ring, more is not the next one
MOST_RINGS = 1 << 32  # more than a lattice can have
DEPTH_TOLERANCE = 0.5  # grid steps of depth by which a right answer may be off


@machine_code
def own_density(x, y, component):
    """ln of K w_i N_i (eq. 2) at a ray, in steps from the point that carries the component.

    component (6,): mean, then the factor's first, low and second entry, then ln(K w_i N_i(mean)).
    """
    u = (x - component[0]) / component[2]
    v = (y - component[1] - component[3] * u) / component[4]
    return component[5] - 0.5 * (u * u + v * v)


@machine_code
def confidence(hit, log_scale, log_density, gap):
    """How likely a ray meets the object at the depth given: decoder and component together.

    Much less where the expected error is large; gap is the length of a grid step in metres.
    """
    met, error = 1 / (1 + np.exp(-hit)), np.exp(min(max(log_scale, -5.0), 4.0))
    close = 1 - np.exp(-DEPTH_TOLERANCE / error)
    sure = met * close * np.exp(DENSITY_POWER * min(log_density, 0.0))
    expected = met * error + (1 - met) * MISS
    return DOUBT * sure if expected > FAR_OFF_STEPS + FAR_OFF_METRES / gap else sure


@machine_code
def judge(coarse, hit, log_scale, rays, anchors, components, gap, cloud, limits):
    """How sure (K * s,) the answers to rays (K, s, 2) of anchors (K,) are; nan where weights are.

    coarse (K * s, 3), hit and log_scale (K * s,) are the answers; components (N, 6), gap and cloud
    (N,) belong to the points; limits (clouds, 2) are the elevations that a sensor sees.
    """
    per = rays.shape[1]
    sure = np.empty(len(coarse), np.float32)
    for k in range(len(anchors)):
        i = anchors[k]
        low, high = limits[cloud[i], 0], limits[cloud[i], 1]
        for q in range(per):
            n = k * per + q
            density = own_density(rays[k, q, 0], rays[k, q, 1], components[i])
            sure[n] = confidence(hit[n], log_scale[n], density, gap[i])
            if coarse[n, 1] < low or coarse[n, 1] > high:
                sure[n] *= DOUBT
    return sure


def seen_elevations(grid: np.ndarray, grids: list[RayGrid], sizes: np.ndarray) -> np.ndarray:
    """Lowest and highest elevation (clouds, 2) that a ray of each cloud can have, in its steps.

    No ring looks beyond those that measured something at about the same range: the rings of some
    sensors do not leave from one point, so that their elevations drift with the range.
    """
    starts = np.cumsum(sizes) - sizes
    step = np.array([g.step_elevation for g in grids])
    low, high = (f.reduceat(grid[:, 1], starts) * step for f in (np.minimum, np.maximum))
    reach = np.add.reduceat(grid[:, 2], starts) / sizes * step  # ln of metres
    alike = np.abs(reach[:, None] - reach) < np.log(ALIKE)
    lowest = np.where(alike, low, np.inf).min(axis=1) / step - SLACK
    highest = np.where(alike, high, -np.inf).max(axis=1) / step + SLACK
    return np.stack((lowest, highest), axis=1)


@machine_code
def ring_gaps(grid: np.ndarray, near: np.ndarray) -> np.ndarray:
    """Steps (n, 3) from each point to its partner on the ring above, across and up, and down to
    the ring below; up and down are nan where there is no ring, and then across is zero."""
    gaps = np.empty((len(grid), 3), np.float32)
    for i in range(len(grid)):
        up = down = np.inf
        for j in near[i]:
            rise = grid[j, 1] - grid[i, 1]
            if abs(grid[j, 0] - grid[i, 0]) < BESIDE and abs(rise) > OTHER_RING:
                up, down = (min(up, rise), down) if rise > 0 else (up, min(down, -rise))
        aside = np.inf
        for j in near[i]:
            across, rise = grid[j, 0] - grid[i, 0], grid[j, 1] - grid[i, 1]
            above = rise > OTHER_RING and rise < up + OTHER_RING
            if above and abs(across) < min(BESIDE, abs(aside)):
                aside = across
        gaps[i, 0] = aside if up < NEXT_RING else 0.0
        gaps[i, 1] = up if up < NEXT_RING else np.nan
        gaps[i, 2] = down if down < NEXT_RING else np.nan
    return gaps


@machine_code
def lattice(step_azimuth, step_elevation, ratio):
    """How many times the pattern gets denser, in azimuth and in rings; at least `ratio` together.

    Few rays more than needed, and about as far apart in azimuth as in elevation.
    """
    best, across, rings = np.inf, 1, 2
    for r in range(2, max(2, int(np.rint(ratio))) + 1):  # 2.1 is a ring midway, a few points more
        a = max(1, int(np.ceil(ratio / r - 1e-9)))
        shape = np.log(step_elevation / r * a / step_azimuth)
        price = np.log(r * a) + 0.5 * abs(shape)
        if price < best:
            best, across, rings = price, a, r
    return across, rings


def lattice_rays(
    gaps: np.ndarray, levels: np.ndarray, keep_measured: bool
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields anchors (a,), rays (a, s, 2) and tiers (a, s): the denser sensor's rays, each once.

    A point looks after the gap above it, and after the gap below where it is the lowest. Tier 0 is
    on the way from measured points to their partners above (the columns of two rings are seldom
    the same), tier 1 between these columns.
    """
    own = 1 if keep_measured else 0  # the ray of the point itself is the first
    above = np.nan_to_num(gaps[:, 1], nan=1.0)
    no_ring_below = np.isnan(gaps[:, 2])
    size = levels[:, 0] * MOST_RINGS + levels[:, 1]
    for across, rings in (divmod(n, MOST_RINGS) for n in np.unique(size).tolist()):
        x, y = (a.ravel() for a in np.meshgrid(np.arange(across), np.arange(rings)))
        x, way = x / across, y / rings
        # last, beside the points themselves: for lattices of one column, where the rest is unlikely
        beside = [0.5] if across == 1 else []
        anchors = np.flatnonzero(size == across * MOST_RINGS + rings)
        upward = (np.append(x[own:], beside), np.append(way[own:], np.zeros(len(beside))))
        yield anchors, *_rays_of(gaps[anchors, 0], above[anchors], *upward)
        lowest = anchors[no_ring_below[anchors]]
        if len(lowest):
            straight, down = np.zeros(len(lowest)), np.full(len(lowest), -1.0)
            yield lowest, *_rays_of(straight, down, x[across:], way[across:])


@machine_code
def _rays_of(aside, gap, x, way):
    """Rays (a, s, 2) and tiers (a, s) at x (s,) of an azimuth step, part of the `way` (s,) up."""
    rays = np.empty((len(aside), len(x), 2), np.float32)
    tiers = np.empty((len(aside), len(x)), np.int8)
    for i in range(len(aside)):
        for j in range(len(x)):
            rays[i, j, 0] = x[j] + aside[i] * way[j]
            rays[i, j, 1] = gap[i] * way[j]
            tiers[i, j] = x[j] > 0
    return rays, tiers


@machine_code
def best_of_each(owner, sure, tier, counts, seed):
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
            unsure = not sure[row] >= LIKELY  # nan, too, of weights that training has broken
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
