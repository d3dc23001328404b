# SPDX-License-Identifier: Apache-2.0
"""PointCloud2 messages of rosbag2 (sqlite3, mcap) and ROS 1 bags as scans, without ROS."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .clouds import Scan, keep_finite, other_fields
from .expansion import bound_rosbags
from .pointcloud2 import columns, decode, structured

LONGEST_REASON = 200  # characters
POINT_CLOUD = "sensor_msgs/msg/PointCloud2"  # rosbags gives ROS 1 types ROS 2 names


class Unreadable(ValueError):
    """The rest of a bag, and how many messages are missing with it."""

    def __init__(self, messages: int, reason: Exception):
        super().__init__(f"the bag is unreadable from here on, {messages} missing: {reason}")
        self.messages = messages


class BagScans:
    """One topic of a bag as scans; iterating skips a bad message, with a warning, and counts it."""

    def __init__(self, path: str | Path, topic: str = ""):
        self.path = Path(path)
        self.skipped = 0  # of the latest iteration
        files = list(self.path.rglob("*")) if self.path.is_dir() else [self.path]
        for file in files:
            if file.exists() and not (file.is_file() or file.is_dir()):
                raise ValueError(f"{file}: not a regular file")  # a pipe could wait for ever
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
        size = sum(file.stat().st_size for file in files if file.is_file())
        if self.count > size:
            raise ValueError(f"{self.path}: {size} bytes announce {self.count} messages")

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Scan]:
        self.skipped = 0
        for index, (_, message) in enumerate(self.messages()):
            try:
                if isinstance(message, Exception):
                    raise message
                scan = _scan(message, f"{index:010d}")
            except Exception as error:
                self.skipped += getattr(error, "messages", 1)
                why = f"message {index} of {self.topic}: {error}"
                warnings.warn(f"skipped {self.path}, {why}", stacklevel=2)
                continue
            yield scan

    def messages(self) -> Iterator[tuple[int, object]]:
        """(time of recording in ns, PointCloud2 as rosbags gives it) of the topic.

        Instead of a message that cannot be decoded comes the exception that says why, and
        `Unreadable` as the last where the bag cannot be read on.
        """
        stamp, index = 0, 0
        with self._open() as reader:
            chosen = [
                c for c in reader.connections if (c.topic, c.msgtype) == (self.topic, POINT_CLOUD)
            ]
            raws = reader.messages(connections=chosen)
            while True:
                try:
                    connection, stamp, raw = next(raws)
                except StopIteration:
                    return
                except Exception as error:  # a damaged bag may fail anywhere in its reader
                    yield stamp, Unreadable(max(self.count - index, 1), error)
                    return
                try:
                    message = reader.deserialize(raw, connection.msgtype)
                except Exception as error:  # a broken message may fail anywhere in its decoder
                    message = error
                index += 1
                yield stamp, message

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
            reason = str(error) or type(error).__name__
            reason = textwrap.shorten(reason, LONGEST_REASON)  # some quote half of the bag
            raise ValueError(f"{self.path}: not a readable bag ({reason})") from error
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
    cloud = structured(*layout)
    fields = other_fields(cloud.reshape(-1))
    if dropped:
        fields = keep_finite(columns(cloud)[0], fields)
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
