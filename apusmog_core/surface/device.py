# SPDX-License-Identifier: Apache-2.0
"""The surface path for GPUs: neighbours, candidates and their choice without leaving the device.

Clouds of any sizes go there together, one after the other, as points with a fourth coordinate that
keeps clouds far apart: nearest points are then always of the same cloud. What `grow.py` and
`choose.py` do with trees and fpsample is done here by all distances, as many at a time as fit into
free memory. On the CPU stay denoising and what becomes the measured point beside it. In shapes: C
clouds, N points, M candidates, m new points.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from ..dense import Dense
from ..geometry import nearest_on_device, pairs_that_fit
from ..segment.cluster import rows_by_label
from ..sensor.device import parts_that_fit
from ..sensor.packed import send
from ..sensor.view import ObjectScan
from .choose import AREA_NEIGHBOURS, push_apart, reach_of, settle_on_measured
from .denoise import find_noise
from .grow import (
    LEAST_CANDIDATES,
    NOISY_OVERSAMPLE,
    OVERSAMPLE,
    SurfaceUpsampler,
    even_noise,
    even_shares,
    shifts,
)

MOST_CANDIDATES = 1 << 17  # at once; for a cloud with more, trees are quicker than all distances
APART = 1e8  # between two clouds, in about the distance of their points
PICKS = 32  # farthest points of a block, about, one after the other; all blocks at once


class DeviceSurface(SurfaceUpsampler):
    """`SurfaceUpsampler` for networks with local attention; the paper's goes its way."""

    @torch.inference_mode()
    def grow(
        self, scan: ObjectScan, new: np.ndarray, keep_measured: bool, seed: int = 0, *_
    ) -> Dense:
        """new[i] points on the surface of object i + 1, one object after the other."""
        rows = rows_by_label(scan.instance)[1:]
        groups, parts = defaultdict(list), [None] * len(rows)
        for i, mine in enumerate(rows):
            cloud = scan.points[mine].astype(np.float64, copy=False)
            if not self._local or _candidates(len(mine), new[i], True) > MOST_CANDIDATES:
                made = self.grow_cloud(cloud, int(new[i]), keep_measured, seed)
                parts[i] = (made, self.nearest_measured(cloud, made))
            else:
                one = CentredCloud(cloud, self.denoise)
                each = _candidates(len(mine), new[i], bool(one.noisy)) // len(mine)
                groups[each].append((i, one))
        for each, members in groups.items():
            which, clouds = zip(*members, strict=True)
            sizes = np.array([each * len(one.measured) for one in clouds])
            for part in parts_that_fit(sizes, MOST_CANDIDATES):
                counts = new[list(which[part])]
                grown = self._grow_together(clouds[part], counts, each, keep_measured, seed)
                for i, made in zip(which[part], grown, strict=True):
                    parts[i] = made
        return Dense.concatenate(
            [
                Dense.new(points, np.ones(len(points), np.float32), mine[source])
                for (points, source), mine in zip(parts, rows, strict=True)
            ]
        )

    @property
    def _local(self) -> bool:
        """Whether the network sees nothing of a cloud but neighbourhoods, each with a component."""
        config = self.config
        whole = self.plain or config.attention == "global" or config.learned_weights
        return not whole and config.component_share == 1

    def _grow_together(self, clouds, new: np.ndarray, each: int, keep_measured: bool, seed: int):
        """New points (new[c], 3) of each cloud, and which measured points are nearest to them."""
        sizes = np.array([len(one.measured) for one in clouds])
        plan = Choice(sizes * (each + (not keep_measured)), new, keep_measured)
        packed = {
            "local": _set_apart([one.denoised for one in clouds]),  # (N, 4)
            "raw": _set_apart([one.measured for one in clouds]),  # (N, 4)
            "reach": np.concatenate(
                [reach_of(one.denoised) / unit_of(one.denoised) for one in clouds]
            ),
            "shift": np.concatenate([shifts(len(one.measured), seed) for one in clouds]),
            "shares": even_shares(each),
        }
        sent = send(packed | plan.packed, self.device)
        local, raw = sent["local"], sent["raw"]
        found = self._candidates_of(sent, sizes, each)  # (N, each, 4)
        found = pull_back_strays(found, local, sent["reach"], sizes)
        if not keep_measured:
            found = torch.cat((local[:, None], found), dim=1)
        found = found.flatten(0, 1)  # (M, 4)
        away = None
        if keep_measured:
            away = nearest_of_each(raw, sizes, found, plan.sizes, 1)[0][:, 0]
        chosen = found[plan.choose(found, away, sent)]
        made = relax(chosen, new, found, plan.sizes, away)
        source = nearest_of_each(raw, sizes, made, new, 1)[1]
        whole = torch.cat((made[:, :3], source.to(made.dtype)), dim=1).cpu().numpy()
        firsts = np.cumsum(sizes) - sizes
        parts = zip(clouds, np.split(whole, np.cumsum(new)[:-1]), firsts, strict=True)
        return [one.settled(part, first, keep_measured) for one, part, first in parts]

    def _candidates_of(self, sent: dict[str, Tensor], sizes: np.ndarray, each: int) -> Tensor:
        """Outputs (N, each, 4) of the network for the points (N, 4) of clouds."""
        local, network = sent["local"], self.network
        level = local[:, None, 3:].expand(-1, each, 1)
        chunk = self._chunk(each)

        def around(fine: Tensor, k: int) -> Tensor:
            fine = torch.cat((fine[0], level.reshape(-1, 1)), dim=1)
            return nearest_of_each(fine, each * sizes, fine, each * sizes, k)[1][None]

        near = nearest_of_each(local, sizes, local, sizes, self.config.neighbours)[1]
        encoded = network.encode(local[None, :, :3], near[None], chunk=2 * chunk)
        noise = even_noise(sent["shares"], sent["shift"]).flatten(0, 1)
        samples = network.sample(network.mixture(encoded), noise[None])
        fine = network.decode(encoded, samples, chunk=chunk, search=around).fine.float()
        return torch.cat((fine[0].unflatten(0, (-1, each)), level), dim=2)


