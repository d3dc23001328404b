# SPDX-License-Identifier: Apache-2.0
"""The ray path in PyTorch, for GPUs: all objects of a scan in few, large operations.

What `view.py`, `lattice.py` and `grow.py` do in machine code, here as gathers, reductions and one
sort over tensors of the whole scan. `packed.py` uploads where each return lies among rings and
columns; the download has the new points. In shapes: N returns, a object points, P places around
each, R rows of S rays, m new points.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ..compute import autocast
from ..dense import Dense
from .lattice import GOLDEN, LATTICE, lattice_levels
from .network import RayNetwork
from .packed import AROUND, NEAR, OUTSIDE, PARTNERS, pack_lattice, pack_scan, send
from .view import PARTNER_COLUMNS, Grid, ObjectScan, find_grid, objects_in_order

POINTS_ON_CPU = 4096  # worked on at once, so that they stay in the cache
SHARE_OF_FREE = 0.5  # of a GPU's free memory that a scan may take


class DeviceRays:
    """The sensor's network on a device, and what it needs to upsample all objects of a scan."""

    def __init__(self, network: RayNetwork, device: torch.device, dtype: torch.dtype):
        self.config = network.config
        self.network, self.device, self.dtype = network.to(device), device, dtype

    def grow(
        self,
        scan: ObjectScan,
        new: np.ndarray,
        keep_measured: bool,
        seed: int = 0,
        spread: str = "rings",
    ) -> Dense:
        """new[i] points of object i + 1, one object after the other; all objects have points."""
        grid = find_grid(scan)
        rows, sizes = objects_in_order(scan.instance)
        ratios = new / sizes + keep_measured
        # a denser sensor for the whole scan is known in advance; else see how far apart rings are
        levels = lattice_levels(ratios, sizes) if spread == "rings" else None
        edges, parts = np.concatenate(([0], np.cumsum(sizes))), []
        for part in parts_that_fit(sizes, self._room(float(ratios.max()))):
            mine = (rows[edges[part.start] : edges[part.stop]], sizes[part])
            lattice = (new[part], ratios[part], None if levels is None else levels[part])
            with torch.inference_mode():
                made = self._cast(scan, grid, *mine, *lattice, keep_measured, seed)
            parts.append(received(scan, made.cpu().numpy(), part, new[part]))
        return Dense.concatenate(parts)

    def _room(self, ratio: float) -> int:
        """Object points that are worked on at once: all that fit into free memory."""
        if self.device.type == "cpu":
            return POINTS_ON_CPU
        free, _ = torch.cuda.mem_get_info(self.device)
        config = self.config
        look = 20 * AROUND.stop + 8 * config.neighbours * config.width  # numbers for each point
        ray = 10 * config.width + 12 * config.neighbours + 2 * config.decoder_hidden
        return max(1, int(SHARE_OF_FREE * free / (4 * (look + 2 * (1 + ratio) * ray))))

    def _cast(
        self, scan: ObjectScan, grid: Grid, rows, sizes, new, ratios, levels, keep_measured, seed
    ) -> Tensor:
        """Ask the rays of a denser sensor and keep the best, new[i] of object i: (m, 5)."""
        border = grid.lasers.number[rows, None] == (len(grid.lasers.elevation) - 1, 0)
        packed, lattice = pack_scan(scan, grid, rows, sizes), {}
        if levels is not None:
            lattice, down_rows = pack_lattice(levels, sizes, border, new, keep_measured)
        sent = send(packed | lattice, self.device)
        view = View(sent, grid)
        if levels is None:
            steps = view.mean_steps(sizes).cpu().numpy()
            levels = lattice_levels(ratios, sizes, grid.step, steps)
            lattice, down_rows = pack_lattice(levels, sizes, border, new, keep_measured)
            sent |= send(lattice, self.device)
        anchors, slots = view.rows(down_rows)
        rays = view.rays(anchors, slots)  # (R, S, 2)
        with autocast(self.device, self.dtype):
            encoded = self.network.encode(*view.inputs(), len(sizes))
            out = self.network.decode(encoded, rays, anchors)
        sure = confidence(out.log_intensity, out.log_scale, view.metres[anchors], slots)
        best = best_of_each(sent, anchors, slots, sure, seed, int(new.sum()))
        asked = (rays[..., :1], slots[..., 2:4], out.depth.float()[..., None], sure[..., None])
        asked = torch.cat(asked, dim=-1).flatten(0, 1)[best]  # (m, 5)
        return view.points(anchors[best // rays.shape[1]], *asked.unbind(-1))


def parts_that_fit(sizes: np.ndarray, room: int) -> list[slice]:
    """Runs of objects with at most `room` points each, or of one object."""
    edges, used = [0], 0
    for i, size in enumerate(sizes.tolist()):
        if used and used + size > room:
            edges.append(i)
            used = 0
        used += size
    edges.append(len(sizes))
    return [slice(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]


def received(scan: ObjectScan, made: np.ndarray, objects: slice, new: np.ndarray) -> Dense:
    """The new points (m, 5) of some objects: x, y, z, confidence, row of the scan."""
    source = made[:, 4].astype(np.int64)
    owner = np.repeat(np.arange(objects.start, objects.stop) + 1, new)
    if np.isfinite(made).all() and (scan.instance[source] != owner).any():
        raise RuntimeError("a lattice with too few rays: please report this")
    return Dense.new(made[:, :3], made[:, 3].copy(), source)


class View:
    """What each object point sees around it, on the device: see `view.py`."""

    def __init__(self, sent: dict[str, Tensor], grid: Grid):
        self.sent, self.grid = sent, grid
        # the nearest return along the ring, at most one column away; the left one goes first
        image = sent["image"].flatten()
        there = image > OUTSIDE
        beside = torch.where(there[:-2], image[:-2], image[2:])
        near = torch.where(there[1:-1], image[1:-1], beside)
        found = torch.cat((image, near))[sent["cell"][:, None] + sent["places"]]  # (a, P)
        seen, self.own = sent["returns"][found], sent["own"]
        # to each: columns, rings, ln(range), elevation
        self.away = seen[..., :4] - self.own[:, None, :4]  # (a, P, 4)
        self.mine = seen[..., 4] == self.own[:, None, 4]  # (a, P)
        self.place, self.state = seen[..., 5], seen[..., 6]
        self._find_partners()
        self.logs = self.steps.abs().log()
        self.metres = self.own[:, 2] + self.logs[:, 0]  # (a,) ln of a ring step there
        self.away[..., 2] /= self.steps[:, :1]  # from here on in steps up

    def _find_partners(self) -> None:
        """Points of the object next to this one on the rings above and below: (a, 2)."""
        both = slice(0, len(PARTNERS))
        aside = torch.where(self.mine[:, both], self.away[:, both, 0].abs(), math.inf)
        least, which = aside.unflatten(1, (2, -1)).min(dim=2)
        alone = least >= PARTNER_COLUMNS
        which = which[..., None, None].expand(-1, -1, 1, 4)
        partner = self.away[:, both].unflatten(1, (2, -1)).gather(2, which)[:, :, 0]  # (a, 2, 4)
        partner = partner.masked_fill(alone[..., None], 0.0)
        # radians up and, negative, down: measured where there is a partner, else as rings are
        spacing, rise = self.sent["spacing"], partner[..., 3]
        share = rise / spacing
        self.steps = torch.where(share.clamp(0.3, 3.0) == share, rise, spacing)
        self.aside, self.lowest = partner[:, 0, 0], alone[:, 1]

    def mean_steps(self, sizes: np.ndarray) -> Tensor:
        """Radians between rings (o,), in the mean over each object."""
        total = self.steps.new_zeros(len(sizes)).index_add(0, self.sent["cloud"], self.steps[:, 0])
        return total / torch.bincount(self.sent["cloud"], minlength=len(sizes))

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Offsets (a, k, 3), neighbours (a, k), context (a, C) and cloud (a,) for the network."""
        sent = self.sent
        mine = self.mine[:, NEAR] * sent["others"]
        offsets = self.away[:, NEAR, :3] * mine[..., None]
        self.neighbours = torch.lerp(self.own[:, 5:6], self.place[:, NEAR], mine).long()
        context = torch.cat((self._scalars(), self._window()), dim=1)
        return offsets, self.neighbours, context, sent["cloud"]

    def _window(self) -> Tensor:
        """At each place (a, 3 w): 1 for a return (-1 outside), 1 for its own object (-1 for
        another), how far behind."""
        state = self.state[:, AROUND]
        there = state.clamp(min=0)
        owner = torch.where(self.mine[:, AROUND], 1.0, -there)
        behind = torch.asinh(self.away[:, AROUND, 2]) * (0.5 * there)
        return torch.stack((state, owner, behind), dim=-1).flatten(1)

    def _scalars(self) -> Tensor:
        """Rings, range, height and extent of the object (a, SCALARS): see `view._scalars`."""
        depth, up, down = self.own[:, 2], *self.logs.unbind(1)
        known, _, _, height = about = self.sent["about"].unbind(1)
        objects = self.sent["objects"][self.sent["cloud"]]  # (a, 6)
        extent = objects[:, :2] * known[:, None]
        steps = (self.metres, up - (math.log(self.grid.step) + 1), up - down, depth - 3)
        ground = (height / self.metres.exp()).clamp(max=8.0)
        first = torch.stack((*steps, *about[:3]), dim=1)
        return torch.cat((first, extent, objects[:, 2:], ground[:, None]), dim=1)

    def rows(self, down_rows: int) -> tuple[Tensor, Tensor]:
        """Anchors (R,) and slots (R, S, 7) of all rows of rays: up from all, down from the
        lowest."""
        sent = self.sent
        lowest = self.lowest.nonzero()[:, 0]  # the one wait for a size
        down = sent["down"][lowest]
        if down_rows > 1:
            more = torch.arange(down_rows, device=down.device)
            lowest = lowest[:, None].expand(-1, down_rows).flatten()
            down = (down[:, None] + more).flatten()
        anchors = torch.cat((sent["anchors"], lowest))
        return anchors, sent["blocks"][torch.cat((sent["kinds"], down))]

    def rays(self, anchors: Tensor, slots: Tensor) -> Tensor:
        """Columns and rings (R, S, 2) from the anchors."""
        across = torch.addcmul(slots[..., 0], slots[..., 1], self.aside[anchors][:, None])
        return torch.stack((across, slots[..., 2] - slots[..., 3]), dim=-1)

    def points(self, anchors: Tensor, across, above, below, depth, sure) -> Tensor:
        """New points (m, 5) about the sensor, how sure they are, and the rows of the measured
        points next to them, of the rays' ends (m,) at their anchors (m,)."""
        step, sent = self.steps[anchors], self.sent
        azimuth = sent["azimuth"][anchors] + across * self.grid.step
        polar = self.own[anchors, 2:4]
        elevation = polar[:, 1] + above * step[:, 0] + below * step[:, 1]
        reach = torch.addcmul(polar[:, 0], depth, step[:, 0]).exp()
        level = reach * elevation.cos()
        axes = (level * azimuth.cos(), level * azimuth.sin(), reach * elevation.sin())
        points = torch.stack(axes, dim=1)  # (m, 3)
        near = sent["measured"][self.neighbours[anchors]]  # (m, k, 4)
        least = (near[..., :3] - points[:, None]).square().sum(-1).argmin(1, keepdim=True)
        source = near[..., 3].gather(1, least)
        return torch.cat((points, sure[:, None], source), dim=1)


def confidence(log_intensity: Tensor, log_scale: Tensor, metres: Tensor, slots: Tensor) -> Tensor:
    """How likely rays (R, S) meet the object within the tolerance: see `lattice.ray_confidence`.

    metres (R,) is ln of a ring step; odds c / (1 + (odds - 1) c) of c = (1 - e^-u) (1 - e^-v).
    """
    right = (math.log(LATTICE.tolerance) - metres)[:, None] - log_scale
    missed = torch.stack((log_intensity.float(), right)).exp().neg().expm1()
    along = missed[0] * missed[1]
    odds = LATTICE.odds
    return odds * along / torch.rsub(along, 1.0, alpha=1 - odds) * slots[..., 6]


def best_of_each(
    sent: dict[str, Tensor], anchors: Tensor, slots: Tensor, sure: Tensor, seed: int, count: int
) -> Tensor:
    """The rays that stay (m,), as places in (R * S,): see `lattice.best_of_each`.

    One sort: by object, then likely before unlikely, tiers, and how sure; or evenly in the last
    tier. Keys of an object lie in [8 o - 5, 8 o + 2].
    """
    rank = torch.arange(seed, seed + sure.numel(), dtype=torch.float64, device=sure.device)
    even = (rank * GOLDEN).frac().to(sure.dtype).view_as(sure)
    owner = 8.0 * sent["cloud"][anchors].double()
    key = owner[:, None] + slots[..., 4] - torch.lerp(sure, even, slots[..., 5])
    key = torch.add(key, sure >= LATTICE.likely, alpha=-4)
    ordered, order = key.flatten().sort(stable=True)
    objects = len(sent["new"])
    lowest = torch.arange(objects, dtype=torch.float64, device=sure.device) * 8 - 5.5
    first = torch.searchsorted(ordered, lowest) - sent["begin"]  # (o,)
    each = torch.repeat_interleave(first, sent["new"], output_size=count)
    return order[each + torch.arange(count, device=sure.device)]
