# SPDX-License-Identifier: Apache-2.0
"""A cloud as its sensor sees it: coordinates in steps of the sensor's pattern, and new rays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .cells import fill, nearest_rays
from .jit import machine_code

# --- coordinates ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RayGrid:
    """Log-polar coordinates about the sensor, in steps of its own pattern.

    (azimuth / step_azimuth, elevation / step_elevation, ln(range) / step_elevation): neighbouring
    rays are one apart, and a surface looks the same at any range.
    """

    origin: np.ndarray
    step_azimuth: float  # radians between points of one ring
    step_elevation: float  # radians between rings
    forward: float  # azimuth that becomes zero, so that no object straddles the wrap

    def to_grid(self, points: np.ndarray) -> np.ndarray:
        """Cartesian (n, 3) -> grid coordinates (n, 3)."""
        azimuth, elevation, reach = polar(points, self.origin)
        azimuth = wrap(azimuth - self.forward)
        steps = (self.step_azimuth, self.step_elevation, self.step_elevation)
        return np.stack((azimuth, elevation, np.log(reach)), axis=1) / np.asarray(steps)

    def to_points(self, grid: np.ndarray) -> np.ndarray:
        """Grid coordinates (n, 3) -> Cartesian (n, 3)."""
        return to_points([self], grid, np.array([len(grid)]), np.zeros((1, 3)))


def to_points(
    grids: Sequence[RayGrid], coordinates: np.ndarray, sizes: np.ndarray, centres: np.ndarray
) -> np.ndarray:
    """Coordinates (n, 3), sizes[i] of grid i from its centre (clouds, 3) -> Cartesian (n, 3)."""
    values = np.array([(g.step_azimuth, g.step_elevation, g.forward, *g.origin) for g in grids])
    return _to_points(values.reshape(-1, 6), coordinates, np.asarray(sizes), centres)


@machine_code
def _to_points(values, coordinates, sizes, centres):
    points = np.empty((len(coordinates), 3))
    end = 0
    for grid, size in enumerate(sizes):
        along, up, forward, x, y, z = values[grid]
        start, end = end, end + size
        for i in range(start, end):
            azimuth = (coordinates[i, 0] + centres[grid, 0]) * along + forward
            elevation = (coordinates[i, 1] + centres[grid, 1]) * up
            reach = np.exp((coordinates[i, 2] + centres[grid, 2]) * up)
            level = reach * np.cos(elevation)
            points[i, 0] = x + level * np.cos(azimuth)
            points[i, 1] = y + level * np.sin(azimuth)
            points[i, 2] = z + reach * np.sin(elevation)
    return points


def wrap(angle: np.ndarray) -> np.ndarray:
    """Angles into [-pi, pi)."""
    return (angle + np.pi) % (2 * np.pi) - np.pi


def polar(points: np.ndarray, origin: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Azimuth, elevation and range of points (n, 3) as seen from the origin."""
    ray = np.asarray(points, np.float64) - origin
    reach = np.maximum(np.linalg.norm(ray, axis=1), 1e-3)
    return np.arctan2(ray[:, 1], ray[:, 0]), np.arcsin(np.clip(ray[:, 2] / reach, -1, 1)), reach


RING_JITTER = np.radians(0.1)  # points closer than this in elevation are on one ring
DEFAULT_STEPS = (np.radians(0.17), np.radians(0.42))  # an HDL-64E at 10 Hz
WITNESSES, WITNESS_SEES = 24, 24  # points of each cloud that are asked for their neighbours
WITNESS_CELL = np.radians(0.3)  # about the distance of these
SAME_RAY = 1e-5  # radians


