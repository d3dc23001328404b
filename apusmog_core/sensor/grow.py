# SPDX-License-Identifier: Apache-2.0
"""Objects seen by a sensor grow on its grid of rays: the lattice of a denser one is asked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..compute import autocast, even_parts, in_threads
from ..dense import Dense
from ..model import ApuSmog
from .compiled import CompiledApuSmog, supports
from .grid import grid_context, ray_neighbours, scan_grids, to_points
from .lattice import best_of_each, judge, lattice, lattice_rays, ring_gaps, seen_elevations

ANCHORS = 2048  # points that are worked on at once; small enough for the CPU's caches


class RayUpsampler:
    """The sensor's network, and what it needs to upsample all objects of a scan."""

    def __init__(self, network: ApuSmog, device: torch.device, dtype: torch.dtype):
        self.config = network.config
        self.network, self.device, self.dtype = network.to(device), device, dtype
        # read once: while one scan is shared among threads, new ones see a count of one
        self.threads = torch.get_num_threads()
        plain = device.type == "cpu" and dtype == torch.float32 and supports(network)
        self._ray_network = CompiledApuSmog(self.network) if plain else self.network

    def grow(
        self,
        clouds: Sequence[np.ndarray],
        counts: Sequence[int],
        keep_measured: bool,
        origin: np.ndarray,
        seed: int = 0,
    ) -> list[Dense]:
        """All objects of a scan as one graph on the sensor's grid of rays, or one for each core."""
        sizes = np.array([len(c) for c in clouds])
        grids, grid = scan_grids(clouds, origin)
        ratios = (np.array(counts) / sizes).tolist()
        steps = ((g.step_azimuth, g.step_elevation) for g in grids)
        levels = np.array([lattice(*s, ratio) for s, ratio in zip(steps, ratios, strict=True)])
        limits = seen_elevations(grid, grids, sizes)
        context = grid_context(grids, grid, sizes)
        begin = np.concatenate(([0], np.cumsum(sizes)))
        centres = np.add.reduceat(grid, begin[:-1]) / sizes[:, None]
        grid -= np.repeat(centres, sizes, axis=0)  # float32 is enough from here on
        limits -= centres[:, 1:2]

        new = np.array(counts) - (sizes if keep_measured else 0)

        def cast(part: slice) -> Dense:
            rows = slice(begin[part.start], begin[part.stop])
            given = (grid[rows], context[rows], sizes[part], levels[part], limits[part])
            found, sure, tier, owner = self._cast(*given, keep_measured)
            chosen = best_of_each(owner, sure, tier, new[part], seed)
            if len(chosen) != new[part].sum():
                raise RuntimeError("a lattice with too few rays: please report this")
            points = to_points(grids[part], found[chosen], new[part], centres[part])
            return Dense(points, sure[chosen])

        # a core for each part of the work is worth more than all cores for each operation
        parts = in_threads(
            cast, even_parts(sizes, self.threads if self.device.type == "cpu" else 1)
        )
        whole, cuts = Dense.concatenate(parts), np.cumsum(new)[:-1]
        columns = (np.split(column, cuts) for column in (whole.points, whole.confidence))
        dense = [Dense(*row) for row in zip(*columns, strict=True)]
        if not keep_measured:
            return dense
        pairs = zip(clouds, dense, strict=True)
        return [Dense.concatenate((Dense.measured(cloud), grown)) for cloud, grown in pairs]

    def _cast(self, grid, context, sizes, levels, limits, keep_measured):
        """The rays of a denser sensor: coordinates (m, 3), confidence, tier and cloud of each.

        grid (n, 3) are the points in steps from their cloud's centre, context (n, 2) their scale;
        levels and limits (clouds, 2) are the lattice and what the sensor sees of elevations.
        """
        cloud = np.repeat(np.arange(len(sizes)), sizes)
        near = ray_neighbours(grid, sizes, self.config.neighbours)
        local, gap = grid.astype(np.float32), np.exp(context[:, 0])
        points, index, scale = (
            torch.from_numpy(a)[None].to(self.device) for a in (local, near, context)
        )
        results = []
        with torch.inference_mode(), autocast(self.device, self.dtype):
            encoded = self._ray_network.encode(points, index, scale, ANCHORS)
            components = self._ray_network.components(encoded)[0].float().cpu().numpy()
            gaps = ring_gaps(local, near)
            for anchors, rays, tier in lattice_rays(gaps, levels[cloud], keep_measured):
                chosen = torch.from_numpy(anchors).to(self.device)
                queries = torch.from_numpy(rays)[None].to(self.device)
                out = self._ray_network.decode_at(encoded, queries, chosen, ANCHORS // 2)
                answers = (out.coarse, out.hit, out.log_scale)
                found, hit, log_scale = (t[0].float().cpu().numpy() for t in answers)
                asked = (rays, anchors, components, gap, cloud, limits)
                sure = judge(found, hit, log_scale, *asked)
                results.append((found, sure, tier.ravel(), cloud[anchors].repeat(rays.shape[1])))
        return (np.concatenate(column) for column in zip(*results, strict=True))
