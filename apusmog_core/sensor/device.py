# SPDX-License-Identifier: Apache-2.0
"""The ray path in PyTorch, for GPUs: all objects of a scan in few, large operations.

What `view.py`, `lattice.py` and `grow.py` do in machine code, here as gathers, reductions and one
sort over tensors of the whole scan. `packed.py` uploads where each return lies among rings and
columns; the download has the new points, and of which measured point each takes its other fields.
One thing differs from `grow.py`: a ray beside each point is asked in advance, not only where likely
ones are missing, which would have to be waited for. In shapes: N returns, a object points, P places
around each, R rows of S rays, m new points.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from ..compute import free_memory, in_precision
from ..dense import Dense
from .lattice import LATTICE, lattice_levels
from .network import RayNetwork
from .packed import (
    ABOVE,
    ACROSS,
    AROUND,
    ASIDE,
    AZIMUTH,
    BELOW,
    DEPTH,
    DOWN,
    ELEVATION,
    FACTOR,
    HEIGHT,
    INSTANCE,
    METRES,
    NEAR,
    ORDER,
    OUTSIDE,
    OWNER,
    PARTNERS,
    PLACE,
    RISE,
    SHARE,
    SPREAD,
    TIER,
    TOWARDS,
    UP,
    pack_lattice,
    pack_scan,
    send,
)
from .view import PARTNER_COLUMNS, Grid, ObjectScan, find_grid, objects_in_order

SHARE_OF_FREE = 0.5  # of the free memory that a scan may take


class DeviceRays:
    """The sensor's network on a device, and what it needs to upsample all objects of a scan."""

    def __init__(self, network: RayNetwork, device: torch.device, dtype: torch.dtype):
        self.config = network.config
        self.network = in_precision(network.to(device), dtype)
        self.device, self.dtype = device, dtype

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
        levels = lattice_levels(ratios, sizes, spread, grid.step, grid.spacing(rows))
        edges, parts = np.concatenate(([0], np.cumsum(sizes))), []
        for part in parts_that_fit(sizes, self._room(float(ratios.max()))):
            mine = (rows[edges[part.start] : edges[part.stop]], sizes[part])
            lattice = (new[part], levels[part], keep_measured)
            with torch.inference_mode():
                made = self._cast(scan, grid, *mine, *lattice, seed)
            parts.append(received(scan, made.cpu().numpy(), part, new[part]))
        return Dense.concatenate(parts)

    def _room(self, ratio: float) -> int:
        """Object points that are worked on at once: all that fit into free memory."""
        config, free = self.config, free_memory(self.device)
        look = 20 * AROUND.stop + 8 * config.neighbours * config.width  # numbers for each point
        ray = 10 * config.width + 12 * config.neighbours + 2 * config.decoder_hidden
        return max(1, int(SHARE_OF_FREE * free / (4 * (look + 2 * (1 + ratio) * ray))))

    def _cast(
        self, scan: ObjectScan, grid: Grid, rows, sizes, new, levels, keep_measured, seed
    ) -> Tensor:
        """Ask the rays of a denser sensor and keep the best, new[i] of object i: (m, 5)."""
        border = grid.lasers.number[rows, None] == (len(grid.lasers.elevation) - 1, 0)
        objects = scan.instance[rows[np.cumsum(sizes) - 1]]
        lattice, down_rows = pack_lattice(levels, sizes, border, new, objects, keep_measured)
        sent = send(pack_scan(scan, grid, rows, sizes, seed) | lattice, self.device)
        view = DeviceGraph(sent, grid)
        anchors, slots = view.rows(down_rows)  # (R,), (R, S, 9)
        table = view.table()
        own = table[anchors]
        rays = rays_of(own, slots)  # (R, S, 2)
        encoded = self.network.encode(*view.inputs(), len(sizes))
        out = self.network.decode(encoded, rays, anchors)
        sure = confidence(out.log_intensity, out.log_scale, own, slots)
        best = best_of_each(sent, own, slots, sure, int(new.sum()))
        place = own[:, PLACE, None].expand_as(sure)
        steps = (rays[..., 0], slots[..., ABOVE], slots[..., BELOW])
        ends = (*steps, out.depth.float(), sure, place)
        across, above, below, depth, sure, place = torch.stack(ends).flatten(1)[:, best]  # (m,)
        anchors = place.long()
        made = points_of(table[anchors], across, above, below, depth, grid.step)
        source = nearest_measured(sent["measured"][view.neighbours[anchors]], made)
        return torch.cat((made, sure[:, None], source), dim=1)


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
    """The new points (m, 5) of some objects: x, y, z, confidence (negative: filler), row of the
    scan."""
    source = made[:, 4].astype(np.int64)
    owner = np.repeat(np.arange(objects.start, objects.stop) + 1, new)
    if np.isfinite(made).all() and (scan.instance[source] != owner).any():
        raise RuntimeError("a lattice with too few rays: please report this")
    sure = made[:, 3]
    return Dense.new(made[:, :3], np.abs(sure), source, filler=np.signbit(sure))


