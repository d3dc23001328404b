# SPDX-License-Identifier: Apache-2.0
"""Objects seen by a sensor grow along its rays: the lattice of a denser sensor is asked."""

from __future__ import annotations

import numpy as np
import torch

from ..compute import autocast, even_parts, in_threads
from ..dense import Dense
from .compiled import CompiledRayNetwork, supports
from .lattice import (
    LATTICE,
    best_of_each,
    judge_rays,
    lattice_rays,
    lattice_shape,
    rays_along,
)
from .losses import LARGEST_INTENSITY
from .network import EncodedRays, RayNetwork
from .view import ObjectGraph, ObjectScan, look_around, nearest_measured, part_of, ray_points

LIMITS = (LATTICE.tolerance, LATTICE.odds, LATTICE.unseen)


class RayUpsampler:
    """The sensor's network, and what it needs to upsample all objects of a scan."""

    def __init__(
        self,
        network: RayNetwork,
        device: torch.device,
        dtype: torch.dtype,
        compiled: bool = True,
    ):
        self.config = network.config
        self.network, self.device, self.dtype = network.to(device), device, dtype
        # read once: while one scan is shared among threads, new ones see a count of one
        self.threads = torch.get_num_threads()
        plain = device.type == "cpu" and dtype == torch.float32 and supports(network)
        self._rays = (
            CompiledRayNetwork(network) if compiled and plain else TorchRays(network, device, dtype)
        )

    def grow(
        self,
        scan: ObjectScan,
        new: np.ndarray,
        keep_measured: bool,
        seed: int = 0,
        spread: str = "rings",
    ) -> Dense:
        """new[i] points of object i + 1, one object after the other; all objects have points."""
        graph = look_around(scan)
        levels = self._levels(graph, new / graph.sizes + keep_measured, spread)

        def cast(part: slice) -> Dense:
            some, options = part_of(graph, part), (keep_measured, seed)
            return self._cast(scan, some, new[part], levels[part], *options)

        # a core for each part of the work is worth more than all cores for each operation
        parts = even_parts(graph.sizes, self.threads if self.device.type == "cpu" else 1)
        return Dense.concatenate(in_threads(cast, parts))

    @staticmethod
    def _levels(graph: ObjectGraph, ratios: np.ndarray, spread: str) -> np.ndarray:
        """How many times denser in columns and rings (objects, 2) the lattice of each object is."""
        if spread == "rings":  # one denser sensor for the whole scan
            rings = max(2, round(float(ratios @ graph.sizes / graph.sizes.sum())))
            columns = np.maximum(1, np.ceil(ratios / rings - 1e-9))
            return np.stack((columns, np.full(len(ratios), rings)), axis=1).astype(np.int64)
        cloud = np.repeat(np.arange(len(graph.sizes)), graph.sizes)
        step = np.bincount(cloud, graph.steps[:, 0]) / graph.sizes
        pairs = zip(step, ratios, strict=True)
        return np.array([lattice_shape(graph.column, s, r) for s, r in pairs])

    def _cast(
        self,
        scan: ObjectScan,
        graph: ObjectGraph,
        new: np.ndarray,
        levels: np.ndarray,
        keep_measured: bool,
        seed: int,
    ) -> Dense:
        """Ask the rays of a denser sensor and keep the best, new[i] of object i."""
        cloud = np.repeat(np.arange(len(graph.sizes)), graph.sizes)
        metres = np.exp(graph.polar[:, 2]) * graph.steps[:, 0]
        encoded = self._rays.encode(graph.offsets, graph.neighbours, graph.context, cloud)
        asked, likely = [], np.zeros(len(new), np.int64)

        def ask(anchors: np.ndarray, rays: np.ndarray, tier: np.ndarray) -> None:
            nonlocal likely
            depth, log_scale, intensity = self._rays.decode(encoded, rays, anchors)
            sure = judge_rays(intensity, log_scale, rays, anchors, metres, graph.border, *LIMITS)
            anchors = anchors.repeat(rays.shape[1])
            likely += np.bincount(cloud[anchors[sure >= LATTICE.likely]], minlength=len(new))
            asked.append((anchors, rays.reshape(-1, 2), tier.ravel(), depth.ravel(), sure))

        for rays_of_a_level in lattice_rays(graph, levels[cloud], keep_measured):
            ask(*rays_of_a_level)
        along = rays_along(graph.sizes, np.maximum(new - likely, 0))
        ask(*along, np.ones(len(along[0]), np.int8))
        anchors, rays, tier, depth, sure = (np.concatenate(c) for c in zip(*asked, strict=True))
        best = best_of_each(cloud[anchors], sure, tier, new, seed, LATTICE.likely)
        if len(best) != new.sum():
            raise RuntimeError("a lattice with too few rays: please report this")
        anchors = anchors[best]
        points = ray_points(graph, anchors, rays[best], depth[best])
        return Dense.new(points, sure[best], nearest_measured(scan, graph, anchors, points))


class TorchRays:
    """The network in PyTorch behind the interface of the compiled one: arrays in, arrays out."""

    def __init__(self, network: RayNetwork, device: torch.device, dtype: torch.dtype):
        self.network, self.device, self.dtype = network, device, dtype

    def encode(self, *arrays: np.ndarray) -> EncodedRays:
        with torch.inference_mode(), autocast(self.device, self.dtype):
            return self.network.encode(*(torch.from_numpy(a).to(self.device) for a in arrays))

    def decode(
        self, encoded: EncodedRays, rays: np.ndarray, anchors: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        asked = (torch.from_numpy(a).to(self.device) for a in (rays, anchors))
        with torch.inference_mode(), autocast(self.device, self.dtype):
            out = self.network.decode(encoded, *asked)
        answers = (out.depth, out.log_scale, out.log_intensity.clamp(max=LARGEST_INTENSITY).exp())
        return tuple(t.float().cpu().numpy() for t in answers)
