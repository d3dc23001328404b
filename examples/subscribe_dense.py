# SPDX-License-Identifier: Apache-2.0
"""Use the node's output in a node of your own: what stands nearest, and how far away?

python examples/subscribe_dense.py --ros-args -r dense:=/upsampler/dense
"""

import argparse
import sys

import numpy as np
import rclpy
from rclpy.executors import ExternalShutdownException
from rclpy.node import Node
from sensor_msgs.msg import PointCloud2


def fields(msg: PointCloud2) -> np.ndarray:
    """Its points as a structured array, as `sensor_msgs_py.point_cloud2.read_points` gives it."""
    kinds = ["i1", "u1", "i2", "u2", "i4", "u4", "f4", "f8"]
    order = ">" if msg.is_bigendian else "<"
    layout = {f.name: (order + kinds[f.datatype - 1], f.offset) for f in msg.fields if f.count == 1}
    formats, offsets = zip(*layout.values(), strict=True)
    names = dict(names=list(layout), formats=formats, offsets=offsets, itemsize=msg.point_step)
    return np.frombuffer(msg.data, np.dtype(names))


class Nearest(Node):
    def __init__(self):
        super().__init__("nearest")
        self.create_subscription(PointCloud2, "dense", self.report, 10)

    def report(self, msg: PointCloud2) -> None:
        points = fields(msg)
        if not len(points):
            self.get_logger().info("nothing in sight")
            return
        distance = np.hypot(points["x"], points["y"])
        nearest = points["instance"][distance.argmin()]
        own = points["instance"] == nearest
        new = np.count_nonzero(points["generated"][own])
        self.get_logger().info(
            f"object {nearest} at {distance.min():.2f} m: {own.sum()} points, {new} of them new"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Report the nearest object of each cloud on the topic 'dense'.",
        epilog="Arguments of ROS follow --ros-args; -r dense:=/upsampler/dense chooses the topic.",
    )
    parser.parse_args(rclpy.utilities.remove_ros_args(sys.argv)[1:])
    rclpy.init()
    try:
        rclpy.spin(Nearest())
    except (KeyboardInterrupt, ExternalShutdownException):
        pass
    except Exception:
        if rclpy.ok():  # else Ctrl-C came in the middle of a call
            raise


if __name__ == "__main__":
    main()