class DeviceGraph:
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
        # to each: azimuth (then columns), rings, elevation, ln(range)
        self.away = seen[..., :4] - self.own[:, None, :4]  # (a, P, 4)
        self.mine = seen[..., INSTANCE] == self.own[:, None, INSTANCE]  # (a, P)
        self.place, *self.state = seen[..., PLACE:].unbind(-1)
        self.away[..., AZIMUTH].mul_(grid.columns / (2 * math.pi))
        self._find_partners()
        self.logs = self.steps.abs().log()
        self.metres = self.own[:, DEPTH] + self.logs[:, 0]  # (a,) ln of a ring step there
        # from here on: columns, rings, depth in steps as the network sees it, and as it is
        depth = self.away[..., DEPTH].div_(self.steps[:, :1])
        torch.asinh(depth, out=self.away[..., ELEVATION])

    def _find_partners(self) -> None:
        """Points of the object next to this one on the rings above and below: (a, 2)."""
        both = slice(0, len(PARTNERS))
        aside = torch.where(self.mine[:, both], self.away[:, both, AZIMUTH].abs(), math.inf)
        least, which = aside.unflatten(1, (2, -1)).min(dim=2)
        alone = least >= PARTNER_COLUMNS
        which = which[..., None, None].expand(-1, -1, 1, 4)
        partner = self.away[:, both].unflatten(1, (2, -1)).gather(2, which)[:, :, 0]  # (a, 2, 4)
        partner = partner.masked_fill(alone[..., None], 0.0)
        # radians up and, negative, down: measured where there is a partner, else as rings are
        spacing, rise = self.sent["spacing"], partner[..., ELEVATION]
        share = rise / spacing
        self.steps = torch.where(share.clamp(0.3, 3.0) == share, rise, spacing)
        self.aside, self.lowest = partner[:, 0, AZIMUTH], alone[:, 1]

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Offsets (a, k, 4), neighbours (a, k), context (a, C) and cloud (a,) for the network."""
        sent = self.sent
        mine = self.mine[:, NEAR] * sent["others"]
        offsets = self.away[:, NEAR] * mine[..., None]
        self.neighbours = torch.lerp(self.own[:, PLACE, None], self.place[:, NEAR], mine).long()
        about = (*self._steps(), sent["about"], self._ground(), self._window())
        return offsets, self.neighbours, torch.cat(about, dim=1), sent["cloud"]

    def _steps(self) -> tuple[Tensor, Tensor, Tensor]:
        """ln of metres between rings, ring steps in columns, steps up to down: each (a, 1)."""
        up, down = self.logs.split(1, dim=1)
        return self.metres[:, None], up - (math.log(self.grid.step) + 1), up - down

    def _ground(self) -> Tensor:
        """Rings down to the ground (a, 1)."""
        return (self.own[:, HEIGHT, None] / self.steps[:, :1]).clamp(max=8.0)

    def _window(self) -> Tensor:
        """At each place (a, 3 w): 1 for a return (-1 outside), 1 for its own object (-1 for
        another), how far behind."""
        state, minus, half = (column[:, AROUND] for column in self.state)
        owner = torch.where(self.mine[:, AROUND], 1.0, minus)
        behind = self.away[:, AROUND, ELEVATION] * half
        return torch.stack((state, owner, behind), dim=-1).flatten(1)

    def table(self) -> Tensor:
        """What rays need to know of their anchors: (a, 16)."""
        rest = (self.steps, self.aside[:, None], self.metres[:, None])
        return torch.cat((self.own, *rest), dim=1)

    def rows(self, down_rows: int) -> tuple[Tensor, Tensor]:
        """Anchors (R,) and slots (R, S, 7) of all rows of rays: up from all, down from the
        lowest."""
        sent = self.sent
        down = sent["down"][self.lowest.nonzero()[:, 0]]  # the one wait for a size
        if down_rows > 1:
            more = torch.arange(down_rows, device=down.device)
            down = torch.stack((down[:, :1].expand(-1, down_rows), down[:, 1:] + more), dim=-1)
        rows = torch.cat((sent["rows"], down.view(-1, 2)))
        return rows[:, 0], sent["blocks"][rows[:, 1]]


def rays_of(own: Tensor, slots: Tensor) -> Tensor:
    """Columns and rings (R, S, 2) from the anchors (R, 16) of the rows."""
    across = torch.addcmul(slots[..., ACROSS], slots[..., TOWARDS], own[:, ASIDE, None])
    return torch.stack((across, slots[..., RISE]), dim=-1)


def confidence(log_intensity: Tensor, log_scale: Tensor, own: Tensor, slots: Tensor) -> Tensor:
    """Confidence (R, S) of the answers to rays, negative for filler: `lattice.ray_confidence`.

    The ray alone is right by c = (1 - e^-u) atan(v) 2 / pi, u the intensity, v the tolerance in
    median errors; the odds are inverse to the metres between rings.
    """
    metres = own[:, METRES, None]
    errors = math.log(LATTICE.tolerance) - metres - log_scale
    met = nn.functional.elu(-log_intensity.float().exp(), -2 / math.pi)  # (1 - e^-u) 2 / pi
    odds = torch.logit(met * torch.atan(errors.exp())) - metres
    return slots[..., FACTOR] * torch.sigmoid(odds + math.log(LATTICE.odds))


def best_of_each(
    sent: dict[str, Tensor], own: Tensor, slots: Tensor, sure: Tensor, count: int
) -> Tensor:
    """The rays that stay (m,), as places in (R * S,): see `lattice.best_of_each`.

    One sort: by object, then likely before unlikely, tiers, and how sure; or evenly in the last
    tier. Keys of object o lie in [8 o - 5, 8 o + 2].
    """
    even = (own[:, SHARE, None] + slots[..., SPREAD]).frac()
    key = own[:, OWNER, None].double() + slots[..., ORDER]
    # of weights that training has broken, too, each object gets its count
    key = key - torch.lerp(sure, even, slots[..., TIER]).nan_to_num(0.0)
    key = torch.add(key, sure.abs() >= LATTICE.likely, alpha=-4)
    ordered, order = key.flatten().sort(stable=True)
    first = torch.searchsorted(ordered, sent["first"].double()) - sent["begin"]  # (o,)
    each = torch.repeat_interleave(first, sent["new"], output_size=count)
    return order[each + torch.arange(count, device=sure.device)]


def points_of(own: Tensor, across, above, below, depth, column: float) -> Tensor:
    """Points (m, 3) about the sensor, of rays (m,) of anchors (m, 16) that end at depths (m,)."""
    azimuth = torch.add(own[:, AZIMUTH], across, alpha=column)
    elevation = torch.addcmul(own[:, ELEVATION], above, own[:, UP]).addcmul(below, own[:, DOWN])
    reach = torch.addcmul(own[:, DEPTH], depth, own[:, UP]).exp()
    level, z = torch.view_as_real(torch.polar(reach, elevation)).unbind(-1)
    xy = torch.view_as_real(torch.polar(level, azimuth))
    return torch.cat((xy, z[:, None]), dim=1)


def nearest_measured(near: Tensor, points: Tensor) -> Tensor:
    """Rows of the scan (m, 1): of measured points (m, k, 4) those nearest to points (m, 3)."""
    least = torch.linalg.vector_norm(near[..., :3] - points[:, None], dim=-1)
    return near[..., 3].gather(1, least.argmin(1, keepdim=True))
