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

from apusmog_core.view import Dense

from . import cloud

PATIENCE = 60.0  # seconds without any message that are a failure
QUEUE = 20


@dataclass(frozen=True)
class Seen:
    """One dense cloud, counted."""

    ratio: float  # asked for
    instances: int
    measured: int
    points: int


class Watcher(Node):
    """Sees the scans on `points` and the answers on `upsampler/dense`, and records the answers."""

    def __init__(self, record: Callable[[int, bytes], None], keep: set[int], namespace: str):
        super().__init__("watcher", namespace=namespace)
        self.ratio = 0.0  # of the present pass
        self.seen: list[Seen] = []
        self.scans: dict[int, np.ndarray] = {}  # by stamp, those to keep
        self.dense: dict[int, dict[float, Dense]] = {}  # by stamp and ratio
        self.diagnostics: dict[str, str] = {}
        self._keep = keep  # numbers of the scans to keep, in order of arrival
        self._played: list[int] = []  # stamps of the present pass
        self._answered = -1  # the latest stamp that came back
        self._record = record
        self.create_subscription(PointCloud2, "points", self._on_scan, QUEUE)
        self.create_subscription(PointCloud2, "upsampler/dense", self._on_dense, QUEUE, raw=True)
        self.create_subscription(DiagnosticArray, "/diagnostics", self._on_diagnostics, QUEUE)

    # --- what it sees ---

    def _on_scan(self, msg: PointCloud2) -> None:
        stamp = _nanoseconds(msg)
        if len(self._played) in self._keep and stamp not in self.scans:
            self.scans[stamp], *_ = cloud.read(msg)
            self.dense[stamp] = {}
        self._played.append(stamp)

    def _on_dense(self, raw: bytes) -> None:
        msg = deserialize_message(raw, PointCloud2)
        stamp = self._answered = _nanoseconds(msg)
        self._record(time.time_ns(), raw)
        rows = np.frombuffer(msg.data, cloud.DENSE)
        generated = rows["generated"].astype(bool)
        instances = len(np.unique(rows["instance"]))
        self.seen.append(Seen(self.ratio, instances, int((~generated).sum()), len(rows)))
        if stamp in self.scans:
            points = np.stack([rows[axis] for axis in "xyz"], axis=1)
            self.dense[stamp][self.ratio] = Dense(points, rows["instance"].copy(), generated)

    def _on_diagnostics(self, msg: DiagnosticArray) -> None:
        for status in msg.status:
            if status.name.startswith(self.get_namespace()):
                self.diagnostics = {pair.key: pair.value for pair in status.values}

    # --- what it does ---

    def start_pass(self, ratio: float) -> None:
        """What comes from now on has this ratio."""
        self.ratio, self._played, self._answered = ratio, [], -1

    def progress(self) -> tuple[int, bool]:
        """How many scans of this pass were played, and whether the latest has come back."""
        return len(self._played), bool(self._played) and self._answered == self._played[-1]

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
        condition: Callable[[], bool],
        what: str,
        children: tuple[subprocess.Popen, ...] = (),
    ) -> None:
        """Spin until the condition holds; RuntimeError when a child fails or nothing happens."""
        before, end = None, 0.0
        while not condition():
            for child in children:
                if child.poll():  # ended, and not well
                    raise RuntimeError(f"{child.args[2]} ended with code {child.returncode}")
            now = (len(self._played), len(self.seen))
            if now != before:
                before, end = now, time.monotonic() + PATIENCE
            if time.monotonic() > end:
                raise RuntimeError(f"waited {PATIENCE:g} s in vain for {what}")
            rclpy.spin_once(self, timeout_sec=0.05)


def _nanoseconds(msg: PointCloud2) -> int:
    return msg.header.stamp.sec * 10**9 + msg.header.stamp.nanosec


@contextmanager
def recording(path: Path, topic: str) -> Iterator[Callable[[int, bytes], None]]:
    """A new rosbag2 (mcap) of one topic of clouds; gives a function of a stamp and a message."""
    from rosbags.rosbag2 import StoragePlugin, Writer
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS2_JAZZY)
    with Writer(path, version=9, storage_plugin=StoragePlugin.MCAP) as bag:
        connection = bag.add_connection(topic, "sensor_msgs/msg/PointCloud2", typestore=store)
        yield lambda stamp, raw: bag.write(connection, stamp, raw)
