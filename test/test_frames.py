# SPDX-License-Identifier: Apache-2.0
"""The node's output in other frames."""

import inspect
import sys
import time as clock

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 (rclpy) is not installed")

from conftest import wait_until  # noqa: E402
from geometry_msgs.msg import TransformStamped  # noqa: E402
from harness import Harness, scan, street  # noqa: E402
from rclpy.duration import Duration  # noqa: E402

from apusmog_ros import cloud  # noqa: E402


def test_target_frame_is_refused_with_the_reason_where_tf2_ros_is_missing(ros, monkeypatch):
    monkeypatch.setitem(sys.modules, "tf2_ros", None)
    result = Harness(ros).set(target_frame="map")
    assert not result.successful and "tf2_ros" in result.reason


NO_TIME = Duration()


class FakeTf:
    """tf2_ros with the signatures of the real one, and one transform, from `lidar` to `map`.

    A transform is there `late` seconds after the scan that it belongs to was asked for.
    """

    TransformException = type("TransformException", (Exception,), {})
    late = 0.0

    class TransformListener:
        def __init__(self, buffer, node, *, spin_thread=False, qos=None, static_qos=None):
            pass

    class Buffer:
        def __init__(self, cache_time=None, node=None):
            pass

        def lookup_transform(self, target_frame, source_frame, time, timeout=NO_TIME):
            wait_for = FakeTf.late if (target_frame, source_frame) == ("map", "lidar") else 1e9
            clock.sleep(min(wait_for, timeout.nanoseconds / 1e9))
            if wait_for > timeout.nanoseconds / 1e9:
                raise FakeTf.TransformException(f"{target_frame} does not exist")
            found = TransformStamped()
            found.transform.translation.x = 100.0
            found.transform.rotation.z = found.transform.rotation.w = 0.5**0.5  # 90 degrees
            return found


def test_the_stand_in_is_called_as_tf2_ros_is():
    real = pytest.importorskip("tf2_ros", reason="tf2_ros is not installed")
    for name in ("Buffer.lookup_transform", "Buffer.__init__", "TransformListener.__init__"):
        kind, method = name.split(".")
        mine, theirs = (
            list(inspect.signature(getattr(getattr(tf, kind), method)).parameters)
            for tf in (FakeTf, real)
        )
        assert mine == theirs[: len(mine)], name


def test_with_a_target_frame_every_output_is_moved_there_or_skipped_and_counted(ros, monkeypatch):
    monkeypatch.setitem(sys.modules, "tf2_ros", FakeTf)
    under_test = Harness(ros)
    heard, boxes = under_test.listen("objects"), under_test.listen("boxes")
    plain = under_test.ask(heard, scan(street(1), 0))
    assert under_test.set(target_frame="map").successful
    moved = under_test.ask(heard, scan(street(1), 1))
    assert moved.header.frame_id == "map" and moved.header.stamp.sec == 101
    x, y, z = cloud.read(plain).points.T
    np.testing.assert_allclose(cloud.read(moved).points, np.stack([100 - y, x, z], 1), atol=1e-4)
    wait_until(lambda: len(boxes) == 2, "boxes")
    centre, turned = (m.markers[1].pose.position for m in boxes)
    assert (turned.x, turned.y) == pytest.approx((100 - centre.y, centre.x), abs=1e-4)
    assert under_test.set(target_frame="mars", transform_patience=0.1).successful
    under_test.publisher.publish(scan(street(1), 2))
    wait_until(lambda: under_test.counts().get("untransformed") == 1, "the count")
    assert len(heard) == 2


@pytest.mark.parametrize("late", [0.15, 0.3])
def test_a_transform_that_comes_after_the_scan_still_serves(ros, monkeypatch, late):
    monkeypatch.setitem(sys.modules, "tf2_ros", FakeTf)
    monkeypatch.setattr(FakeTf, "late", late)
    under_test = Harness(ros, target_frame="map")
    heard = under_test.listen("objects")
    for number in range(3):
        assert under_test.ask(heard, scan(street(1), number)).header.frame_id == "map"
    assert not under_test.counts().get("untransformed")
    assert under_test.set(transform_patience=late / 2).successful
    under_test.publisher.publish(scan(street(1), 9))
    wait_until(lambda: under_test.counts().get("untransformed") == 1, "the count")
