# SPDX-License-Identifier: Apache-2.0
"""Small clouds that ship with the package, all simulated from built-in shapes: our own data.

`tools/sample_clouds.py` makes them. A scan is stored in polar coordinates as whole steps, each as
the difference to the point before: along a ring only the range changes, so that it packs well.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .data import write_points

STORED = Path(__file__).with_name("sample_clouds.npz")
RANGE_STEP = 0.005  # metres
ANGLE_STEP = np.pi / 32768  # radians: 0.005 degrees
INTENSITY_STEP = 0.01


def write_sample_clouds(out: str | Path) -> dict[Path, str]:
    """Write scans and objects as .pcd, the shape as .ply; what each file is."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    written = {}
    with np.load(STORED) as stored:
        for name in stored:
            if stored[name].dtype.kind == "f":
                path, columns = out / f"{name}.ply", dict(points=stored[name])
            else:
                path, columns = out / f"{name}.pcd", unpack(stored[name])
            write_points(path, **columns)
            fields = "x y z" if len(columns) == 1 else "x y z intensity ring"
            written[path] = f"{len(columns['points']):,} points, {fields}"
    return written


def pack(points: np.ndarray, intensity: np.ndarray, ring: np.ndarray) -> np.ndarray:
    """A scan (n, 3) as differences (5, n) int16 of range, azimuth, elevation, intensity, ring."""
    distance = np.linalg.norm(points, axis=1)
    azimuth = np.arctan2(points[:, 1], points[:, 0])
    elevation = np.arcsin(points[:, 2] / distance)
    rows = [distance / RANGE_STEP, azimuth / ANGLE_STEP, elevation / ANGLE_STEP]
    rows += [intensity / INTENSITY_STEP, ring]
    steps = np.rint(rows).astype(np.int64)
    return np.diff(steps, prepend=0, axis=1).astype(np.int16)  # an azimuth may wrap around


def unpack(packed: np.ndarray) -> dict[str, np.ndarray]:
    """Points (n, 3), intensity (n,) and ring (n,): what `write_points` takes."""
    steps = np.cumsum(packed, axis=1, dtype=np.int16)
    distance, azimuth, elevation, intensity, ring = steps
    distance = (distance.astype(np.uint16) * RANGE_STEP)[:, None]
    azimuth, elevation = azimuth * ANGLE_STEP, elevation * ANGLE_STEP
    level = np.cos(elevation)
    rays = np.stack([level * np.cos(azimuth), level * np.sin(azimuth), np.sin(elevation)], axis=1)
    return dict(
        points=(distance * rays).astype(np.float32),
        intensity=(intensity * INTENSITY_STEP).astype(np.float32),
        ring=ring.astype(np.uint16),
    )
