# SPDX-License-Identifier: Apache-2.0
"""The ROS 2 node: sparse PointCloud2 in, dense objects out. Convert, call, publish."""

from __future__ import annotations

if __name__ == "__main__":  # the imports below take their time, and Ctrl-C is to be heard meanwhile
    from apusmog_ros.running import start

    start("upsample_node")

import os
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray
from rclpy.clock import Clock, ClockType
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile, qos_policy_name_from_kind
from rclpy.qos_overriding_options import QoSOverridingOptions
from rclpy.task import Future
from sensor_msgs.msg import PointCloud2
from std_msgs.msg import Header

from apusmog_core.compute import cores, keep_allocations
from apusmog_core.config import NodeConfig
from apusmog_core.text import log_line

from . import cloud, parameters
from .diagnostics import Statistics
from .frames import Frames
from .networks import Networks
from .outputs import OUTPUTS, Work, facts, message
from .running import run
from .scan_queue import ScanQueue
from .subscription import RELIABILITY, Input

try:
    from rclpy.event_handler import PublisherEventCallbacks
except ImportError:  # Humble
    from rclpy.qos_event import PublisherEventCallbacks

SCANS_AT_ONCE = 2  # each on its share of the cores
SHUTDOWN = 0.5  # seconds that a scan under way has to finish after Ctrl-C


