# SPDX-License-Identifier: Apache-2.0
"""A node that watches the upsampler: records what it publishes, counts, and sets its parameters."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from rcl_interfaces.srv import SetParameters
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.serialization import deserialize_message
from sensor_msgs.msg import PointCloud2

from apusmog_core.files import written_whole

from . import cloud

PATIENCE = 60.0  # seconds without any dense cloud that are a failure
QUEUE = 20


@dataclass(frozen=True, eq=False)
class Answer:
    """One dense cloud that came back; the fields that the page draws."""

    stamp: float  # seconds
    points: np.ndarray  # (m, 3)
    instance: np.ndarray  # (m,)
    generated: np.ndarray  # (m,) bool
    confidence: np.ndarray  # (m,)


class Watcher(Node):
    """Hands every cloud of `upsampler/dense` to a function, and its bytes to another."""

    def __init__(
        self,
        namespace: str,
        seen: Callable[[Answer], None],
        record: Callable[[int, bytes], None],
    ):
        super().__init__("watcher", namespace=namespace)
        self.answers = 0
        self.diagnostics: dict[str, str] = {}  # of the upsampler, the latest
        self._seen, self._record = seen, record
        self.create_subscription(PointCloud2, "upsampler/dense", self._on_dense, QUEUE, raw=True)
        self.create_subscription(DiagnosticArray, "/diagnostics", self._on_diagnostics, QUEUE)

    def _on_dense(self, raw: bytes) -> None:
        self._record(time.time_ns(), raw)
        msg = deserialize_message(raw, PointCloud2)
        rows = cloud.records(msg)
        points = np.stack([rows[axis] for axis in "xyz"], axis=1)
        stamp = msg.header.stamp.sec + 1e-9 * msg.header.stamp.nanosec
        generated, confidence = rows["generated"].astype(bool), rows["confidence"].copy()
        self._seen(Answer(stamp, points, rows["instance"].copy(), generated, confidence))
        self.answers += 1

    def _on_diagnostics(self, msg: DiagnosticArray) -> None:
        for status in msg.status:
            if status.name.startswith(self.get_namespace()):
                self.diagnostics = {pair.key: pair.value for pair in status.values}

    def set_parameter(self, node: str, name: str, value: object) -> None:
        """Set a parameter of another node through its service; ValueError with its reason."""
        service = f"{self.get_namespace()}/{node}/set_parameters"
        client = self.create_client(SetParameters, service)
        self.wait_until(client.service_is_ready, f"the service {service}")
        message = Parameter(name, value=value).to_parameter_msg()
        future = client.call_async(SetParameters.Request(parameters=[message]))
        self.wait_until(future.done, f"an answer of {service}")
        self.destroy_client(client)
        result = future.result().results[0]
        if not result.successful:
            raise ValueError(f"{node} refused {name} = {value}: {result.reason}")

    def wait_until(
        self,
        condition: Callable[[], object],
        what: str,
        children: tuple[subprocess.Popen, ...] = (),
    ) -> None:
        """Spin until the condition holds; RuntimeError when a child fails or nothing happens."""
        answers, end = -1, 0.0
        while not condition():
            for child in children:
                if child.poll():  # ended, and not well
                    raise RuntimeError(f"{child.args[3]} ended with code {child.returncode}")
            if answers != self.answers:
                answers, end = self.answers, time.monotonic() + PATIENCE
            if time.monotonic() > end:
                raise RuntimeError(f"waited {PATIENCE:g} s in vain for {what}")
            rclpy.spin_once(self, timeout_sec=0.05)


@contextmanager
def recording(path: Path, topic: str) -> Iterator[Callable[[int, bytes], None]]:
    """A new rosbag2 (mcap) of one topic of clouds; gives a function of a time and a message."""
    from rosbags.rosbag2 import StoragePlugin, Writer
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS2_JAZZY)
    with (
        written_whole(path) as place,
        Writer(place, version=9, storage_plugin=StoragePlugin.MCAP) as bag,
    ):
        connection = bag.add_connection(topic, "sensor_msgs/msg/PointCloud2", typestore=store)
        yield lambda stamp, raw: bag.write(connection, stamp, raw)
