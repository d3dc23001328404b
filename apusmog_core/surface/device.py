# SPDX-License-Identifier: Apache-2.0
"""The surface path for GPUs: neighbours, candidates and their choice without leaving the device.

Clouds of the same size go together. What `grow.py` and `choose.py` do with trees and fpsample is
done here by all distances, in chunks that fit into free memory. Denoising stays on the CPU.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from ..dense import Dense
from ..geometry import nearest_on_device
from ..model.attention import gather
from ..segment.cluster import rows_by_label
from ..sensor.view import ObjectScan
from .choose import AREA_NEIGHBOURS, BLOCK, push_apart
from .denoise import find_noise
from .grow import NOISY_OVERSAMPLE, OVERSAMPLE, SurfaceUpsampler

MOST_CANDIDATES = 1 << 17  # of a cloud; for more, trees are quicker than all distances


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
            if self.plain or self.config.attention == "global" or _large(len(mine), new[i]):
                made = self.grow_cloud(cloud, int(new[i]), keep_measured, seed)
                parts[i] = (made, self.nearest_measured(cloud, made))
            else:
                one = CentredCloud(cloud, self.denoise)
                groups[len(mine), int(new[i]), bool(one.noisy)].append((i, one))
        for (_, count, noisy), members in groups.items():
            which, clouds = zip(*members, strict=True)
            grown = self._grow_together(clouds, count, noisy, keep_measured, seed)
            for i, points, source in zip(which, *grown, strict=True):
                parts[i] = (points, source)
        return Dense.concatenate(
            [
                Dense.new(points, np.ones(len(points), np.float32), mine[source])
                for (points, source), mine in zip(parts, rows, strict=True)
            ]
        )

    def _grow_together(self, clouds: list[CentredCloud], new: int, noisy, keep_measured, seed):
        """New points (new, 3) of each of several clouds (n, 3), and the measured points nearest."""
        both = np.stack([(one.denoised, one.measured) for one in clouds]).astype(np.float32)
        local, raw = torch.from_numpy(both).to(self.device).unbind(1)  # (B, n, 3)
        more = NOISY_OVERSAMPLE if noisy else OVERSAMPLE
        found = self.candidates(local, new / local.shape[1], more, seed)
        fixed = raw if keep_measured else raw[:, :0]
        if not keep_measured:
            found = torch.cat((local, found), dim=1)
        made = relax(gather(found, farthest_from(found, fixed, new)), found, fixed)
        source = nearest_on_device(raw, made, 1)[1]
        whole = torch.cat((made, source.to(made.dtype)), dim=2).cpu().numpy()
        points = [one.settled(m, keep_measured) for one, m in zip(clouds, whole, strict=True)]
        return points, whole[..., 3].astype(np.int64)


class CentredCloud:
    """A cloud about its middle, denoised where it is noisy."""

    def __init__(self, cloud: np.ndarray, denoise: bool):
        self.centre = cloud.mean(axis=0)
        self.measured = cloud - self.centre
        self.noisy = find_noise(self.measured) if denoise else None
        self.denoised = self.noisy.project(self.measured) if self.noisy else self.measured

    def settled(self, made: np.ndarray, keep_measured: bool) -> np.ndarray:
        """New points (m, 3) where the cloud is, denoised as well."""
        made = made[:, :3]
        if self.noisy:
            fixed = self.measured[: len(self.measured) * keep_measured].astype(np.float32)
            made = self.noisy.project(push_apart(made, fixed))
        return made + self.centre


def _large(size: int, count: int) -> bool:
    return size + NOISY_OVERSAMPLE * count > MOST_CANDIDATES


def farthest_from(points: Tensor, others: Tensor, count: int) -> Tensor:
    """Indices (B, count) of points (B, M, 3) far from `others` (B, n, 3) and from each other."""
    if others.shape[1] == 0:
        return spread_out(points, count)
    away = nearest_on_device(others, points, 1)[0][..., 0]
    enough = min(points.shape[1], max(count, points.shape[1] // 2))
    clear = away.topk(enough).indices
    return clear.gather(1, spread_out(gather(points, clear), count))


def spread_out(points: Tensor, count: int) -> Tensor:
    """Indices (B, count) of points (B, M, 3) far from each other: the same share of each block."""
    batch, total = points.shape[:2]
    levels = max(0, math.ceil(math.log2(total / BLOCK)))
    blocks = 1 << levels
    size = -(-total // blocks)
    # blocks have the same size: the last are filled with points that are there already
    again = np.linspace(0, total - 1, blocks * size - total).astype(np.int64)
    index = torch.from_numpy(np.concatenate((np.arange(total), again))).to(points.device)
    real = torch.arange(blocks * size, device=points.device) < total
    index, real = (t.expand(batch, 1, -1) for t in (index, real))  # (B, blocks, size)
    for _ in range(levels):  # halves along the longest side of each block
        cloud = gather(points, index)
        longest = (cloud.amax(2) - cloud.amin(2)).argmax(-1)[..., None, None]
        along = cloud.gather(3, longest.expand(-1, -1, cloud.shape[2], 1))[..., 0]
        order = along.argsort(-1)
        index, real = (
            t.gather(2, order).unflatten(2, (2, -1)).flatten(1, 2) for t in (index, real)
        )
    edges = np.round(count * np.arange(blocks + 1) / blocks).astype(np.int64)
    shares = np.diff(edges)
    cloud = gather(points, index).flatten(0, 1)
    picked = farthest_in_batch(cloud, real.flatten(0, 1), int(shares.max()))
    picked = index.gather(2, picked.unflatten(0, (batch, blocks))).flatten(1)
    first = np.flatnonzero(np.arange(shares.max()) < shares[:, None])
    return picked[:, torch.from_numpy(first).to(points.device)]


def farthest_in_batch(points: Tensor, real: Tensor, count: int) -> Tensor:
    """Indices (B, count) of farthest points of clouds (B, M, 3); those not real (B, M) never."""
    away = torch.where(real, math.inf, -1.0)
    found = torch.empty(len(points), count, dtype=torch.int64, device=points.device)
    last = real.to(torch.uint8).argmax(1)
    for i in range(count):
        found[:, i] = last
        here = points.gather(1, last[:, None, None].expand(-1, 1, 3))
        away = torch.minimum(away, torch.linalg.vector_norm(points - here, dim=2))
        last = away.argmax(1)
    return found


def relax(chosen: Tensor, candidates: Tensor, fixed: Tensor) -> Tensor:
    """Moves chosen points (B, m, 3) to the mean of candidates near them: see `choose.relax`."""
    k = min(AREA_NEIGHBOURS + 1, candidates.shape[1])
    area = nearest_on_device(candidates, candidates, k)[0][..., -1:].square() + 1e-12
    index = nearest_on_device(torch.cat((chosen, fixed), dim=1), candidates, 1)[1]
    total = chosen.new_zeros(len(chosen), chosen.shape[1] + fixed.shape[1], 4)
    weighed = torch.cat((candidates * area, area), dim=2)
    total = total.scatter_add(1, index.expand(-1, -1, 4), weighed)[:, : chosen.shape[1]]
    weight = total[..., 3:]
    return torch.where(weight == 0, chosen, total[..., :3] / weight.clamp_min(1e-30))
