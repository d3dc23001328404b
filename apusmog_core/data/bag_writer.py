# SPDX-License-Identifier: Apache-2.0
"""Clouds to a rosbag2: a KITTI drive with the usual names, or any records."""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from scipy.spatial.transform import Rotation

from ..files import check_new_folder, written_whole
from .clouds import read_bin
from .kitti import KittiDrive
from .pointcloud2 import DATATYPES

TOPIC = "/kitti/velo/pointcloud"
FRAME = "velo_link"
WORLD = "world"  # where the sensor stood in the first scan
FORMATS = ("mcap", "sqlite3")
KITTI_POINT = np.dtype([(name, "<f4") for name in ("x", "y", "z", "intensity")])


def convert(kitti_dir: str | Path, out: str | Path, format: str = "mcap") -> int:
    """Write a KITTI drive's scans, and its poses as /tf, to a new rosbag2; the number of scans."""
    if format not in FORMATS:
        raise ValueError(f"format: {format!r} is not one of {', '.join(FORMATS)}")
    check_new_folder(out)
    try:
        from rosbags.rosbag2 import StoragePlugin, Writer
        from rosbags.typesys import Stores, get_typestore
    except ImportError as error:
        raise ValueError("bags need rosbags: pip install rosbags") from error
    drive, plugin = KittiDrive(kitti_dir), StoragePlugin[format.upper()]
    try:
        with written_whole(out) as place, Writer(place, version=9, storage_plugin=plugin) as bag:
            written = _write_drive(drive, bag, get_typestore(Stores.ROS2_JAZZY))
            if not written:
                raise ValueError(f"{kitti_dir}: no scan could be read; no bag is written")
    except sqlite3.Error as error:  # a full disk, for one
        raise OSError(f"{out}: the bag could not be written ({error})") from error
    return written


def _write_drive(drive: KittiDrive, bag, store) -> int:
    """Scans and poses to an open bag; the number of scans that could be read."""

    def writer(topic: str, kind: str):
        connection = bag.add_connection(topic, kind, typestore=store)
        return lambda stamp, msg: bag.write(connection, stamp, store.serialize_cdr(msg, kind))

    write_cloud = writer(TOPIC, "sensor_msgs/msg/PointCloud2")
    if drive.poses is not None:
        write_pose = writer("/tf", "tf2_msgs/msg/TFMessage")
    written = 0
    for at, file in enumerate(drive.files):
        stamp = round(drive.stamps[at] * 1e9)
        try:
            data = read_bin(file)
        except (OSError, ValueError) as error:
            warnings.warn(f"skipped {file}: {error}", stacklevel=2)
            continue
        if drive.poses is not None:
            write_pose(stamp, _pose(store.types, stamp, drive.poses[at]))
        write_cloud(stamp, _cloud(store.types, stamp, FRAME, data.view(KITTI_POINT)[:, 0]))
        written += 1
    return written


@contextmanager
def cloud_writer(out: Path, topic: str) -> Iterator[Callable[[int, str, np.ndarray], None]]:
    """A new rosbag2 (mcap); gives a function of stamp in ns, frame and records (n,)."""
    from rosbags.rosbag2 import StoragePlugin, Writer
    from rosbags.typesys import Stores, get_typestore

    store, kind = get_typestore(Stores.ROS2_JAZZY), "sensor_msgs/msg/PointCloud2"
    with Writer(out, version=9, storage_plugin=StoragePlugin.MCAP) as bag:
        connection = bag.add_connection(topic, kind, typestore=store)

        def write(stamp: int, frame: str, records: np.ndarray) -> None:
            message = _cloud(store.types, stamp, frame, records)
            bag.write(connection, stamp, store.serialize_cdr(message, kind))

        yield write


def _header(types: dict, stamp: int, frame: str):
    time = types["builtin_interfaces/msg/Time"](*divmod(stamp, 10**9))
    return types["std_msgs/msg/Header"](time, frame)


def _cloud(types: dict, stamp: int, frame: str, records: np.ndarray):
    """A message of little-endian records (n,)."""
    kind = types["sensor_msgs/msg/PointField"]
    codes = {name: code for code, name in DATATYPES.items()}
    layout = [(name, *records.dtype.fields[name][:2]) for name in records.dtype.names]
    return types["sensor_msgs/msg/PointCloud2"](
        header=_header(types, stamp, frame),
        height=1,
        width=len(records),
        fields=[kind(name, offset, codes[of.str[1:]], 1) for name, of, offset in layout],
        is_bigendian=False,
        point_step=records.itemsize,
        row_step=records.nbytes,
        data=np.frombuffer(records.tobytes(), np.uint8),
        is_dense=True,
    )


def _pose(types: dict, stamp: int, pose: np.ndarray):
    transform = types["geometry_msgs/msg/Transform"](
        types["geometry_msgs/msg/Vector3"](*map(float, pose[:3, 3])),
        types["geometry_msgs/msg/Quaternion"](*Rotation.from_matrix(pose[:3, :3]).as_quat()),
    )
    stamped = types["geometry_msgs/msg/TransformStamped"](
        _header(types, stamp, WORLD), FRAME, transform
    )
    return types["tf2_msgs/msg/TFMessage"]([stamped])
