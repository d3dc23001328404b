# SPDX-License-Identifier: Apache-2.0
"""PointCloud2 messages of rosbag2 (sqlite3, mcap) and ROS 1 bags as scans, without ROS."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from .clouds import Scan, keep_finite, other_fields
from .expansion import bound_rosbags
from .pointcloud2 import decode, structured

POINT_CLOUD = "sensor_msgs/msg/PointCloud2"  # rosbags gives ROS 1 types ROS 2 names


class BagScans:
    """One topic of a bag as scans; iterating skips a bad message, with a warning, and counts it."""

    def __init__(self, path: str | Path, topic: str = ""):
        self.path = Path(path)
        self.skipped = 0  # of the latest iteration
        with self._open() as reader:
            counts: dict[str, int] = {}
            for connection in reader.connections:
                if connection.msgtype == POINT_CLOUD:
                    counts[connection.topic] = counts.get(connection.topic, 0) + connection.msgcount
        if not counts:
            raise ValueError(f"{self.path}: the bag has no topic of type {POINT_CLOUD}")
        if topic and topic not in counts:
            raise ValueError(f"{self.path}: no clouds on {topic}; there are: {', '.join(counts)}")
        self.topic = topic or max(counts, key=lambda name: counts[name])
        self.count = counts[self.topic]
        files = self.path.rglob("*") if self.path.is_dir() else [self.path]
        size = sum(file.stat().st_size for file in files if file.is_file())
        if self.count > size:
            raise ValueError(f"{self.path}: {size} bytes announce {self.count} messages")

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Scan]:
        self.skipped = 0
        with self._open() as reader:
            chosen = [
                c for c in reader.connections if (c.topic, c.msgtype) == (self.topic, POINT_CLOUD)
            ]
            for index, (connection, raw) in enumerate(self._messages(reader, chosen)):
                try:
                    scan = _scan(reader.deserialize(raw, connection.msgtype), f"{index:010d}")
                except Exception as error:  # a broken message may fail anywhere in its decoder
                    self._skip(1, f"message {index} of {self.topic}: {error}")
                    continue
                yield scan

    def _messages(self, reader, connections) -> Iterator[tuple[object, bytes]]:
        """Messages as bytes, as far as the bag can be read."""
        messages, index = reader.messages(connections=connections), 0
        while True:
            try:
                connection, _, raw = next(messages)
            except StopIteration:
                return
            except Exception as error:  # a damaged bag may fail anywhere in its reader
                left = max(self.count - index, 1)
                self._skip(left, f"unreadable from message {index} of {self.topic} on: {error}")
                return
            index += 1
            yield connection, raw

    def _skip(self, count: int, why: str) -> None:
        self.skipped += count
        warnings.warn(f"skipped {self.path}, {why}", stacklevel=3)

    @contextmanager
    def _open(self):
        try:
            from rosbags.highlevel import AnyReader
            from rosbags.typesys import Stores, get_typestore
        except ImportError as error:
            raise ValueError(f"{self.path}: bags need rosbags: pip install rosbags") from error
        with suppress(ImportError, AttributeError):  # another version: as it is
            bound_rosbags()
        try:
            # old rosbag2 recordings do not carry their message definitions
            reader = AnyReader([self.path], default_typestore=get_typestore(Stores.ROS2_JAZZY))
            reader.open()
        except Exception as error:  # a damaged bag may fail anywhere in its reader
            raise ValueError(f"{self.path}: not a readable bag ({error})") from error
        try:
            yield reader
        finally:
            reader.close()


def _scan(message, name: str) -> Scan:
    layout = (
        [(field.name, field.offset, field.datatype, field.count) for field in message.fields],
        message.height,
        message.width,
        message.point_step,
        message.row_step,
        message.is_bigendian,
        message.data,
    )
    points, intensity, ring, dropped = decode(*layout)
    records = structured(*layout).reshape(-1)
    fields = other_fields(records)
    if dropped:
        with np.errstate(over="ignore"):
            everything = np.stack([records[axis].astype(np.float32) for axis in "xyz"], axis=1)
        fields = keep_finite(everything, fields)
    time = message.header.stamp
    return Scan(
        points,
        intensity,
        ring,
        time.sec + 1e-9 * time.nanosec,
        name,
        dropped,
        fields,
        message.header.frame_id,
        time.sec * 10**9 + time.nanosec,
    )
