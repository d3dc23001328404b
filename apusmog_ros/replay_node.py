# SPDX-License-Identifier: Apache-2.0
"""Plays a bag, a KITTI folder or other scans to a topic, with original timing."""

from __future__ import annotations

if __name__ == "__main__":  # the imports below take their time, and Ctrl-C is to be heard meanwhile
    from apusmog_ros.running import start

    start("replay_node")

import sys
import threading
import time
from collections.abc import Callable, Iterator

from rclpy.duration import Duration
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos_overriding_options import QoSOverridingOptions
from rclpy.task import Future
from rclpy.time import Time
from rclpy.utilities import remove_ros_args
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import PointCloud2
from std_msgs.msg import Header

from apusmog_core.config import ReplayConfig
from apusmog_core.data import BagScans, ScanFiles, open_scans
from apusmog_core.data.clouds import SCAN_PERIOD
from apusmog_core.text import log_line

from . import cloud, parameters
from .running import run

LIVE = ("rate", "loop", "paused")  # what can be set while it plays
CLOCK_PERIOD = 0.025  # seconds between two /clock messages
KEPT_BYTES = 512 << 20  # of a recording that is played in a loop


class ReplayNode(Node):
    """Publishes recorded scans on `points`, and time on /clock if asked to."""

    def __init__(self, **options):
        super().__init__("replay", **options)
        fixed = tuple(name for name in ReplayConfig.__dataclass_fields__ if name not in LIVE)
        self._config = parameters.declare(self, ReplayConfig(), fixed)
        if not self._config.path:
            raise ValueError("nothing to play: give a path, or -p path:=...")
        self._scans = open_scans(self._config.path, self._config.bag_topic)
        self._kept: list[tuple[int, PointCloud2]] | None = None
        self.skipped = 0  # messages of the recording that cannot be read
        self.done = Future()
        self._closing = threading.Event()
        self._next = 0.0  # when the next round begins, on the monotonic clock
        overrides = dict(qos_overriding_options=QoSOverridingOptions.with_default_policies())
        self._publisher = self.create_publisher(PointCloud2, "points", 5, **overrides)
        self._clock_publisher = (
            self.create_publisher(Clock, "/clock", 10, **overrides) if self._config.clock else None
        )
        parameters.on_change(self, lambda: self._config, self._accept)
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._thread.start()

    def set_parameters_atomically(self, parameter_list):
        return super().set_parameters_atomically(parameters.typed(parameter_list, self._config))

    def close(self) -> bool:
        """Stop playing; True when the thread has ended."""
        self._closing.set()
        self._thread.join(0.5)
        return not self._thread.is_alive()

    def _accept(self, config: ReplayConfig) -> None:
        self._config = config

    def _play(self) -> None:
        played = 0
        try:
            self._wait_for_subscriber()
            while not self._closing.is_set():
                before, played = played, played + self._play_once()
                if played == before and not self._closing.is_set():
                    raise ValueError(self._nothing())
                if not self._config.loop:
                    break
            if not self._closing.is_set():
                self._publisher.wait_for_all_acked(Duration(seconds=2))
                skipped = f", {self.skipped} bad messages skipped" if self.skipped else ""
                self.get_logger().info(f"finished: {played} scans of {self._config.path}{skipped}")
            self.done.set_result(played)
        except Exception as error:
            if not self._closing.is_set():
                self.done.set_exception(error)

    def _nothing(self) -> str:
        """Why no scan was played: a loop would go round and round."""
        bad = f"{self.skipped} messages are unreadable" if self.skipped else "none is there"
        return f"{self._config.path}: no scan after {self._config.start:g} s could be played, {bad}"

    def _wait_for_subscriber(self) -> None:
        while self._config.wait and not self._publisher.get_subscription_count():
            if self._closing.wait(0.02):
                return

    def _play_once(self) -> int:
        played, first, previous = 0, None, None
        due = max(self._next, time.monotonic())
        for stamp, msg in self._messages():
            first = stamp if first is None else first
            if stamp < first + self._config.start * 1e9:
                continue
            gap = 0 if previous is None else max(stamp - previous, 0) / 1e9
            due = max(due, time.monotonic() - 1.0) + gap / self._config.rate
            if not self._wait(due, stamp):
                break
            if self._config.stamps == "now":
                msg.header.stamp = self.get_clock().now().to_msg()
            self._publisher.publish(msg)
            played, previous = played + 1, stamp
            # the first scan of the next round; a single scan is played at a sensor's pace
            self._next = due + (gap or SCAN_PERIOD) / self._config.rate
        return played

    def _messages(self) -> Iterator[tuple[int, PointCloud2]]:
        """What was recorded; a loop reads it once and keeps it, if it is not too much."""
        if self._kept is not None:
            yield from self._kept
            return
        kept, size = [], 0
        for stamp, msg in messages(self._scans, self._config.frame, self._skip):
            size += len(msg.data)
            if self._config.loop and size < KEPT_BYTES:
                kept.append((stamp, msg))
            yield stamp, msg
        if self._config.loop and size < KEPT_BYTES:
            self._kept = kept

    def _skip(self, stamp: int, error: Exception) -> None:
        self.skipped += getattr(error, "messages", 1)
        reason = f"{type(error).__name__}: {error}"
        text = f"skipped the message of {stamp / 1e9:.3f} s: {reason}"
        self.get_logger().warning(log_line(text))

    def _wait(self, due: float, stamp: int) -> bool:
        """Wait until it is time for the scan of `stamp`, ns; False when the node closes."""
        while not self._closing.is_set():
            left = due - time.monotonic()
            if self._config.paused:
                due += CLOCK_PERIOD
                self._closing.wait(CLOCK_PERIOD)
                continue
            if self._clock_publisher:
                now = stamp - max(left, 0.0) * self._config.rate * 1e9
                clock = Time(nanoseconds=max(int(now), 0)).to_msg()
                self._clock_publisher.publish(Clock(clock=clock))
            if left <= 0:
                return True
            self._closing.wait(min(left, CLOCK_PERIOD) if self._clock_publisher else min(left, 0.1))
        return False


def messages(
    scans: ScanFiles | BagScans, frame: str, skip: Callable[[int, Exception], None]
) -> Iterator[tuple[int, PointCloud2]]:
    """(time in ns, message) of each scan, as recorded; `skip` hears of unreadable ones."""
    if isinstance(scans, BagScans):
        for stamp, recorded in scans.messages():
            try:
                if isinstance(recorded, Exception):
                    raise recorded
                msg = cloud.from_bag(recorded)
            except Exception as error:  # whatever the decoder made of it
                skip(stamp, error)
                continue
            yield stamp, msg
        return
    for scan in scans:
        stamp = round(scan.stamp * 1e9)
        header = Header(stamp=Time(nanoseconds=stamp).to_msg(), frame_id=frame)
        yield stamp, cloud.write(header, scan.points, cloud.MEASURED, intensity=scan.intensity)


def main(args: list[str] | None = None) -> None:
    """Play `PATH`, or the parameter `path`, until its end or Ctrl-C."""
    try:
        paths = remove_ros_args(sys.argv if args is None else [sys.argv[0], *args])[1:]
    except Exception as error:  # arguments that ROS cannot parse
        sys.exit(" ".join(str(error).split()))
    if len(paths) > 1:
        sys.exit(f"one path at a time, not {len(paths)}: {' '.join(paths)}")
    given = [Parameter("path", value=path) for path in paths]
    sys.exit(run(lambda: ReplayNode(parameter_overrides=given), args))
