# SPDX-License-Identifier: Apache-2.0
"""Any cloud, any ratio -> exactly round(ratio * n) points."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from .config import parse_device
from .geometry import farthest, geodesic_patches, nearest, search
from .machine import even_parts, in_threads
from .model import ApuSmog
from .model.compiled import CompiledApuSmog, supports
from .noise import clean, load_cleaner, settle
from .rays import (
    best_of_each,
    grid_context,
    judge,
    lattice,
    lattice_rays,
    ray_neighbours,
    ring_gaps,
    scan_grids,
    seen_elevations,
    to_points,
)
from .weights import load_network

CHUNK = 2048  # points of a graph that are worked on at once; small enough for the CPU's caches
PATCH = 256  # points of a patch, for networks that attend to all of it
BLOCK = 3072  # candidates that are spread out at once
OVERSAMPLE = 3.0  # candidates for each new point
NOISY_OVERSAMPLE = 6.0  # where noise was taken out: what it did along the surface is left
AREA_NEIGHBOURS = 6  # candidates whose distance tells how much area one of them stands for
LEAST_CANDIDATES = 4  # of each component, so that a small ratio has a choice too
EXACT_IN_FLOAT32 = 8192.0  # metres: beyond, float32 loses the millimetre


class Upsampler:
    """A trained network and what it needs to upsample whole clouds."""

    def __init__(
        self,
        network: ApuSmog,
        device: str | torch.device = "cpu",
        seed: int = 0,
        precision: str = "float32",
    ):
        self.config = network.config
        self.seed = seed
        self.dtype = getattr(torch, precision)
        self.cleaner = load_cleaner() if self.config.domain == "canonical" else None  # may be None
        # read once: while one scan is shared among threads, new ones see a count of one
        self.threads = torch.get_num_threads()
        self._place(network.eval().requires_grad_(False), torch.device(device))

    def _place(self, network: ApuSmog, device: torch.device) -> None:
        self.network, self.device = network.to(device), device
        plain = device.type == "cpu" and self.dtype == torch.float32 and supports(network)
        self._caster = CompiledApuSmog(self.network) if plain else self.network

    @classmethod
    def load(
        cls, name: str | Path, device: str = "auto", seed: int = 0, precision: str = "float32"
    ) -> Upsampler:
        """Weights by the name they ship under, or from a file."""
        return cls(load_network(name), parse_device(device), seed, precision)

    def upsample(
        self,
        points: np.ndarray,
        ratio: float,
        keep_input: bool = False,
        origin: Sequence[float] | None = None,
    ) -> np.ndarray:
        """round(ratio * n) points on the surface that points (n, 3) show.

        `origin` is where the sensor stood, for clouds seen by one; alone in a call, a cloud does
        not grow beyond its own highest and lowest ring. `keep_input` returns the
        measured points first, then new ones where they are missing. The result is float32, or
        float64 where the input is and float32 could not hold its millimetres.
        """
        return self.upsample_many([points], ratio, keep_input, origin)[0]

    def upsample_many(
        self,
        clouds: Sequence[np.ndarray],
        ratio: float | Sequence[float],
        keep_input: bool = False,
        origin: Sequence[float] | None = None,
    ) -> list[np.ndarray]:
        """`upsample` for several clouds at once, with one ratio or one for each."""
        clouds = [check_cloud(c) for c in clouds]
        ratios = [ratio] * len(clouds) if np.ndim(ratio) == 0 else list(ratio)
        if len(ratios) != len(clouds):
            raise ValueError(f"{len(ratios)} ratios for {len(clouds)} clouds")
        counts = [output_count(len(c), check_ratio(r)) for c, r in zip(clouds, ratios, strict=True)]
        eye = self._eye(origin)
        results: list[np.ndarray | None] = [None] * len(clouds)
        grow = []
        for i, (cloud, count) in enumerate(zip(clouds, counts, strict=True)):
            if count <= len(cloud) and (keep_input or count < len(cloud)):
                results[i] = cloud[np.sort(farthest(cloud - cloud.mean(axis=0), count))]
            else:
                grow.append(i)
        if grow:
            many = [clouds[i] for i in grow]
            dense = self._grow(many, [counts[i] for i in grow], keep_input, eye)
            for i, result in zip(grow, dense, strict=True):
                results[i] = result
        return [_as_stored(r, c) for r, c in zip(results, clouds, strict=True)]

    def _eye(self, origin: Sequence[float] | None) -> np.ndarray | None:
        if self.config.domain != "sensor":
            return None
        if origin is None:
            raise ValueError(
                "these weights see the cloud from a sensor: say where it stood, origin=(x, y, z) "
                "or --origin X Y Z; or use weights for clouds seen from nowhere, such as 'default'"
            )
        eye = np.asarray(origin, np.float64)
        if eye.shape != (3,) or not np.isfinite(eye).all():
            raise ValueError(f"origin: expected three finite numbers, got {origin!r}")
        return eye

    def _grow(self, clouds, counts, keep_input, eye) -> list[np.ndarray]:
        """More points than there are: the work proper."""
        try:
            if eye is not None:
                return self._grow_rays(clouds, counts, keep_input, eye)
            pairs = zip(clouds, counts, strict=True)
            return [self._grow_surface(c, n, keep_input) for c, n in pairs]
        except torch.cuda.OutOfMemoryError:
            return self._with_less_memory(clouds, counts, keep_input, eye)

    def _with_less_memory(self, clouds, counts, keep_input, eye) -> list[np.ndarray]:
        """Half the clouds at a time; a single one that does not fit goes to the CPU."""
        torch.cuda.empty_cache()
        half = len(clouds) // 2
        if half:
            warnings.warn("CUDA out of memory: the batch is halved", stacklevel=2)
            first = self._grow(clouds[:half], counts[:half], keep_input, eye)
            return first + self._grow(clouds[half:], counts[half:], keep_input, eye)
        warnings.warn("CUDA out of memory: on the CPU from now on", stacklevel=2)
        self._place(self.network, torch.device("cpu"))
        return self._grow(clouds, counts, keep_input, eye)

    # --- clouds seen by a sensor ---

    def _grow_rays(self, clouds, counts, keep_input, eye) -> list[np.ndarray]:
        """All objects of a scan as one graph on the sensor's grid of rays, or one for each core."""
        sizes = np.array([len(c) for c in clouds])
        grids, grid = scan_grids(clouds, eye)
        ratios = (np.array(counts) / sizes).tolist()
        steps = ((g.step_azimuth, g.step_elevation) for g in grids)
        levels = np.array([lattice(*s, ratio) for s, ratio in zip(steps, ratios, strict=True)])
        limits = seen_elevations(grid, grids, sizes)
        context = grid_context(grids, grid, sizes)
        begin = np.concatenate(([0], np.cumsum(sizes)))
        centres = np.add.reduceat(grid, begin[:-1]) / sizes[:, None]
        grid -= np.repeat(centres, sizes, axis=0)  # float32 is enough from here on
        limits -= centres[:, 1:2]

        new = np.array(counts) - (sizes if keep_input else 0)

        def cast(part: slice) -> np.ndarray:
            rows = slice(begin[part.start], begin[part.stop])
            given = (grid[rows], context[rows], sizes[part], levels[part], limits[part])
            found, sure, tier, owner = self._cast(*given, keep_input)
            chosen = best_of_each(owner, sure, tier, new[part], self.seed)
            if len(chosen) != new[part].sum():
                raise RuntimeError("a lattice with too few rays: please report this")
            return to_points(grids[part], found[chosen], new[part], centres[part])

        # a core for each part of the work is worth more than all cores for each operation
        parts = in_threads(
            cast, even_parts(sizes, self.threads if self.device.type == "cpu" else 1)
        )
        dense = np.split(np.concatenate(parts), np.cumsum(new)[:-1])
        if not keep_input:
            return dense
        return [np.concatenate(pair) for pair in zip(clouds, dense, strict=True)]

    def _cast(self, grid, context, sizes, levels, limits, keep_input):
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
        with torch.inference_mode(), self._autocast():
            encoded = self._caster.encode(points, index, scale, CHUNK)
            components = self._caster.components(encoded)[0].float().cpu().numpy()
            gaps = ring_gaps(local, near)
            for anchors, rays, tier in lattice_rays(gaps, levels[cloud], keep_input):
                chosen = torch.from_numpy(anchors).to(self.device)
                queries = torch.from_numpy(rays)[None].to(self.device)
                out = self._caster.decode_at(encoded, queries, chosen, CHUNK // 2)
                answers = (out.coarse, out.hit, out.log_scale)
                found, hit, log_scale = (t[0].float().cpu().numpy() for t in answers)
                asked = (rays, anchors, components, gap, cloud, limits)
                sure = judge(found, hit, log_scale, *asked)
                results.append((found, sure, tier.ravel(), cloud[anchors].repeat(rays.shape[1])))
        return (np.concatenate(column) for column in zip(*results, strict=True))

    # --- clouds seen from nowhere ---

    def _grow_surface(self, cloud: np.ndarray, count: int, keep_input: bool) -> np.ndarray:
        centre = cloud.mean(axis=0)
        measured = cloud - centre
        cleaned, noise = clean(measured, self.cleaner) if self.cleaner else (measured, 0.0)
        local = cleaned.astype(np.float32)
        new = count - (len(cloud) if keep_input else 0)
        wanted = (NOISY_OVERSAMPLE if noise else OVERSAMPLE) * new / len(cloud)
        per = max(LEAST_CANDIDATES, int(np.ceil(wanted / self.config.component_share)))
        if self.config.attention == "global":
            found = self._patches(local, per)
        else:
            found = self._decode(local[None], nearest(local, self.config.neighbours)[None], per)[0]
        fixed = measured.astype(np.float32) if keep_input else local[:0]
        if keep_input:
            chosen = found[farthest_from(found, fixed, new)]
        else:
            found = np.concatenate((local, found))  # none of those is nearer to tips and corners
            chosen = found[spread_out(found, count)]
        made = relax(chosen, found, fixed)
        if noise:
            made = settle(made, cleaned, measured, noise, self.cleaner, fixed)
        made = made + centre
        return np.concatenate((cloud, made)) if keep_input else made

    def _patches(self, points: np.ndarray, per: int) -> np.ndarray:
        index = geodesic_patches(points, PATCH)
        batch = max(1, CHUNK // index.shape[1])
        found = []
        for start in range(0, len(index), batch):
            patch = points[index[start : start + batch]]
            near = np.stack([nearest(p, self.config.neighbours) for p in patch])
            found.append(self._decode(patch, near, per).reshape(-1, 3))
        return np.concatenate(found)

    def _decode(self, patches: np.ndarray, near: np.ndarray, per: int) -> np.ndarray:
        """Candidates (B, K * per, 3) of patches (B, N, 3)."""
        points = torch.from_numpy(patches).to(self.device)
        local = self.config.attention == "local"
        with torch.inference_mode(), self._autocast():
            encoded = self.network.encode(
                points, torch.from_numpy(near).to(self.device), chunk=CHUNK if local else 0
            )
            mixture = self.network.mixture(encoded)
            noise = self._noise(mixture.mean.shape[1], per).expand(len(patches), -1, -1, -1)
            samples = self.network.sample(mixture, noise)
            out = self.network.decode(encoded, samples, CHUNK // 2 if local else 0)
        return out.fine.float().cpu().numpy()

    def _noise(self, components: int, per: int) -> torch.Tensor:
        """Even normal noise (1, K, per, 2): one low-discrepancy set, shifted for each component."""
        generator = torch.Generator().manual_seed(self.seed)
        shift = torch.rand(components, 1, 2, generator=generator)
        golden = 1.3247179572447460  # R2 sequence
        steps = torch.tensor([1 / golden, 1 / golden**2], dtype=torch.float64)
        base = (torch.arange(1, per + 1, dtype=torch.float64)[:, None] * steps).float()
        share = ((base + shift) % 1).clamp(0.005, 0.995)
        return torch.special.ndtri(share)[None].to(self.device)

    def _autocast(self):
        enabled = self.dtype != torch.float32
        return torch.autocast(
            self.device.type, dtype=self.dtype if enabled else None, enabled=enabled
        )


# --- choice -----------------------------------------------------------------------


def spread_out(points: np.ndarray, count: int) -> np.ndarray:
    """Indices of `count` points far from each other, in blocks that get their share of them.

    Blocks make it linear in time, and even at large: farthest point sampling of a whole cloud
    serves thin and curved parts less than others, which shifts its mean.
    """
    if len(points) <= BLOCK:
        return farthest(points, count)
    half = len(points) // 2
    order = np.argpartition(points[:, np.ptp(points, axis=0).argmax()], half)
    mine = round(count * half / len(points))
    sides = ((order[:half], mine), (order[half:], count - mine))
    return np.concatenate([side[spread_out(points[side], share)] for side, share in sides])


def farthest_from(points: np.ndarray, others: np.ndarray, count: int) -> np.ndarray:
    """Indices of `count` points far from `others` and from each other."""
    away, _ = search(others, points, 1)
    # Half of the best distance keeps clear of the others, and leaves enough to choose from.
    enough = min(len(points), max(count, len(points) // 2))
    clear = np.argpartition(-away, enough - 1)[:enough]
    return clear[spread_out(points[clear], count)]


def relax(chosen: np.ndarray, candidates: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """Moves each chosen point (m, 3) to the mean of the candidates that are nearest to it.

    That evens out their distances, and what the network does not know for sure. A candidate counts
    for the area it stands for, so that crowds of them do not pull. Points of `fixed` stay.
    """
    k = min(AREA_NEIGHBOURS + 1, len(candidates))
    area = search(candidates, candidates, [k])[0][:, 0] ** 2 + 1e-12
    nearest_one = search(np.concatenate((chosen, fixed)), candidates, 1)[1]
    count = len(chosen) + len(fixed)
    weight = np.bincount(nearest_one, area, minlength=count)[: len(chosen)]
    columns = [np.bincount(nearest_one, area * c, minlength=count) for c in candidates.T]
    total = np.stack(columns, axis=1)[: len(chosen)]
    alone = weight == 0  # duplicates of others
    return np.where(alone[:, None], chosen, total / np.where(alone, 1.0, weight)[:, None])


# --- checks --------------------------------------------------------------------------------------


def output_count(points: int, ratio: float) -> int:
    return round(ratio * points)


def check_cloud(points) -> np.ndarray:
    points = np.asarray(points)
    if points.ndim != 2 or points.shape[1] != 3:
        raise ValueError(f"expected points of shape (n, 3), got {points.shape}")
    if len(points) == 0:
        raise ValueError("the cloud is empty: there is nothing to upsample")
    if points.dtype.kind not in "fiu":
        raise ValueError(f"expected numbers, got an array of {points.dtype}")
    bad = len(points) - int(np.isfinite(points).all(axis=1).sum())
    if bad:
        raise ValueError(f"{bad} of {len(points)} points are not finite: remove them first")
    return points.astype(np.float64)


def check_ratio(ratio: float) -> float:
    ratio = float(ratio)
    if not np.isfinite(ratio) or ratio <= 0:
        raise ValueError(f"ratio: {ratio} is not a number above zero")
    return ratio


def _as_stored(result: np.ndarray, cloud: np.ndarray) -> np.ndarray:
    large = len(cloud) and np.abs(cloud).max() >= EXACT_IN_FLOAT32
    return result if large else result.astype(np.float32)