class CentredCloud:
    """A cloud about its middle, in an order of points that lie close to each other, denoised where
    it is noisy."""

    def __init__(self, cloud: np.ndarray, denoise: bool):
        self.centre = cloud.mean(axis=0)
        self.order = cKDTree(cloud).indices
        self.measured = (cloud - self.centre)[self.order]
        self.noisy = find_noise(self.measured) if denoise else None
        self.denoised = self.noisy.project(self.measured) if self.noisy else self.measured

    def settled(self, made: np.ndarray, first: int, keep_measured: bool):
        """New points (m, 3) where the cloud is, denoised as well, and the rows of their sources;
        made (m, 4) are new points and sources, counted from a first one."""
        source = self.order[made[:, 3].astype(np.int64) - first]
        made = made[:, :3].astype(np.float64) * unit_of(self.measured)
        if self.noisy:
            fixed = self.measured[: len(self.measured) * keep_measured].astype(np.float32)
            made = self.noisy.project(push_apart(made.astype(np.float32), fixed))
        elif not keep_measured:
            made = settle_on_measured(made, self.measured)
        return made + self.centre, source


def unit_of(cloud: np.ndarray) -> float:
    """About the distance of the points of a surface (n, 3) about its middle."""
    return math.sqrt(np.square(cloud).sum() / len(cloud) ** 2) or 1.0


def _set_apart(clouds: list[np.ndarray]) -> np.ndarray:
    """Points (N, 4) of clouds about their middles, in units of their own."""
    tables = [
        np.insert(cloud / unit_of(cloud), 3, number * APART, axis=1)
        for number, cloud in enumerate(clouds)
    ]
    return np.concatenate(tables).astype(np.float32)


def _candidates(size: int, new: int, noisy: bool) -> int:
    """Candidates for `new` points of a cloud: as many for each of its points."""
    more = NOISY_OVERSAMPLE if noisy else OVERSAMPLE
    return size * max(LEAST_CANDIDATES, math.ceil(more * new / size))


# --- neighbours -----------------------------------------------------------------------------------


def nearest_of_each(
    points: Tensor, sizes: np.ndarray, queries: Tensor, counts: np.ndarray, k: int
) -> tuple[Tensor, Tensor]:
    """Distances and indices (q, k) of the points (p, 4) nearest to queries (q, 4), sizes[c] and
    counts[c] of which are of cloud c; points repeat where a cloud has fewer than k."""
    first, begin = (np.concatenate(([0], np.cumsum(n))) for n in (sizes, counts))
    parts = []
    for run in _runs(sizes, counts, pairs_that_fit(points.device)):
        low, high = first[run.start], first[run.stop]
        asked = queries[begin[run.start] : begin[run.stop]]
        away, index = nearest_on_device(points[None, low:high], asked[None], min(k, high - low))
        parts.append(_repeated(away[0], index[0] + int(low), k, sizes[run].min()))
    if len(parts) == 1:
        return parts[0]
    away, index = zip(*parts, strict=True)
    return torch.cat(away), torch.cat(index)


def _runs(sizes: np.ndarray, counts: np.ndarray, room: int) -> list[slice]:
    """Runs of clouds with at most `room` pairs of points and queries each, or of one cloud."""
    edges, points, queries = [0], 0, 0
    for i, (size, count) in enumerate(zip(sizes.tolist(), counts.tolist(), strict=True)):
        if points and (points + size) * (queries + count) > room:
            edges.append(i)
            points = queries = 0
        points, queries = points + size, queries + count
    return [slice(a, b) for a, b in zip(edges, [*edges[1:], len(sizes)], strict=True)]