def scan_grids(clouds: Sequence[np.ndarray], origin) -> tuple[list[RayGrid], np.ndarray]:
    """The sensor's grid as each cloud shows it, and all points (n, 3) in grid steps.

    A cloud that does not show its steps (a single ring, a handful of points) takes the median of
    the others.
    """
    origin = np.asarray(origin, np.float64)
    sizes = np.array([len(c) for c in clouds])
    cloud = np.repeat(np.arange(len(sizes)), sizes)
    azimuth, elevation, reach = polar(np.concatenate(clouds), origin)
    starts = np.cumsum(sizes) - sizes
    forward = np.arctan2(
        np.add.reduceat(np.sin(azimuth), starts), np.add.reduceat(np.cos(azimuth), starts)
    )
    azimuth = wrap(azimuth - forward[cloud])
    steps = _measure_steps(azimuth, elevation, sizes)
    for column, fallback in zip(steps.T, DEFAULT_STEPS, strict=True):
        known = column[np.isfinite(column)]
        column[~np.isfinite(column)] = np.median(known) if len(known) else fallback
    steps[:, 1] = steps.max(axis=1)  # rings are never closer than the points of one
    unit = np.stack((steps[cloud, 0], steps[cloud, 1], steps[cloud, 1]), axis=1)
    grid = np.stack((azimuth, elevation, np.log(reach)), axis=1) / unit
    grids = [RayGrid(origin, *s, f) for s, f in zip(steps.tolist(), forward.tolist(), strict=True)]
    return grids, grid


def ray_grid(points: np.ndarray, origin) -> RayGrid:
    """The grid that the points of one cloud show."""
    return scan_grids([points], origin)[0][0]


def _measure_steps(azimuth: np.ndarray, elevation: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Typical steps (clouds, 2) along a ring and between rings, radians; nan: cannot be seen."""
    starts = np.cumsum(sizes) - sizes
    spread = (np.arange(WITNESSES) + 0.5) / WITNESSES
    asked = starts[:, None] + np.minimum(spread * sizes[:, None], sizes[:, None] - 1).astype(int)
    asked = asked.ravel()
    rays = np.stack((azimuth, elevation), axis=1)
    witnesses = np.full(len(sizes), WITNESSES)
    index = nearest_rays(rays / WITNESS_CELL, sizes, asked, witnesses, WITNESS_SEES)
    return _median_of_finite(_least_steps(rays, asked, index).reshape(-1, WITNESSES, 2))


@machine_code
def _least_steps(rays, asked, index):
    """Least steps (m, 2) along a ring and to another among the neighbours (m, k) of rays asked."""
    steps = np.full((len(asked), 2), np.inf)
    for i in range(len(asked)):
        for j in index[i]:
            across = abs(rays[j, 0] - rays[asked[i], 0])
            up = abs(rays[j, 1] - rays[asked[i], 1])
            if up >= RING_JITTER:
                steps[i, 1] = min(steps[i, 1], up)
            elif across > SAME_RAY:
                steps[i, 0] = min(steps[i, 0], across)
    return steps


def _median_of_finite(values: np.ndarray) -> np.ndarray:
    """Median (n, c) over the second axis of values (n, m, c) that are not infinite; or nan."""
    count = np.isfinite(values).sum(axis=1, keepdims=True)
    middle = [np.maximum(count - 1, 0) // 2, np.minimum(count // 2, values.shape[1] - 1)]
    values = np.sort(values, axis=1)  # infinite ones last
    low, high = (np.take_along_axis(values, m, axis=1)[:, 0] for m in middle)
    return np.where(count[:, 0] > 0, (low + high) / 2, np.nan)


def ray_neighbours(grid: np.ndarray, sizes: np.ndarray, k: int) -> np.ndarray:
    """Nearest rays (n, k) of the same cloud, whatever their depth, itself first."""
    rays, sizes = np.ascontiguousarray(grid[:, :2], np.float64), np.asarray(sizes)
    return nearest_rays(rays, sizes, np.arange(len(rays)), sizes, k)


def grid_context(grids: list[RayGrid], coordinates: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """What a network is told of the scale (n, 2): ln(metres between rings), ln(step ratio).

    coordinates (n, 3) are those of all grids, sizes[i] of grid i.
    """
    up = np.repeat([g.step_elevation for g in grids], sizes)
    along = np.repeat([g.step_azimuth for g in grids], sizes)
    gap = coordinates[:, 2] * up + np.log(up)
    return np.stack((gap, np.log(up / along)), axis=1).astype(np.float32)


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
    gaps: np.ndarray, levels: np.ndarray, keep_input: bool
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields anchors (a,), rays (a, s, 2) and tiers (a, s): the denser sensor's rays, each once.

    A point looks after the gap above it, and after the gap below where it is the lowest. Tier 0 is
    on the way from measured points to their partners above (the columns of two rings are seldom
    the same), tier 1 between these columns.
    """
    own = 1 if keep_input else 0  # the ray of the point itself is the first
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
