# SPDX-License-Identifier: Apache-2.0
"""Transforms between frames, where tf2_ros is installed."""

from __future__ import annotations

import numpy as np
from rclpy.duration import Duration
from rclpy.node import Node
from rclpy.time import Time
from std_msgs.msg import Header

from . import cloud


class Frames:
    """Looks up where a scan lies in another frame; listens from the first time one is wanted."""

    def __init__(self, node: Node):
        self._node = node
        self._buffer = None

    def require(self, target_frame: str) -> None:
        """ValueError with the reason where transforms to this frame cannot be had at all."""
        if not target_frame or self._buffer is not None:
            return
        try:
            import tf2_ros
        except ImportError as error:
            raise ValueError(
                "target_frame: needs tf2_ros, which is not installed "
                "(it comes with a ROS installation, not from PyPI)"
            ) from error
        self._buffer = tf2_ros.Buffer(node=self._node)
        self._listener = tf2_ros.TransformListener(self._buffer, self._node)

    def lookup(self, target_frame: str, header: Header, patience: float) -> np.ndarray:
        """The (4, 4) matrix from the scan's frame, at its time; ValueError where it is missing.

        Waits for at most `patience` seconds, not in the thread that spins.
        """
        import tf2_ros

        stamp, wait = Time.from_msg(header.stamp), Duration(seconds=patience)
        try:
            found = self._buffer.lookup_transform(target_frame, header.frame_id, stamp, wait)
        except tf2_ros.TransformException as error:
            raise ValueError(
                f"no transform from {header.frame_id!r} to {target_frame!r}: {error}"
            ) from error
        return cloud.matrix(found.transform)
