# SPDX-License-Identifier: Apache-2.0
"""How fast the node is: a recording played at 10 Hz by one process, made dense by another."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from subprocess import DEVNULL

import numpy as np
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from rclpy.node import Node
from rclpy.time import Time
from sensor_msgs.msg import PointCloud2

from apusmog_core.compute import environment
from apusmog_core.data import bag_writer
from apusmog_ros.running import child

WARM_UP = 5.0  # seconds at full rate before anything is counted
PATIENCE = 300.0  # seconds for the network, which may have to compile
DOMAIN = 91  # apart from what else runs on this machine
DRIVER = {"FASTDDS_BUILTIN_TRANSPORTS": "DEFAULT"}  # replay as any driver: Fast DDS as it comes


def throughput(
    scans: str | Path,
    seconds: float = 60.0,
    ratio: float = 4.0,
    time_budget_ms: float = 0.0,
    weights: str = "lidar",
) -> dict:
    """Play `scans` at their own pace, again and again, and look at what the node publishes.

    Gives the rates in and out (Hz), the scans lost on the way in, the median and 99th percentile
    of the age of the dense clouds when they arrive (ms), the points in and out of a scan, and the
    node's own report of its stages. The player has no transport settings of ours.
    """
    with tempfile.TemporaryDirectory() as folder, own_domain():
        recording = Path(scans)
        if (recording / "velodyne_points").is_dir():  # a bag is cheaper to play than .bin files
            bag_writer.convert(recording, Path(folder) / "bag")
            recording = Path(folder) / "bag"
        played = {"path": recording, "loop": "true", "stamps": "now", "wait": "true"}
        rclpy.init()
        listener = Listener()
        try:
            with (
                child(
                    "upsample_node",
                    stdout=DEVNULL,
                    ratio=ratio,
                    weights=weights,
                    time_budget_ms=time_budget_ms,
                ),
                child("replay_node", stdout=DEVNULL, env=DRIVER, **played),
            ):
                listener.spin_until(listener.is_ready, PATIENCE)
                listener.spin_for(WARM_UP)
                listener.start()
                listener.spin_for(seconds)
                return listener.result()
        finally:
            listener.destroy_node()
            rclpy.try_shutdown()


class Listener(Node):
    """Hears the dense clouds and the diagnostics."""

    def __init__(self):
        super().__init__("bench")
        self.ages: list[float] = []
        self.widths: list[int] = []
        self._report: dict[str, str] = {}
        self._begin = time.monotonic()
        self.create_subscription(PointCloud2, "/upsampler/dense", self._on_dense, 10)
        self.create_subscription(DiagnosticArray, "/diagnostics", self._on_diagnostics, 10)

    def _on_dense(self, msg: PointCloud2) -> None:
        age = self.get_clock().now() - Time.from_msg(msg.header.stamp)
        self.ages.append(age.nanoseconds / 1e6)
        self.widths.append(msg.width)

    def _on_diagnostics(self, msg: DiagnosticArray) -> None:
        self._report = {pair.key: pair.value for pair in msg.status[0].values}

    def is_ready(self) -> bool:
        return bool(self.ages) and self._report.get("network") == "ready"

    def report(self, name: str) -> float:
        """A number of the latest diagnostics."""
        return float(self._report[name])

    def spin_until(self, condition, patience: float) -> None:
        end = time.monotonic() + patience
        while not condition():
            if time.monotonic() > end:
                raise RuntimeError(f"no dense cloud within {patience:g} s")
            rclpy.spin_once(self, timeout_sec=0.1)

    def spin_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            rclpy.spin_once(self, timeout_sec=left)

    def start(self) -> None:
        """Count from now on."""
        self.ages.clear()
        self.widths.clear()
        self._before = dict(self._report)
        self._begin = time.monotonic()

    def result(self) -> dict:
        seconds = time.monotonic() - self._begin
        received, lost = (int(self._report[n]) - int(self._before[n]) for n in ("received", "lost"))
        return {
            "rate_in_hz": received / seconds,
            "lost": lost,
            "rate_out_hz": len(self.ages) / seconds,
            "age_ms_p50": float(np.percentile(self.ages, 50)),
            "age_ms_p99": float(np.percentile(self.ages, 99)),
            "points_out": float(np.mean(self.widths)),
            "node": self._report,
        }


def own_domain() -> AbstractContextManager[None]:
    """A ROS domain of this machine only."""
    chosen = {"ROS_DOMAIN_ID": str(DOMAIN), "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}
    if os.environ.get("ROS_DISTRO") == "humble":
        chosen["ROS_LOCALHOST_ONLY"] = "1"
    return environment(**chosen)


if __name__ == "__main__":
    folder, *rest = sys.argv[1:]  # FOLDER [seconds [ratio [time_budget_ms]]]
    print(json.dumps(throughput(folder, *map(float, rest)), indent=2))
