# SPDX-License-Identifier: Apache-2.0
"""Any cloud, any ratio -> exactly round(ratio * n) points: by rays, or on the paper's sphere."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from pathlib import Path

import numpy as np
import torch

from .compute import check_memory, parse_device, parse_precision
from .dense import Dense, check_ratio
from .geometry import farthest
from .model.network import ApuSmog
from .pace import milliseconds, typical
from .segment.cluster import rows_by_label
from .sensor.device import DeviceRays
from .sensor.grow import RayUpsampler
from .sensor.view import ObjectScan
from .surface.device import DeviceSurface
from .surface.grow import SurfaceUpsampler
from .weights import build_network, load_network

Way = RayUpsampler | DeviceRays | SurfaceUpsampler
Grow = Callable[[Way, np.ndarray], Dense]

CPU = torch.device("cpu")
BYTES_PER_POINT = {"sensor": 300, "canonical": 4000}  # of output, at the peak, with some reserve
EXACT_IN_FLOAT32 = 8192.0  # metres: beyond, float32 loses the millimetre
OUTLIER = 1000.0  # sizes of a cloud: a point farther away takes the digits of the others
SENSOR_REACH = 300.0  # sizes of a cloud, or metres: farther away it is one point


class Upsampler:
    """A trained network and what it needs to upsample whole clouds."""

    def __init__(
        self,
        network: ApuSmog,
        device: str | torch.device = "auto",
        seed: int = 0,
        precision: str = "float32",
        denoise: bool = True,
        compiled: bool = True,
    ):
        """`denoise` is for noisy clouds without viewpoint, of 1024 points and more; without
        `compiled` PyTorch runs the LiDAR network on a CPU, too, slower but at once. `auto` is the
        CPU where there is no GPU; else both are tried, and `choice` says what was found."""
        self.config = network.config
        self.seed = seed
        self.dtype = parse_precision(precision)
        self.denoise = denoise
        self.compiled = compiled
        self.choice = ""
        network = network.eval().requires_grad_(False)
        wanted = parse_device(device) if isinstance(device, str) else device
        if device == "auto" and wanted.type == "cuda":
            self.way = self._faster(network, wanted)
        else:
            self.way = self._build(network, wanted, self.dtype)

    def _faster(self, network, cuda: torch.device) -> Way:
        """The way that is faster on a typical input: a CPU may well be, for so small a network."""
        here, scan = self._build(deepcopy(network), CPU, self.dtype), typical(self.config.domain)
        took = milliseconds(here, scan)
        try:
            there = self._build(network, cuda, self.dtype)
            took_there = milliseconds(there, scan)
        except RuntimeError as error:  # a driver or a GPU that PyTorch does not fit, or no memory
            self.choice = f"cpu ({cuda}: {str(error).splitlines()[0]})"
            return here
        pace = f"typical input: {took_there:.0f} ms on {cuda}, {took:.0f} ms on the CPU"
        best = there if took_there < took else here
        self.choice = f"{best.device} ({pace})"
        return best

    def _build(self, network, device, dtype) -> Way:
        if self.config.domain == "sensor":
            if self.compiled and RayUpsampler.serves(network, device, dtype):
                return RayUpsampler(network)
            return DeviceRays(network, device, dtype)
        kind = DeviceSurface if device.type == "cuda" else SurfaceUpsampler
        return kind(network, device, dtype, self.denoise)

    @property
    def network(self) -> ApuSmog:
        return self.way.network

    @property
    def device(self) -> torch.device:
        return self.way.device

    @classmethod
    def load(
        cls,
        name: str | Path,
        device: str = "auto",
        seed: int = 0,
        precision: str = "float32",
        denoise: bool = True,
    ) -> Upsampler:
        """Weights by the name they ship under, or from a file."""
        return cls(load_network(name), device, seed, precision, denoise)

    def upsample(
        self,
        points: np.ndarray,
        ratio: float,
        keep_measured: bool = False,
        origin: Sequence[float] | None = None,
    ) -> np.ndarray:
        """round(ratio * n) points on the surface that points (n, 3) show.

        `origin` is where the sensor stood, for clouds seen by one; alone in a call, a cloud does
        not grow beyond its own highest and lowest ring. `keep_measured` returns the
        measured points first, then new ones where they are missing. The result is float32, or
        float64 where the input is and float32 could not hold its millimetres.
        """
        return self.upsample_many([points], ratio, keep_measured, origin)[0]

    def upsample_many(
        self,
        clouds: Sequence[np.ndarray],
        ratio: float | Sequence[float],
        keep_measured: bool = False,
        origin: Sequence[float] | None = None,
    ) -> list[np.ndarray]:
        """`upsample` for several clouds at once, with one ratio or one for each."""
        ratios = [ratio] * len(clouds) if np.ndim(ratio) == 0 else list(ratio)
        if len(ratios) != len(clouds):
            raise ValueError(f"{len(ratios)} ratios for {len(clouds)} clouds")
        clouds = [check_cloud(c) for c in clouds]
        counts = [output_count(len(c), check_ratio(r)) for c, r in zip(clouds, ratios, strict=True)]
        origin = self._checked_origin(origin)
        for cloud in clouds:
            check_outliers(cloud) if origin is None else check_reach(cloud, origin)
        if not clouds:
            return []
        origin = np.zeros(3) if origin is None else origin
        dense = self.upsample_scan(ObjectScan.of_clouds(clouds, origin), counts, keep_measured)
        points, measured = dense.points + origin, ~dense.generated
        points[measured] = np.concatenate(clouds)[dense.source[measured]]  # bit by bit
        parts = np.split(points, np.cumsum(counts)[:-1])
        return [_as_stored(part, cloud) for part, cloud in zip(parts, clouds, strict=True)]

    def upsample_scan(
        self,
        scan: ObjectScan,
        counts: Sequence[int] | np.ndarray,
        keep_measured: bool = True,
        spread: str = "rings",
    ) -> Dense:
        """Exactly counts[i] points for object i + 1 of a scan, one object after the other.

        Measured points come first. What surrounds an object helps, where the network sees it.
        """
        check_memory(sum(map(int, counts)), BYTES_PER_POINT[self.config.domain])
        counts = np.asarray(counts, np.int64)
        rows = rows_by_label(scan.instance)[1:]
        sizes = np.array([len(mine) for mine in rows], np.int64)
        grows = counts > sizes if keep_measured else counts >= sizes
        new = np.where(grows, counts - keep_measured * sizes, 0)

        def grow(way: Way, objects: np.ndarray) -> Dense:
            some = scan if len(objects) == len(new) else scan.only(objects + 1)
            return way.grow(some, new[objects], keep_measured, self.seed, spread)

        pairs = zip(rows, counts - new, strict=True)
        kept = [
            mine if count == len(mine) else mine[_fewer(scan.points[mine], count)]
            for mine, count in pairs
        ]
        parts = [Dense.measured(scan.points, np.concatenate([*kept, np.zeros(0, np.int64)]))]
        if grows.any():
            parts.append(self._within_memory(grow, np.flatnonzero(grows)))
        dense = Dense.concatenate(parts)
        if not (np.isfinite(dense.points).all() and np.isfinite(dense.confidence).all()):
            raise ValueError("the network made points that are not finite: are the weights sound?")
        return dense.by_object(scan.instance)

    def _within_memory(self, grow: Grow, objects: np.ndarray) -> Dense:
        """Half of the objects at a time where the GPU is full; one that does not fit, on a CPU."""
        with suppress(torch.cuda.OutOfMemoryError):
            return grow(self.way, objects)
        torch.cuda.empty_cache()  # here, where no traceback keeps the failed batch alive
        half = len(objects) // 2
        if half:
            warnings.warn("CUDA out of memory: the batch is halved", stacklevel=2)
            parts = (objects[:half], objects[half:])
            return Dense.concatenate([self._within_memory(grow, part) for part in parts])
        warnings.warn("CUDA out of memory: one cloud is upsampled on the CPU", stacklevel=2)
        return grow(self._on_cpu(), objects)

    def _on_cpu(self) -> Way:
        """A copy there, which nobody waits for to be compiled; the one on the GPU stays for
        others, and nothing more is allocated on it."""
        with torch.random.fork_rng(devices=()):  # what its first weights are does not matter
            network = build_network(self.config)
        network.load_state_dict({n: value.cpu() for n, value in self.network.state_dict().items()})
        other = copy(self)
        other.compiled = False
        return other._build(network.eval().requires_grad_(False), CPU, torch.float32)

    def _checked_origin(self, origin: Sequence[float] | None) -> np.ndarray | None:
        if self.config.domain != "sensor":
            return None
        if origin is None:
            raise ValueError(
                "these weights see the cloud from a sensor: say where it stood, origin=(x, y, z) "
                "or --origin X Y Z; or use weights for clouds without viewpoint, such as 'shape'"
            )
        place = np.asarray(origin, np.float64)
        if place.shape != (3,) or not np.isfinite(place).all():
            raise ValueError(f"origin: expected three finite numbers, got {origin!r}")
        return place


# --- checks --------------------------------------------------------------------------------------


def _fewer(cloud: np.ndarray, count: int) -> np.ndarray:
    """Which `count` points of a cloud to keep, in their order: far from each other."""
    return np.sort(farthest(cloud - cloud.mean(axis=0), count))


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


def check_outliers(cloud: np.ndarray) -> None:
    """ValueError names points so far away that the network would lose the shape of the others."""
    away = np.linalg.norm(cloud - np.median(cloud, axis=0), axis=1)
    typical = np.sort(away)[9 * (len(away) - 1) // 10]
    far = np.flatnonzero(away > OUTLIER * typical) if typical > 0 else ()
    if len(far):
        place = ", ".join(f"{value:g}" for value in cloud[far[0]])
        raise ValueError(
            f"{len(far)} of {len(cloud)} points, such as number {far[0]} at ({place}), lie more "
            f"than {OUTLIER:g} times the size of the cloud away from it: remove them first"
        )


def check_reach(cloud: np.ndarray, origin: Sequence[float]) -> None:
    """ValueError if no sensor at `origin` could tell the points of the cloud apart."""
    size = max(float(np.ptp(cloud, axis=0).max()), 1.0)
    nearest = np.abs(cloud - np.asarray(origin, np.float64)).max(axis=1).min()
    if nearest > SENSOR_REACH * size:
        raise ValueError(
            f"origin: {nearest:.3g} m away from a cloud of {size:.3g} m, which no sensor sees: "
            "give the sensor's place in the coordinates of the cloud"
        )


def _as_stored(result: np.ndarray, cloud: np.ndarray) -> np.ndarray:
    large = len(cloud) and np.abs(cloud).max() >= EXACT_IN_FLOAT32
    return result if large else result.astype(np.float32)
