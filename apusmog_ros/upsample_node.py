# SPDX-License-Identifier: Apache-2.0
"""The ROS 2 node: sparse PointCloud2 in, dense objects out. Convert, call, publish."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from diagnostic_msgs.msg import DiagnosticArray
from rclpy.clock import Clock, ClockType
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile, ReliabilityPolicy, qos_policy_name_from_kind
from rclpy.task import Future
from sensor_msgs.msg import PointCloud2
from std_msgs.msg import Header
from visualization_msgs.msg import MarkerArray

from apusmog_core import weights
from apusmog_core.compute import cores, keep_allocations
from apusmog_core.config import NodeConfig, PipelineConfig
from apusmog_core.pipeline import DenseScan, ScanPipeline, Segments
from apusmog_core.segment.boxes import oriented_boxes
from apusmog_core.settings import with_values

from . import cloud, parameters
from .diagnostics import Statistics
from .frames import Frames
from .markers import box_markers
from .running import run
from .stages import Stages

try:
    from rclpy.event_handler import PublisherEventCallbacks, SubscriptionEventCallbacks
except ImportError:  # Humble
    from rclpy.qos_event import PublisherEventCallbacks, SubscriptionEventCallbacks

OUTPUTS = dict(dense=PointCloud2, objects=PointCloud2, scene=PointCloud2, boxes=MarkerArray)
RELIABILITY = dict(best_effort=ReliabilityPolicy.BEST_EFFORT, reliable=ReliabilityPolicy.RELIABLE)
NETWORK = ("weights", "device", "precision")  # a change of these loads a network
SCANS_AT_ONCE = 2  # each on its share of the cores
SHUTDOWN = 0.5  # seconds that a scan under way has to finish after Ctrl-C


@dataclass
class Work:
    """One scan on its way through the stages, with the settings it started with."""

    header: Header  # of the output
    frame: np.ndarray | None  # (4, 4) from the scan's frame to the output's, if they differ
    wanted: set[str]  # outputs that somebody subscribes to
    pipeline: ScanPipeline
    segments: Segments
    dense: DenseScan | None  # where somebody wants it


class UpsampleNode(Node):
    """Makes the objects of each scan on `points` dense; see OUTPUTS for what it publishes."""

    def __init__(self, **options):
        super().__init__("upsampler", **options)
        self.done = Future()  # never: the node runs until Ctrl-C
        self._config = parameters.declare(self, NodeConfig(), fixed=("qos.",))
        self._frames = Frames(self)
        self._frames.require(self._config.target_frame)
        self._pipeline = ScanPipeline(self._config)
        self.get_logger().info("getting ready; the first start ever compiles for half a minute")
        self._pipeline.warm_up()
        self._loading: dict[str, str] | None = None  # the network that is on its way
        self._lock = threading.Lock()  # of configuration, pipeline and loading
        self._statistics = Statistics()
        self._stages = Stages(
            self._guarded(self._densify), self._guarded(self._publish), SCANS_AT_ONCE
        )
        self._connect()
        parameters.on_change(self, lambda: self._config, self._accept)
        warnings.showwarning = lambda message, *_, **__: self.get_logger().warning(str(message))
        self.get_logger().info(
            f"upsampling {self._subscription.topic_name} by {self._config.ratio:g} "
            f"with {self._config.weights} on {self._pipeline.device}"
        )

    def close(self) -> bool:
        """Stop working; True when all threads have ended."""
        return self._stages.close(SHUTDOWN)

    # --- topics ---

    def _connect(self) -> None:
        qos = self._config.qos
        events = PublisherEventCallbacks(incompatible_qos=partial(self._incompatible, "output"))
        profile = QoSProfile(depth=qos.depth, reliability=RELIABILITY[qos.output_reliability])
        self._outputs = {
            name: self.create_publisher(kind, f"~/{name}", profile, event_callbacks=events)
            for name, kind in OUTPUTS.items()
        }
        self._diagnostics = self.create_publisher(DiagnosticArray, "/diagnostics", 10)
        steady = Clock(clock_type=ClockType.STEADY_TIME)  # ticks while simulated time stands still
        self.create_timer(1.0, self._diagnose, clock=steady)
        events = SubscriptionEventCallbacks(incompatible_qos=partial(self._incompatible, "input"))
        profile = QoSProfile(depth=qos.depth, reliability=RELIABILITY[qos.input_reliability])
        self._subscription = self.create_subscription(
            PointCloud2, "points", self._receive, profile, event_callbacks=events
        )

    def _incompatible(self, side: str, event) -> None:
        """Name the quality of service that keeps somebody from us, and the way out."""
        policy = qos_policy_name_from_kind(event.last_policy_kind)
        other = "a publisher of our input" if side == "input" else "a subscriber of our output"
        fix = f"use the default {policy} over there"
        if policy == "RELIABILITY":
            value = "best_effort" if side == "input" else "reliable"
            fix = f"start this node with -p qos.{side}_reliability:={value}"
        self.get_logger().warning(f"{other} is not heard, {policy} is incompatible; {fix}")

    def _receive(self, msg: PointCloud2) -> None:
        self._statistics.count("received")
        if self._stages.put(msg):
            self._statistics.count("dropped")

    def _diagnose(self) -> None:
        status = self._statistics.status(self.get_fully_qualified_name(), self._config.diagnostics)
        msg = DiagnosticArray(status=[status])
        msg.header.stamp = self.get_clock().now().to_msg()
        self._diagnostics.publish(msg)

    # --- parameters ---

    def set_parameters_atomically(self, parameter_list):
        return super().set_parameters_atomically(parameters.typed(parameter_list, self._config))

    def _accept(self, config: NodeConfig) -> None:
        """Use a configuration from the next scan on; ValueError where that cannot be."""
        self._frames.require(config.target_frame)
        wished = _network(config)
        with self._lock:
            if wished == _network(self._pipeline.config):
                self._loading = None
            elif wished != self._loading:
                weights.find(config.weights)
                self._loading = wished
                threading.Thread(target=self._load, args=(config,), daemon=True).start()
            self._config = config
            self._use(self._pipeline)

    def _use(self, pipeline: ScanPipeline) -> None:
        """Run the network of a pipeline with the present settings; the caller holds the lock."""
        config = with_values(self._config, _network(pipeline.config))
        self._pipeline = pipeline.configured(config)

    def _load(self, config: NodeConfig) -> None:
        """Load another network beside the running one and swap them, or stay with the old one."""
        try:
            pipeline = ScanPipeline(config)
        except Exception as error:
            self.get_logger().error(f"{error}; still running the network before")
            self.executor.create_task(self._give_up, _network(config))
            return
        with self._lock:
            if self._loading == _network(config):  # else the user has changed their mind
                self._loading = None
                self._use(pipeline)
                self.get_logger().info(f"now running {config.weights} on {pipeline.device}")

    def _give_up(self, failed: dict[str, str]) -> None:
        """Set the parameters back to the network that runs."""
        if self._loading == failed:
            running = _network(self._pipeline.config)
            self.set_parameters_atomically([Parameter(n, value=v) for n, v in running.items()])

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
        self.get_logger().warning(f"scan {count}: {reason}", throttle_duration_sec=1.0)

    def _densify(self, msg: PointCloud2) -> Work | None:
        wanted = {name for name, out in self._outputs.items() if out.get_subscription_count()}
        if not wanted:
            return None
        started = time.perf_counter()
        with self._lock:
            pipeline, target = self._pipeline, self._config.target_frame
        try:
            points, intensity, _ = cloud.read(msg)
        except ValueError as error:
            return self._skip("rejected", str(error))
        header, frame = msg.header, None
        if target and target != header.frame_id:
            try:
                frame = self._frames.lookup(target, header)
            except ValueError as error:
                return self._skip("untransformed", str(error))
            header = Header(stamp=header.stamp, frame_id=target)
        self._statistics.sample(read=_ms_since(started))
        segments = pipeline.segment(points, intensity)
        dense = pipeline.densify(segments) if wanted & {"dense", "scene"} else None
        return Work(header, frame, wanted, pipeline, segments, dense)

    def _publish(self, work: Work) -> None:
        started, dense = time.perf_counter(), work.dense
        for name in work.wanted:
            self._outputs[name].publish(_message(name, work))
        stamp = work.header.stamp  # may be anything, also negative, which rclpy's Time refuses
        age = self.get_clock().now().nanoseconds / 1e6 - (stamp.sec * 1e3 + stamp.nanosec / 1e6)
        times = dense.timings if dense else work.segments.timings
        self._statistics.count("published")
        self._statistics.sample(**times, publish=_ms_since(started), age=age)
        self._statistics.tell(_facts(work))


def _message(name: str, work: Work) -> PointCloud2 | MarkerArray:
    """One output as a message."""
    segments, dense = work.segments, work.dense
    objects = segments.instance > 0
    if name == "boxes":
        boxes = oriented_boxes(segments.points[objects], segments.instance[objects])
        return box_markers(work.header, boxes, np.eye(4) if work.frame is None else work.frame)
    columns = _columns(segments, objects) if name == "objects" else _columns(dense)
    if name == "scene":
        rest = _columns(segments, ~objects)
        columns = {key: np.concatenate([rest[key], columns[key]]) for key in columns}
    points = columns.pop("points")
    if work.frame is not None:
        points = points @ work.frame[:3, :3].T + work.frame[:3, 3]
    return cloud.write(work.header, points, **columns)


def _columns(source: Segments | DenseScan, rows=slice(None)) -> dict[str, np.ndarray]:
    names = ("points", "intensity", "instance", "generated")
    return {name: getattr(source, name)[rows] for name in names}


def _facts(work: Work) -> dict[str, object]:
    """What diagnostics tell of the latest scan."""
    instance = work.segments.instance
    facts = {
        "weights": work.pipeline.config.weights,
        "device": work.pipeline.device,
        "instances": instance.max(initial=0),
        "points in": len(instance),
    }
    if dense := work.dense:
        facts["points out"] = len(dense.points)
        facts["ratio"] = f"{dense.effective_ratio:.2f} of {dense.ratio:g}"
        facts["budget"] = dense.limited or "not bound"
    return facts


def _network(config: PipelineConfig) -> dict[str, str]:
    return {name: getattr(config, name) for name in NETWORK}


def _ms_since(started: float) -> float:
    return 1e3 * (time.perf_counter() - started)


def main(args: list[str] | None = None) -> None:
    """Run the node until Ctrl-C."""
    if "OMP_NUM_THREADS" not in os.environ:  # all cores, shared by the scans
        torch.set_num_threads(max(1, cores() // SCANS_AT_ONCE))
    keep_allocations()
    sys.exit(run(UpsampleNode, args))


if __name__ == "__main__":
    main()
