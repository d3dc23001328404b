# SPDX-License-Identifier: Apache-2.0
"""Point clouds without a viewpoint grow as in the paper: samples of the mixture, decoded."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..compute import free_memory, in_precision
from ..dense import Dense
from ..geometry import farthest, geodesic_patches, nearest, nearest_in_batch
from ..model.network import ApuSmog
from ..model.smog import Mixture
from ..segment.cluster import rows_by_label
from ..sensor.view import ObjectScan
from .choose import (
    farthest_from,
    pull_back_strays,
    push_apart,
    relax,
    settle_on_measured,
    spread_out,
)
from .denoise import find_noise

ANCHORS = 2048  # points of a cloud that are worked on at once
PATCH = 256  # points of a patch, for networks that attend to all of it
PAIRS = 1 << 17  # outputs times their neighbours in the refinement of patches, at once
OVERSAMPLE = 3.0  # candidates for each new point
NOISY_OVERSAMPLE = 6.0  # noise also scatters points along the surface
SHARE_OF_FREE, BYTES_PER_OUTPUT = 0.25, 8000  # of a GPU's memory that decoding may take
LEAST_CANDIDATES = 4  # of each component, so that a small ratio has a choice too


class SurfaceUpsampler:
    """The network of the paper's sphere, and what it needs to upsample whole clouds."""

    def __init__(
        self, network: ApuSmog, device: torch.device, dtype: torch.dtype, denoise: bool = True
    ):
        self.config = network.config
        self.network = in_precision(network.to(device), dtype)
        self.device, self.dtype = device, dtype
        self.plain = self.config.choice == "farthest"
        self.denoise = denoise and not self.plain

    @torch.inference_mode()
    def grow(
        self, scan: ObjectScan, new: np.ndarray, keep_measured: bool, seed: int = 0, *_
    ) -> Dense:
        """new[i] points on the surface of object i + 1, one object after the other."""
        parts = []
        for rows, count in zip(rows_by_label(scan.instance)[1:], new, strict=True):
            cloud = scan.points[rows].astype(np.float64, copy=False)
            made = self.grow_cloud(cloud, count, keep_measured, seed)
            sure = np.ones(len(made), np.float32)
            parts.append(Dense.new(made, sure, rows[self.nearest_measured(cloud, made)]))
        return Dense.concatenate(parts)

    @staticmethod
    def nearest_measured(cloud: np.ndarray, made: np.ndarray) -> np.ndarray:
        return nearest(cloud, 1, made)[:, 0]

    def grow_cloud(
        self, cloud: np.ndarray, new: int, keep_measured: bool, seed: int = 0
    ) -> np.ndarray:
        """New points (new, 3) on the surface that a cloud (n, 3) shows."""
        centre = cloud.mean(axis=0)
        measured = cloud - centre
        noisy = find_noise(measured) if self.denoise else None
        local = (noisy.project(measured) if noisy else measured).astype(np.float32)
        more, ratio = NOISY_OVERSAMPLE if noisy else OVERSAMPLE, new / len(cloud)
        if self.config.attention == "global":
            found = self._patches(local, ratio, more, seed)
        else:
            sent = torch.from_numpy(local[None]).to(self.device)
            found = self.candidates(sent, ratio, more, seed)[0].cpu().numpy()
        if not self.plain:
            found = pull_back_strays(found, local)
        fixed = measured.astype(np.float32) if keep_measured else local[:0]
        if keep_measured:
            chosen = found[farthest_from(found, fixed, new)]
        elif self.plain:
            chosen = found[farthest(found, new)]
        else:
            found = np.concatenate((local, found))  # none of those is nearer to tips and corners
            chosen = found[spread_out(found, new)]
        made = chosen if self.plain else relax(chosen, found, fixed)
        if noisy:
            made = noisy.project(push_apart(made, fixed))
        elif not (keep_measured or self.plain):
            made = settle_on_measured(made, measured)
        return made + centre

    def _patches(self, points: np.ndarray, ratio: float, more: float, seed: int) -> np.ndarray:
        """Outputs of overlapping patches of a cloud (n, 3): enough for `ratio` * n."""
        index = geodesic_patches(points, PATCH)
        count = int(np.ceil(ratio * index.shape[1]))
        pairs = count * (self.config.refine_neighbours or max(4, round(4 * ratio)))
        batch = max(1, min(ANCHORS // index.shape[1], PAIRS // pairs))
        found = []
        for start in range(0, len(index), batch):
            patches = torch.from_numpy(points[index[start : start + batch]]).to(self.device)
            found.append(self.candidates(patches, ratio, more, seed).flatten(0, 1).cpu().numpy())
        return np.concatenate(found)

    def candidates(self, points: Tensor, ratio: float, more: float, seed: int) -> Tensor:
        """Outputs (B, M, 3) for clouds or patches (B, n, 3): enough for `ratio` * n of each."""
        count = int(np.ceil(ratio * points.shape[1]))
        if not self.plain:  # else patches overlap, so that there are some to choose from
            per = max(LEAST_CANDIDATES, int(np.ceil(more * ratio / self.config.component_share)))
            count = per * len(range(points.shape[1])[self.network.anchors()])
        near = nearest_in_batch(points, self.config.neighbours)
        chunk = self._chunk(len(points) * count / points.shape[1])
        encoded = self.network.encode(points, near, chunk=2 * chunk)
        mixture = self.network.mixture(encoded)
        counts = self.network.allot(mixture, count)
        noise = self._noise(mixture, count, counts, seed)
        samples = self.network.sample(mixture, noise, counts)
        return self.network.decode(encoded, samples, counts, chunk=chunk).fine.float()

    def _chunk(self, outputs: float) -> int:
        """Anchors that are decoded at once, with so many outputs each; 0: all."""
        if self.config.attention == "global":
            return 0
        if self.device.type == "cpu":  # what stays in the cache
            return ANCHORS // 2
        return max(1, int(SHARE_OF_FREE * free_memory(self.device) / (BYTES_PER_OUTPUT * outputs)))

    def _noise(self, mixture: Mixture, count: int, counts, seed: int) -> torch.Tensor:
        """Even normal noise (B, count, 2): one low-discrepancy set, shifted for each component."""
        batch, components = mixture.mean.shape[:2]
        per = count // components if counts is None else int(counts.max())
        shares = (even_shares(per), shifts(components, seed))
        noise = even_noise(*(torch.from_numpy(s) for s in shares)).to(self.device)  # (K, per, 2)
        if counts is None:
            return noise.flatten(0, 1)[None].expand(batch, -1, -1)
        first = torch.arange(per, device=self.device) < counts[..., None]  # (B, K, per)
        return torch.stack([noise[mine] for mine in first])


def even_shares(count: int) -> np.ndarray:
    """Points (count, 2) that fill the unit square evenly: the R2 sequence."""
    golden = 1.3247179572447460
    steps = np.array([1 / golden, 1 / golden**2])
    return (np.arange(1, count + 1)[:, None] * steps).astype(np.float32)


def shifts(components: int, seed: int) -> np.ndarray:
    """How each component (K, 2) shifts them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(components, 2, generator=generator).numpy()


def even_noise(shares: Tensor, shift: Tensor) -> Tensor:
    """Normal noise (K, per, 2): shares of the unit square (per, 2), shifted by (K, 2)."""
    return torch.special.ndtri(((shares + shift[:, None]) % 1).clamp(0.005, 0.995))
