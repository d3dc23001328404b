# SPDX-License-Identifier: Apache-2.0
"""How long a typical scan or cloud takes, here or on a GPU: `device: auto` and `apusmog bench`."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import numpy as np
import torch

from .sensor.view import ObjectScan

RATIO = 4.0
REPEATS = 5
MOUNTED = 1.73  # metres above the road


def typical_scan() -> ObjectScan:
    """A street as a sensor with 64 rings sees it: 120 things of the size of a car on flat ground.

    About 130,000 returns, 20,000 of them of objects; a scan of KITTI has hardly more.
    """
    elevation, azimuth = np.radians(np.linspace(-24.8, 2.0, 64)), np.linspace(-np.pi, np.pi, 2048)
    down = np.sin(np.minimum(elevation, -1e-3))[:, None]
    reach = np.minimum(-MOUNTED / down, 80.0) + 0 * azimuth
    instance = np.zeros(reach.shape, np.int64)
    for number in range(120):
        columns = slice(17 * number, 17 * number + 15)
        distance = 5.0 + 45.0 * ((number * 0.618) % 1)
        low, high = np.arctan((np.array([0.15, 1.7]) - MOUNTED) / distance)
        rings = (elevation > low) & (elevation < high)
        ripple = 0.3 * np.cos(np.arange(15.0)) + 0.1 * np.sin(np.arange(64))[rings, None]
        instance[rings, columns] = number + 1
        reach[rings, columns] = distance + ripple
    level = reach * np.cos(elevation)[:, None]
    z = reach * np.sin(elevation)[:, None]
    points = np.stack((level * np.cos(azimuth), level * np.sin(azimuth), z), axis=-1)
    ring = np.repeat(np.arange(64), reach.shape[1])
    numbers = np.unique(instance, return_inverse=True)[1].reshape(-1)  # without gaps
    points = points.reshape(-1, 3).astype(np.float32)
    return ObjectScan(points, numbers, ring, points[:, 2] + MOUNTED)


def typical_cloud() -> ObjectScan:
    """2048 points of a bumpy ball."""
    rays = np.random.default_rng(0).normal(size=(2048, 3))
    rays /= np.linalg.norm(rays, axis=1, keepdims=True)
    return ObjectScan.of_clouds([rays * (1 + 0.1 * np.sin(5 * rays[:, :1]))], np.zeros(3))


def typical(domain: str) -> ObjectScan:
    """What networks of a domain are made for."""
    return typical_scan() if domain == "sensor" else typical_cloud()


def milliseconds(way, scan: ObjectScan, ratio: float = RATIO, repeats: int = REPEATS) -> float:
    """Least time that a way of growing takes for the new points of a scan; it is warm then."""
    sizes = np.bincount(scan.instance)[1:]
    new = np.round((ratio - 1) * sizes).astype(np.int64)
    way.grow(scan, new, True)
    return min(_once(way, scan, new) for _ in range(repeats))


def _once(way, scan: ObjectScan, new: np.ndarray) -> float:
    start = time.perf_counter()
    way.grow(scan, new, True)  # ends with a download, which waits for all
    return 1e3 * (time.perf_counter() - start)


# --- what to send us ------------------------------------------------------------------------------


def machine(device: torch.device) -> dict[str, Any]:
    """Where figures were measured."""
    found = {
        "device": str(device),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "cuda": torch.version.cuda,
        }
    return found


def measure(upsampler, ratio: float) -> dict[str, Any]:
    """Milliseconds and new points a second of an upsampler's typical input, or why not."""
    scan, device = typical(upsampler.config.domain), upsampler.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    points = int(np.count_nonzero(scan.instance))
    row = {
        "device": str(device),
        "precision": str(upsampler.dtype).removeprefix("torch."),
        "way": type(upsampler.way).__name__,
        "ratio": ratio,
        "points": points,
    }
    try:
        took = milliseconds(upsampler.way, scan, ratio)
    except RuntimeError as error:  # no room, or no such arithmetic: other rows may do
        return row | {"error": str(error).splitlines()[0]}
    row |= {
        "ms": round(took, 2),
        "new_points_per_second": round(1e3 * (ratio - 1) * points / took),
    }
    if device.type == "cuda":
        row["peak_mb"] = round(torch.cuda.max_memory_allocated(device) / 1e6)
    return row
