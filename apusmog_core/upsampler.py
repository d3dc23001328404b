# SPDX-License-Identifier: Apache-2.0
"""Any cloud, any ratio -> exactly round(ratio * n) points."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from .config import parse_device
from .geometry import (
    DEFAULT_STEPS,
    RayGrid,
    farthest,
    geodesic_patches,
    measure_steps,
    nearest,
    polar,
    wrap,
)
from .model import ApuSmog
from .weights import load_network

CHUNK = 2048  # points of a graph that are worked on at once; small enough for the CPU's caches
PATCH = 256  # points of a patch, for networks that attend to all of it
OVERSAMPLE = 2.0  # candidates for each new point
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
        self.network = network.eval().requires_grad_(False).to(device)
        self.config = network.config
        self.device = torch.device(device)
        self.seed = seed
        self.dtype = getattr(torch, precision)

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

        `origin` is where the sensor stood, for clouds seen by one. `keep_input` returns the
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
                "these weights see the cloud from a sensor: pass origin=(x, y, z), "
                "or load weights for clouds seen from nowhere, such as 'default'"
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
        self.device = torch.device("cpu")
        self.network.to(self.device)
        return self._grow(clouds, counts, keep_input, eye)

    # --- clouds seen by a sensor ---

    def _grow_rays(self, clouds, counts, keep_input, eye) -> list[np.ndarray]:
        """All objects of a scan as one graph on the sensor's grid of rays."""
        sizes = np.array([len(c) for c in clouds])
        grids, grid = scan_grid(clouds, eye)
        new = np.array(counts) - (sizes if keep_input else 0)
        per = max(LEAST_CANDIDATES, int(np.ceil(OVERSAMPLE * (new / sizes).max())))
        shapes = [choice_metric(g, c / n) for g, c, n in zip(grids, counts, sizes, strict=True)]
        levels = np.array([(max(1, round(across)), max(2, round(up))) for across, up in shapes])
        candidates, confidence = self._cast(grid, sizes, grids, levels, per)
        starts = np.concatenate(([0], np.cumsum(sizes)))
        results = []
        for i, cloud in enumerate(clouds):
            rows = slice(starts[i], starts[i + 1])
            found = candidates[rows].reshape(-1, 3)
            measured = grid[rows, :2] if keep_input else np.zeros((0, 2))
            spread = found[:, :2] * shapes[i]
            chosen = choose(spread, confidence[rows].ravel(), measured * shapes[i], new[i])
            dense = grids[i].to_points(found[chosen])
            results.append(np.concatenate((cloud, dense)) if keep_input else dense)
        return results

    def _cast(self, grid, sizes, grids: list[RayGrid], levels: np.ndarray, per: int):
        """Candidates (n, per, 3) in grid steps from the mixture, and how likely each is right."""
        cloud = np.repeat(np.arange(len(sizes)), sizes)
        near = neighbours_within(grid, cloud, self.config.neighbours)
        context = scan_context(grid, grids, sizes)
        centre = (np.add.reduceat(grid, np.cumsum(sizes) - sizes) / sizes[:, None])[cloud]
        local = (grid - centre).astype(np.float32)
        gaps = ring_gaps(local, near)
        points, near, context, gaps, levels = (
            torch.from_numpy(a)[None].to(self.device)
            for a in (local, near, context, gaps, levels[cloud].astype(np.float32))
        )
        with torch.inference_mode(), self._autocast():
            encoded = self.network.encode(points, near, context, CHUNK)
            rays = self.network.sample(self.network.mixture(encoded), self._noise(len(grid), per))
            rays = snap_to_lattice(rays, gaps, levels)
            out = self.network.decode(encoded, rays, CHUNK // 2)
            sure = confidence(out.hit, out.log_scale)
        found = out.coarse.float().cpu().numpy().astype(np.float64).reshape(len(grid), per, 3)
        return found + centre[:, None], sure.float().cpu().numpy().reshape(len(grid), per)

    # --- clouds seen from nowhere ---

    def _grow_surface(self, cloud: np.ndarray, count: int, keep_input: bool) -> np.ndarray:
        centre = cloud.mean(axis=0)
        local = (cloud - centre).astype(np.float32)
        new = count - (len(cloud) if keep_input else 0)
        per = max(
            LEAST_CANDIDATES,
            int(np.ceil(OVERSAMPLE * new / len(cloud) / self.config.component_share)),
        )
        if self.config.attention == "global":
            found = self._patches(local, per)
        else:
            found = self._decode(local[None], nearest(local, self.config.neighbours)[None], per)[0]
        if keep_input:
            order = farthest_from(found, local, new)
            return np.concatenate((cloud, found[order] + centre))
        return found[farthest(found, count)] + centre

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
        """Even normal noise (1, K, per, 2): each component's own shift of one low-discrepancy set."""
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


# --- which candidates stay -----------------------------------------------------------------------


def choice_metric(grid: RayGrid, ratio: float) -> np.ndarray:
    """Scale of (azimuth, elevation) steps in which the chosen points are spread evenly.

    New rings come first; only where they would be closer than the points of a ring does the
    azimuth get denser too.
    """
    shape = grid.step_elevation / grid.step_azimuth
    rings = min(ratio, max(np.sqrt(ratio * shape), 1.0))
    return np.array([ratio / rings, rings])


def choose(
    candidates: np.ndarray, sure: np.ndarray, measured: np.ndarray, count: int
) -> np.ndarray:
    """Indices of `count` candidates (m, 2): the likely ones, spread far from all others."""
    enough = min(len(candidates), int(np.ceil(1.3 * count)))
    bar = min(0.5, np.partition(sure, -enough)[-enough]) if count else 0.0
    likely = np.flatnonzero(sure >= bar)
    return likely[farthest_from(candidates[likely], measured, count)]


def farthest_from(points: np.ndarray, others: np.ndarray, count: int) -> np.ndarray:
    """Indices of `count` points, each the farthest from `others` and those before it."""
    import fpsample

    if len(others) == 0:
        return farthest(points, count)
    together = np.concatenate((others, points)).astype(np.float32)
    start = np.arange(len(others)).tolist()
    found = fpsample.fps_sampling(together, len(others) + count, start_idx=start)
    return found[len(others) :].astype(np.int64) - len(others)


# --- rays ----------------------------------------------------------------------------------------

DEPTH_TOLERANCE = 0.5  # grid steps of depth by which a right answer may be off


def confidence(hit: torch.Tensor, log_scale: torch.Tensor) -> torch.Tensor:
    """Chance that the ray meets the object and the depth is within the tolerance."""
    close = -torch.expm1(-DEPTH_TOLERANCE * torch.exp(-log_scale.clamp(-5, 4)))
    return torch.sigmoid(hit) * close


def ring_gaps(grid: np.ndarray, near: np.ndarray) -> np.ndarray:
    """Steps (n, 2) to the measured rings above and below each point; one, where there is none."""
    away = grid[near, :2] - grid[:, None, :2]  # (n, k, 2)
    beside = np.abs(away[..., 0]) < 1.5
    up = np.where(beside & (away[..., 1] > 0.4), away[..., 1], np.inf).min(axis=1)
    down = np.where(beside & (away[..., 1] < -0.4), -away[..., 1], np.inf).min(axis=1)
    gaps = np.stack((up, down), axis=1)
    return np.where(gaps < 1.9, gaps, 1.0).astype(np.float32)


def snap_to_lattice(rays: torch.Tensor, gaps: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Rays (.., K, s, 2) to the nearest ray of a sensor with `levels` (.., K, 2) times the pattern.

    Between the measured rings nothing is known, and the middle of a gap is where a new point is
    worth most; along a ring new points stand above and below the measured ones.
    """
    across, rings = levels[..., :1], levels[..., 1:]
    gap = torch.where(rays[..., 1] > 0, gaps[..., :1], gaps[..., 1:])  # (.., K, s)
    share = torch.round(rays[..., 1].abs() / gap * rings) / rings
    up = torch.sign(rays[..., 1]) * gap * share.clamp(1 / rings, 1 - 1 / rings)
    side = torch.round(rays[..., 0] * across) / across
    return torch.stack((side * (across > 1), up), dim=-1)


# --- the grid of a scan --------------------------------------------------------------------------


def scan_grid(clouds: Sequence[np.ndarray], eye: np.ndarray) -> tuple[list[RayGrid], np.ndarray]:
    """Each cloud's grid, and all points (n, 3) in grid steps."""
    grids, parts = [], []
    fallback = DEFAULT_STEPS
    seen = []
    for cloud in clouds:
        azimuth, elevation, _ = polar(cloud, eye)
        forward = float(np.arctan2(np.sin(azimuth).mean(), np.cos(azimuth).mean()))
        seen.append((forward, *measure_steps(wrap(azimuth - forward), elevation)))
    medians = [
        np.nanmedian(c) if np.isfinite(c).any() else f
        for c, f in zip(np.array(seen).T[1:], fallback, strict=True)
    ]
    for cloud, (forward, along, up) in zip(clouds, seen, strict=True):
        along = along if np.isfinite(along) else medians[0]
        up = max(up if np.isfinite(up) else medians[1], along)
        grid = RayGrid(eye, along, up, forward)
        grids.append(grid)
        parts.append(grid.to_grid(cloud))
    return grids, np.concatenate(parts)


def neighbours_within(grid: np.ndarray, cloud: np.ndarray, k: int) -> np.ndarray:
    """Nearest rays (n, k) among the points of the same cloud, itself first."""
    apart = np.stack((grid[:, 0] + cloud * 1e5, grid[:, 1]), axis=1)
    near = nearest(apart, k)
    return np.where(cloud[near] == cloud[:, None], near, np.arange(len(grid))[:, None])


def scan_context(grid: np.ndarray, grids: list[RayGrid], sizes: np.ndarray) -> np.ndarray:
    """What the network is told of the scale (n, 2): ln(metres between rings), ln(step ratio)."""
    up = np.repeat([g.step_elevation for g in grids], sizes)
    along = np.repeat([g.step_azimuth for g in grids], sizes)
    return np.stack((grid[:, 2] * up + np.log(up), np.log(up / along)), axis=1).astype(np.float32)


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
