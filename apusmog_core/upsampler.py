# SPDX-License-Identifier: Apache-2.0
"""Any cloud, any ratio -> exactly round(ratio * n) points: by rays, or on the paper's sphere."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from .compute import parse_device
from .dense import Dense
from .geometry import farthest
from .model import ApuSmog
from .sensor.grow import RayUpsampler
from .sensor.view import ObjectScan
from .surface.grow import SurfaceUpsampler
from .weights import load_network

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
        self._place(network.eval().requires_grad_(False), torch.device(device))

    def _place(self, network: ApuSmog, device: torch.device) -> None:
        way = RayUpsampler if self.config.domain == "sensor" else SurfaceUpsampler
        self.way = way(network, device, self.dtype)

    @property
    def network(self) -> ApuSmog:
        return self.way.network

    @property
    def device(self) -> torch.device:
        return self.way.device

    @property
    def threads(self) -> int:
        return getattr(self.way, "threads", 1)

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
        return [dense.points for dense in self.upsample_to(clouds, counts, keep_measured, origin)]

    def upsample_to(
        self,
        clouds: Sequence[np.ndarray],
        counts: Sequence[int],
        keep_measured: bool = False,
        origin: Sequence[float] | None = None,
    ) -> list[Dense]:
        """Exactly counts[i] points for cloud i, each with the confidence of the network."""
        clouds = [check_cloud(c) for c in clouds]
        origin = self._checked_origin(origin)
        results: list[Dense | None] = [None] * len(clouds)
        grow = []
        for i, (cloud, count) in enumerate(zip(clouds, counts, strict=True)):
            if count <= len(cloud) and (keep_measured or count < len(cloud)):
                fewer = np.sort(farthest(cloud - cloud.mean(axis=0), count))
                results[i] = Dense.measured(cloud[fewer])
            else:
                grow.append(i)
        if grow:
            many = [clouds[i] for i in grow]
            dense = self._grow(many, [counts[i] for i in grow], keep_measured, origin)
            for i, result in zip(grow, dense, strict=True):
                results[i] = result
        return [
            replace(r, points=_as_stored(r.points, c)) for r, c in zip(results, clouds, strict=True)
        ]

    def upsample_scan(self, scan: ObjectScan, counts: Sequence[int]) -> list[Dense]:
        """The new points of each object of a scan, counts[i] of object i less its own."""
        return self.way.grow(scan, np.asarray(counts), True, self.seed)

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

    def _grow(self, clouds, counts, keep_measured, origin) -> list[Dense]:
        """More points than there are: the work proper."""
        try:
            if origin is not None:
                scan = ObjectScan.of_clouds(clouds, origin)
                grown = self.way.grow(scan, counts, keep_measured, self.seed)
                moved = [replace(dense, points=dense.points + origin) for dense in grown]
                if not keep_measured:
                    return moved
                pairs = zip(clouds, moved, strict=True)
                return [Dense.concatenate((Dense.measured(c), dense)) for c, dense in pairs]
            pairs = zip(clouds, counts, strict=True)
            return [self.way.grow(c, n, keep_measured, self.seed) for c, n in pairs]
        except torch.cuda.OutOfMemoryError:
            return self._with_less_memory(clouds, counts, keep_measured, origin)

    def _with_less_memory(self, clouds, counts, keep_measured, origin) -> list[Dense]:
        """Half the clouds at a time; a single one that does not fit goes to the CPU."""
        torch.cuda.empty_cache()
        half = len(clouds) // 2
        if half:
            warnings.warn("CUDA out of memory: the batch is halved", stacklevel=2)
            first = self._grow(clouds[:half], counts[:half], keep_measured, origin)
            return first + self._grow(clouds[half:], counts[half:], keep_measured, origin)
        warnings.warn("CUDA out of memory: on the CPU from now on", stacklevel=2)
        self._place(self.network, torch.device("cpu"))
        return self._grow(clouds, counts, keep_measured, origin)


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
