# SPDX-License-Identifier: Apache-2.0
"""Objects seen by a sensor grow along its rays: the lattice of a denser sensor is asked."""

from __future__ import annotations

import numpy as np
import torch

from ..compute import even_parts, in_threads
from ..dense import Dense
from .compiled import CompiledRayNetwork, supports
from .lattice import (
    LATTICE,
    best_of_each,
    judge_rays,
    lattice_levels,
    lattice_rays,
    rays_along,
)
from .network import RayNetwork
from .view import ObjectGraph, ObjectScan, look_around, nearest_measured, part_of, ray_points

LIMITS = (LATTICE.tolerance, LATTICE.odds, LATTICE.unseen)


class RayUpsampler:
    """The sensor's network as machine code, and what it needs to upsample all objects of a scan."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, network: RayNetwork):
        self.config, self.network = network.config, network.to(self.device)
        # read once: while one scan is shared among threads, new ones see a count of one
        self.threads = torch.get_num_threads()
        self._rays = CompiledRayNetwork(network)

    @classmethod
    def serves(cls, network: RayNetwork, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether there is machine code for the network, there, in this precision."""
        return device.type == "cpu" and dtype == cls.dtype and supports(network)

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
        ratios = new / graph.sizes + keep_measured
        levels = lattice_levels(ratios, graph.sizes, spread, graph.column, graph.spacing)

        def cast(part: slice) -> Dense:
            some, options = part_of(graph, part), (keep_measured, seed)
            return self._cast(scan, some, new[part], levels[part], *options)

        # a core for each part of the work is worth more than all cores for each operation
        parts = even_parts(graph.sizes, self.threads)
        return Dense.concatenate(in_threads(cast, parts))

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
        lattice = sum(len(owners) for owners, *_ in asked)
        along = rays_along(graph.sizes, np.maximum(new - likely, 0), levels[:, 0])
        ask(*along, np.ones(len(along[0]), np.int8))
        anchors, rays, tier, depth, sure = (np.concatenate(c) for c in zip(*asked, strict=True))
        best = best_of_each(cloud[anchors], sure, tier, new, seed, LATTICE.likely)
        if len(best) != new.sum():
            raise RuntimeError("a lattice with too few rays: please report this")
        anchors = anchors[best]
        points = ray_points(graph, anchors, rays[best], depth[best])
        source = nearest_measured(scan, graph, anchors, points)
        return Dense.new(points, sure[best], source, filler=best >= lattice)
