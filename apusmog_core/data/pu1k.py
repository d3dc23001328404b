# SPDX-License-Identifier: Apache-2.0
"""Training patches of PU1K, as published (HDF5); PU-GAN's training file has the same layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def read_patches(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Input (m, 256, 3) and target (m, 1024, 3) patches, float32, in the file's coordinates."""
    try:
        import h5py
    except ImportError as error:
        raise ValueError(f"{path}: reading HDF5 needs h5py; pip install h5py") from error
    try:
        with h5py.File(path) as file:
            points, target = (_patches(file, path, size) for size in (256, 1024))
    except OSError as error:
        raise ValueError(f"{path}: not a readable HDF5 file ({error})") from error
    if len(points) != len(target):
        raise ValueError(f"{path}: {len(points)} input patches but {len(target)} targets")
    return points, target


def _patches(file, path: str | Path, size: int) -> np.ndarray:
    name = f"poisson_{size}"
    if name not in file:
        raise ValueError(f"{path}: no {name!r} in it, only {', '.join(file) or 'nothing'}")
    shape = file[name].shape
    if len(shape) != 3 or shape[1] != size or shape[2] < 3:
        raise ValueError(f"{path}: {name!r} is of shape {shape}, expected (m, {size}, 3)")
    return file[name][..., :3].astype(np.float32)  # some versions carry normals behind
