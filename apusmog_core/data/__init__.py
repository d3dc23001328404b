# SPDX-License-Identifier: Apache-2.0
"""Where clouds come from: one loader a file, `open_scans` for any of them."""

from __future__ import annotations

from pathlib import Path

from .bags import BagScans
from .clouds import READERS, Scan, ScanFiles, read_points, write_points
from .kitti import KittiDrive

__all__ = ["Scan", "ScanFiles", "KittiDrive", "BagScans", "open_scans"]
__all__ += ["read_points", "write_points"]


def open_scans(path: str | Path, topic: str = "") -> ScanFiles | BagScans:
    """Anything with scans in it, as a sized iterable of `Scan`.

    A KITTI raw drive or odometry sequence, a folder of .bin, .pcd, .ply, .npy or .xyz files, one
    such file, a rosbag2 (folder, .db3 or .mcap) or a ROS 1 .bag; `topic` chooses one of a bag's.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if is_bag(path):
        return BagScans(path, topic)
    if path.is_file():
        if path.suffix.lower() not in READERS:
            raise ValueError(f"{path}: unknown kind of file; known: {', '.join(READERS)} and bags")
        return ScanFiles([path])
    if is_kitti(path):
        return KittiDrive(path)
    if not path.is_dir():
        raise ValueError(f"{path}: neither a regular file nor a folder")
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in READERS)
    if not files:
        raise ValueError(
            f"{path}: no scans here; expected a KITTI drive or sequence, a bag, "
            f"or files of kind {', '.join(READERS)}"
        )
    return ScanFiles(files)


def is_bag(path: Path) -> bool:
    return path.suffix in (".bag", ".db3", ".mcap") or (path / "metadata.yaml").is_file()


def is_kitti(path: Path) -> bool:
    return (path / "velodyne_points" / "data").is_dir() or (path / "velodyne").is_dir()


def is_recording(path: Path) -> bool:
    """Whether it is a bag or a drive, and not a cloud or a folder of clouds."""
    return is_bag(path) or is_kitti(path)