def _repeated(away: Tensor, index: Tensor, k: int, least: int) -> tuple[Tensor, Tensor]:
    """Neighbours (q, ...) as (q, k): those of the same cloud, again and again if they are few."""
    if least >= k:
        return away, index
    mine = (away < APART / 2).sum(1, keepdim=True)
    column = torch.arange(k, device=away.device) % mine
    return away.gather(1, column), index.gather(1, column)


# --- choice ---------------------------------------------------------------------------------------


def pull_back_strays(found: Tensor, local: Tensor, reach: Tensor, sizes: np.ndarray) -> Tensor:
    """Candidates (N, each, 4) of points (N, 4) with their reach (N,): `choose.pull_back_strays`."""
    counts = found.shape[1] * sizes
    away, index = nearest_of_each(local, sizes, found.flatten(0, 1), counts, 1)
    share = (reach[index] / away.clamp_min(1e-12)).clamp(max=1).view(*found.shape[:2], 1)
    return torch.lerp(local[index[:, 0]].view_as(found), found, share)


class Choice:
    """Which of sizes[c] candidates stay, new[c] of cloud c: those far from each other, the same
    share of each block of candidates that lie close to each other."""

    def __init__(self, sizes: np.ndarray, new: np.ndarray, clear: bool):
        """`clear`: of the half that is farthest away from measured points."""
        self.sizes, self.clear = sizes, clear
        taken = np.minimum(sizes, np.maximum(new, sizes // 2)) if clear else sizes
        ends, begin = [], 0
        for size, count in zip(taken.tolist(), new.tolist(), strict=True):
            blocks = 1 << max(0, round(math.log2(max(count, 1) / PICKS)))  # as the tree halves
            edges = size * np.arange(blocks + 1) // blocks
            shares = np.diff(edges * count // size)  # never more than the block has
            ends.append(np.stack((begin + edges[:-1], begin + edges[1:], shares), axis=1))
            begin += size
        start, stop, shares = np.concatenate(ends).T  # (B,) blocks of all clouds
        self.size, self.steps = int((stop - start).max()), int(shares.max())
        picked = np.flatnonzero(np.arange(self.steps) < shares[:, None])
        self.packed = {"start": start, "stop": stop, "picked": picked}
        if clear:
            firsts = np.repeat(np.cumsum(sizes) - sizes - np.cumsum(taken) + taken, taken)
            self.packed["clear"] = firsts + np.arange(len(firsts))

    def choose(self, found: Tensor, away: Tensor | None, sent: dict[str, Tensor]) -> Tensor:
        """Indices (m,) of candidates (M, 4), away (M,) from measured points."""
        if not self.clear:
            return self._spread_out(found, sent)
        order = (found[:, 3].double() - away).sort().indices  # cloud by cloud
        clear = order[sent["clear"]].sort().values  # close to each other again
        return clear[self._spread_out(found[clear], sent)]

    def _spread_out(self, points: Tensor, sent: dict[str, Tensor]) -> Tensor:
        """Farthest points of all blocks at once: each step takes one of each block, and tells all
        others."""
        place = sent["start"][:, None] + torch.arange(self.size, device=points.device)
        real = place < sent["stop"][:, None]
        place = place.clamp(max=len(points) - 1)  # (B, size)
        cloud = points[place]  # (B, size, 4)
        away, found = torch.where(real, math.inf, -1.0), []
        for _ in range(self.steps):
            last = away.argmax(1, keepdim=True)  # (B, 1)
            here = cloud.gather(1, last[..., None].expand(-1, -1, 4))  # (B, 1, 4)
            near = nearest_on_device(here[None, :, 0], cloud.flatten(0, 1)[None], 1)[0]
            away = torch.minimum(away, near.view_as(away)).scatter(1, last, -1.0)
            found.append(last)
        return place.gather(1, torch.cat(found, dim=1)).flatten()[sent["picked"]]


def relax(
    chosen: Tensor, new: np.ndarray, found: Tensor, sizes: np.ndarray, away: Tensor | None
) -> Tensor:
    """Moves chosen points (m, 4) to the mean of candidates (M, 4) near them: see `choose.relax`.

    Candidates that are nearer to measured points, `away` (M,) from them, do not count.
    """
    area = nearest_of_each(found, sizes, found, sizes, AREA_NEIGHBOURS + 1)[0][:, -1:]
    area = area.square() + 1e-12
    near, index = nearest_of_each(chosen, new, found, sizes, 1)
    if away is not None:
        area = area * (near <= away[:, None])
    weighed = torch.cat((found[:, :3] * area, area), dim=1)
    total = chosen.new_zeros(len(chosen), 4).index_add(0, index[:, 0], weighed)
    place, weight = total.split((3, 1), dim=1)
    moved = torch.where(weight == 0, chosen[:, :3], place / weight.clamp_min(1e-30))
    return torch.cat((moved, chosen[:, 3:]), dim=1)
