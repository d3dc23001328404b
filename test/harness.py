# SPDX-License-Identifier: Apache-2.0
"""The upsample node under test, and what talks to it over real DDS."""

import numpy as np
from conftest import wait_until
from rcl_interfaces.srv import GetParameters, SetParameters, SetParametersAtomically
from rclpy.parameter import Parameter, parameter_value_to_python
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import PointCloud2
from std_msgs.msg import Header
from visualization_msgs.msg import MarkerArray

from apusmog_core.sample_clouds import STORED, unpack
from apusmog_ros import cloud
from apusmog_ros.upsample_node import UpsampleNode

RELIABLE = QoSProfile(depth=300, reliability=ReliabilityPolicy.RELIABLE)


def street(objects: int = 3, seed: int = 0) -> np.ndarray:
    """Points (n, 3): flat ground, and boxes of rings on it."""
    rng = np.random.default_rng(seed)
    ground = np.column_stack([rng.uniform(-20, 20, (4000, 2)), np.full(4000, -1.73)])
    parts = [ground + rng.normal(0, 0.01, ground.shape)]
    for at in range(objects):
        angle = 2 * np.pi * at / max(objects, 1)
        side, ring = np.meshgrid(np.linspace(-1, 1, 30), np.linspace(-1.2, -0.1, 8))
        along = np.column_stack([np.zeros(side.size), side.ravel(), ring.ravel()])
        c, s = np.cos(angle), np.sin(angle)
        turn = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])
        parts.append((along + [9.0, 0, 0]) @ turn.T + rng.normal(0, 0.01, along.shape))
    return np.concatenate(parts).astype(np.float32)


def sample_street() -> np.ndarray:
    """Points (n, 3) of a simulated scan, ring after ring."""
    with np.load(STORED) as stored:
        return unpack(stored["street_vlp16"])["points"]


def scan(points: np.ndarray, number: int = 0) -> PointCloud2:
    header = Header(frame_id="lidar")
    header.stamp.sec, header.stamp.nanosec = 100 + number, 5
    return cloud.write(header, points, cloud.MEASURED, intensity=np.full(len(points), 0.5))


class Harness:
    """A node under test, and what talks to it."""

    def __init__(self, ros, name="/upsampler", topic="points", ready=True, **values):
        self.ros, self.name = ros, name
        given = {"qos.input_reliability": "reliable", "qos.input_depth": 300, "qos.depth": 300}
        given |= values
        overrides = [Parameter(n.replace("__", "."), value=v) for n, v in given.items()]
        namespace = name.rpartition("/")[0] or None
        self.node = ros.spin(
            UpsampleNode(parameter_overrides=overrides, namespace=namespace, **ros.options)
        )
        self.publisher = ros.peer.create_publisher(PointCloud2, topic, RELIABLE)
        if ready:
            wait_until(lambda: self.node._networks.state == "ready", "the network", 120)

    def listen(self, output: str) -> list:
        kind = MarkerArray if output == "boxes" else PointCloud2
        heard = self.ros.listen(kind, f"{self.name}/{output}")
        count = self.node.count_subscribers
        wait_until(lambda: count(f"{self.name}/{output}"), "our subscription")
        wait_until(self.publisher.get_subscription_count, "the node's subscription")
        return heard

    def ask(self, heard: list, msg: PointCloud2) -> PointCloud2:
        """Publish a scan and wait for the answer with its stamp."""
        self.publisher.publish(msg)

        def answer():
            same = [m for m in heard if _header(m).stamp == msg.header.stamp]
            return same and same[-1]

        return wait_until(answer, "the answer to a scan")

    def set(self, together: bool = False, **values):
        given = [Parameter(n.replace("__", "."), value=v) for n, v in values.items()]
        messages = [parameter.to_parameter_msg() for parameter in given]
        kind, service = SetParameters, f"{self.name}/set_parameters"
        if together:
            kind, service = SetParametersAtomically, service + "_atomically"
        answer = self.ros.call(kind, service, kind.Request(parameters=messages))
        return answer.result if together else answer.results[0]

    def get(self, *names: str) -> list:
        request = GetParameters.Request(names=list(names))
        answer = self.ros.call(GetParameters, f"{self.name}/get_parameters", request)
        return [parameter_value_to_python(value) for value in answer.values]

    def counts(self) -> dict:
        return {"dropped": 0, "published": 0, **self.node._statistics.counts()}


def _header(msg):
    return msg.markers[0].header if isinstance(msg, MarkerArray) else msg.header