class UpsampleNode(Node):
    """Makes the objects of each scan on `points` dense; see OUTPUTS for what it publishes."""

    def __init__(self, **options):
        super().__init__("upsampler", **options)
        self.done = Future()  # only if the network cannot be loaded: the node runs until Ctrl-C
        self._config = parameters.declare(self, NodeConfig(), fixed=("qos.",))
        self._frames = Frames(self)
        self._frames.require(self._config.target_frame)
        self._frame_id = ""  # of the latest scan
        self._statistics = Statistics()
        warnings.showwarning = lambda message, *_, **__: self.get_logger().warning(str(message))
        self._scan_queue = ScanQueue(
            self._guarded(self._densify), self._guarded(self._publish), SCANS_AT_ONCE
        )
        self._connect()
        self._networks = Networks(self._config, self._say, self._no_network)
        parameters.on_change(self, lambda: self._config, self._accept)

    def close(self) -> bool:
        """Stop working; True when all threads have ended."""
        return self._scan_queue.close(SHUTDOWN)

    def _say(self, text: str) -> None:
        if self.context.ok():  # else the node is being shut down
            self.get_logger().info(text)

    # --- topics ---

    def _connect(self) -> None:
        qos = self._config.qos
        events = PublisherEventCallbacks(incompatible_qos=partial(self._incompatible, "output"))
        profile = QoSProfile(depth=qos.depth, reliability=RELIABILITY[qos.output_reliability])
        overrides = QoSOverridingOptions.with_default_policies()
        self._outputs = {
            name: self.create_publisher(
                kind,
                f"~/{name}",
                profile,
                event_callbacks=events,
                qos_overriding_options=overrides,
            )
            for name, kind in OUTPUTS.items()
        }
        self._diagnostics = self.create_publisher(
            DiagnosticArray, "/diagnostics", 10, qos_overriding_options=overrides
        )
        steady = Clock(clock_type=ClockType.STEADY_TIME)  # ticks while simulated time stands still
        self.create_timer(1.0, self._diagnose, clock=steady)
        self._input = Input(
            self,
            "points",
            qos,
            self._receive,
            partial(self._statistics.count, "lost"),
            partial(self._incompatible, "input"),
            self._wanted,
        )

    def _wanted(self) -> set[str]:
        """Outputs that somebody subscribes to."""
        return {name for name, out in self._outputs.items() if out.get_subscription_count()}

    def _incompatible(self, side: str, event) -> None:
        """Name the quality of service that keeps somebody from us, and the way out."""
        policy = qos_policy_name_from_kind(event.last_policy_kind)
        if side == "input" and policy == "RELIABILITY" and self._input.policy == "auto":
            return  # in a moment we ask for less
        other = "a publisher of our input" if side == "input" else "a subscriber of our output"
        fix = f"use the default {policy} over there"
        if policy == "RELIABILITY":
            value = "best_effort" if side == "input" else "reliable"
            fix = f"start this node with -p qos.{side}_reliability:={value}"
        self.get_logger().warning(f"{other} is not heard, {policy} is incompatible; {fix}")

    def _receive(self, msg: PointCloud2) -> None:
        self._statistics.count("received")
        if msg.header.frame_id != self._frame_id:
            if self._frame_id:
                self._networks.restart()  # place, mounting and lasers of the sensor are others
            self._frame_id = msg.header.frame_id
            text = f"scans are in frame '{self._frame_id}'"
            # at most now and then: two drivers on one topic change it with every scan
            self.get_logger().info(log_line(text), throttle_duration_sec=5.0)
        if self._scan_queue.put(msg):
            self._statistics.count("dropped")

    def _diagnose(self) -> None:
        state = self._networks.state
        self._statistics.tell(
            {"network": state, "input reliability": self._input.reliability},
        )
        status = self._statistics.status(
            self.get_fully_qualified_name(),
            self._config.diagnostics,
            state if self._wanted() else "idle",
            self._frame_id,
        )
        msg = DiagnosticArray(status=[status])
        msg.header.stamp = self.get_clock().now().to_msg()
        self._diagnostics.publish(msg)

    # --- parameters ---

    def set_parameters_atomically(self, parameter_list):
        return super().set_parameters_atomically(parameters.typed(parameter_list, self._config))

    def _accept(self, config: NodeConfig) -> None:
        """Use a configuration from the next scan on; it raises where that cannot be."""
        self._frames.require(config.target_frame)
        self._networks.configure(config)
        self._config = config

    def _no_network(self, wished: dict, error: Exception, running: dict | None) -> None:
        """Set the parameters back to the network that runs; without any the node ends."""
        reason = str(error)
        if not isinstance(error, ValueError):  # which says what it is about
            reason = f"weights, device or precision: {type(error).__name__}: {error}"
        if running is None:
            self.done.set_exception(ValueError(" ".join(reason.split())))
            return
        self.get_logger().error(f"{reason}; still running {running['weights']}")
        back = [Parameter(name, value=value) for name, value in running.items()]
        self.executor.create_task(self.set_parameters_atomically, back)

    # --- work, in threads of its own ---

    def _guarded(self, stage: Callable) -> Callable:
        """A scan that fails is logged and counted, and the next one is worked on."""

        def run_stage(item):
            try:
                return stage(item)
            except Exception as error:
                if self.context.ok():  # else the node is being shut down
                    self._skip("failed", f"{type(error).__name__}: {error}")

        return run_stage

    def _skip(self, count: str, reason: str) -> None:
        self._statistics.count(count)
        self.get_logger().warning(log_line(f"scan {count}: {reason}"), throttle_duration_sec=1.0)

    def _densify(self, msg: PointCloud2) -> Work | None:
        wanted = self._wanted()
        if not wanted:
            return None
        started = time.perf_counter()
        try:
            source = cloud.read(msg)
        except ValueError as error:
            return self._skip("rejected", str(error))
        self._statistics.note_times(read=_ms_since(started))
        pipeline = self._networks.pipeline()
        segments = pipeline.segment(source.points, source.intensity, source.ring)
        dense = pipeline.densify(segments) if wanted & {"dense", "scene"} else None
        if dense and not np.isfinite(dense.points).all():
            raise ValueError("the network gave points that are not finite; they are not published")
        return Work(msg.header, source, wanted, pipeline, segments, dense)

    def _publish(self, work: Work) -> None:
        started, header, transform = time.perf_counter(), work.header, None
        config = work.pipeline.config
        if config.target_frame and config.target_frame != header.frame_id:
            try:  # now, and not before the work: the transform of a scan comes later than the scan
                patience = config.transform_patience
                transform = self._frames.lookup(config.target_frame, header, patience)
            except ValueError as error:
                return self._skip("untransformed", str(error))
            header = Header(stamp=header.stamp, frame_id=config.target_frame)
        for name in work.wanted:
            self._outputs[name].publish(message(name, work, header, transform))
        stamp = header.stamp  # may be anything, also negative, which rclpy's Time refuses
        age = self.get_clock().now().nanoseconds / 1e6 - (stamp.sec * 1e3 + stamp.nanosec / 1e6)
        times = work.dense.timings if work.dense else work.segments.timings
        self._statistics.note_times(**times, publish=_ms_since(started), age=age)
        self._statistics.tell(facts(work))
        self._statistics.count("published")  # last: a report that counts a scan tells of it


def _ms_since(started: float) -> float:
    return 1e3 * (time.perf_counter() - started)


def main(args: list[str] | None = None) -> None:
    """Run the node until Ctrl-C."""
    # all cores, shared by the scans; PyTorch reads this when it is loaded
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // SCANS_AT_ONCE)))
    keep_allocations()
    sys.exit(run(UpsampleNode, args))
