# SPDX-License-Identifier: Apache-2.0
"""From anyone's driver to the node: nothing is lost on the way in."""

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 (rclpy) is not installed")

from conftest import wait_until  # noqa: E402
from diagnostic_msgs.msg import DiagnosticArray  # noqa: E402
from harness import Harness  # noqa: E402
from rcl_interfaces.msg import Log  # noqa: E402
from rclpy.qos import QoSProfile, ReliabilityPolicy  # noqa: E402
from sensor_msgs.msg import PointCloud2  # noqa: E402
from visualization_msgs.msg import MarkerArray  # noqa: E402

from apusmog_ros import transport  # noqa: E402
from apusmog_ros.running import child  # noqa: E402

SCANS = 40
# a driver as its authors wrote it: rclpy, and nothing of ours
DRIVER = """
import array, sys, time, rclpy
from rclpy.qos import qos_profile_sensor_data
from sensor_msgs.msg import PointCloud2, PointField
rclpy.init()
node = rclpy.create_node("driver")
qos = qos_profile_sensor_data if sys.argv[1] == "best_effort" else 10
publisher = node.create_publisher(PointCloud2, "points", qos)
msg = PointCloud2(height=1, width=120_000, point_step=16, row_step=1_920_000)
msg.fields = [PointField(name=n, offset=4 * i, datatype=7, count=1) for i, n in enumerate("xyzi")]
msg.data = array.array("B", bytes(1_920_000))
while not publisher.get_subscription_count():
    time.sleep(0.05)
time.sleep(1.0)
due = time.monotonic()
for number in range(int(sys.argv[2])):
    publisher.publish(msg)
    due += 0.1
    time.sleep(max(0.0, due - time.monotonic()))
time.sleep(1.0)
"""


@pytest.fixture
def plain(monkeypatch):
    """No transport is chosen, as in a new terminal."""
    for name in transport.CHOSEN_BY:
        monkeypatch.delenv(name, raising=False)


class Reports:
    """Diagnostics of a node that somebody listens to."""

    def __init__(self, ros):
        ros.listen(MarkerArray, "/upsampler/boxes")
        self._heard = ros.listen(DiagnosticArray, "/diagnostics")

    def latest(self) -> dict:
        values = self._heard[-1].status[0].values if self._heard else []
        return {pair.key: pair.value for pair in values}

    def received_from(self, driver: subprocess.Popen) -> int:
        """Scans that the node has received when the driver has ended."""
        wait_until(lambda: driver.poll() is not None, "the end of the driver", 60)
        reports = len(self._heard)
        wait_until(lambda: len(self._heard) > reports + 2, "new reports")
        return int(self.latest()["received"])


@pytest.mark.parametrize("offered, least", [("reliable", 39), ("best_effort", 38)])
def test_the_scans_of_a_driver_that_sets_nothing_arrive(ros, plain, offered, least):
    told = Reports(ros)
    with child("upsample_node", stdout=subprocess.DEVNULL):
        wait_until(lambda: told.latest().get("network") == "ready", "the node", 120)
        command = [sys.executable, "-c", DRIVER, offered, str(SCANS)]
        with subprocess.Popen(command) as driver:
            count = told.received_from(driver)
        assert count >= least, told.latest()
        assert count + int(told.latest()["lost"]) <= SCANS
        assert told.latest()["input reliability"] == offered


def test_the_scans_of_replay_arrive_without_our_profile(ros, plain, tmp_path):
    for number in range(SCANS):
        np.zeros((120_000, 4), "<f4").tofile(tmp_path / f"{number:03d}.bin")
    told = Reports(ros)
    plain_replay = dict(env={"FASTDDS_BUILTIN_TRANSPORTS": "DEFAULT"}, path=tmp_path, wait="true")
    with child("upsample_node", stdout=subprocess.DEVNULL):
        wait_until(lambda: told.latest().get("network") == "ready", "the node", 120)
        with child("replay_node", stdout=subprocess.DEVNULL, **plain_replay) as player:
            assert told.received_from(player) >= 39


def test_best_effort_subscribers_that_set_nothing_get_every_scan_of_ours(ros, plain, tmp_path):
    if next((c for c in transport.complaints() if "MB free" in c), ""):
        pytest.skip(f"{transport.MEMORY} has too little room")
    for number in range(10):
        np.zeros((120_000, 4), "<f4").tofile(tmp_path / f"{number:03d}.bin")
    heard = ros.listen(PointCloud2, "points", reliable=False)
    with child("replay_node", stdout=subprocess.DEVNULL, path=tmp_path, wait="true") as process:
        wait_until(lambda: process.poll() is not None or len(heard) == 10, "ten scans", 60)
    assert [msg.width for msg in heard] == 10 * [120_000]


# --- reliability ---


def publisher(ros, offered: str):
    policy = dict(reliable=ReliabilityPolicy.RELIABLE, best_effort=ReliabilityPolicy.BEST_EFFORT)
    profile = QoSProfile(depth=5, reliability=policy[offered])
    return ros.peer.create_publisher(PointCloud2, "points", profile)


def test_the_subscription_follows_publishers_that_come_and_go(ros):
    under_test = Harness(ros, qos__input_reliability="auto", ready=False)  # its peer is reliable
    asks = lambda: under_test.node._input.reliability  # noqa: E731
    wait_until(lambda: asks() == "reliable", "a reliable subscription")
    other = publisher(ros, "best_effort")
    wait_until(lambda: asks() == "best_effort", "a subscription that hears both")
    wait_until(other.get_subscription_count, "the second publisher to be heard")
    ros.peer.destroy_publisher(other)
    wait_until(lambda: asks() == "reliable", "a reliable subscription again")


def test_no_scan_is_missed_or_heard_twice_while_the_subscription_changes(ros):
    under_test = Harness(ros, qos__input_reliability="auto", ready=False)
    wait_until(under_test.publisher.get_subscription_count, "the node")
    other, sent = None, 0
    while under_test.node._input.reliability != "best_effort" or sent < 60:
        under_test.publisher.publish(PointCloud2())
        sent += 1
        assert sent < 2000
        time.sleep(0.01)
        if sent == 30:
            other = publisher(ros, "best_effort")
    wait_until(lambda: under_test.counts().get("received", 0) >= sent, "every scan")
    assert under_test.counts()["received"] == sent and other is not None


def test_qos_overrides_of_ros_hold_for_input_and_outputs(ros):
    under_test = Harness(
        ros,
        ready=False,
        **{
            "qos_overrides./points.subscription.reliability": "best_effort",
            "qos_overrides./upsampler/dense.publisher.depth": 7,
        },
    )
    [mine] = under_test.node.get_subscriptions_info_by_topic("/points")
    assert mine.qos_profile.reliability == ReliabilityPolicy.BEST_EFFORT
    assert under_test.get("qos_overrides./upsampler/dense.publisher.depth") == [7]
    result = under_test.set(**{"qos_overrides./points.subscription.reliability": "reliable"})
    assert not result.successful and "read-only" in result.reason


def test_an_incompatible_quality_of_service_is_named_with_the_fix(ros):
    log = ros.listen(Log, "/rosout")
    Harness(ros, ready=False)  # asks for a reliable sensor
    publisher(ros, "best_effort")
    advice = "qos.input_reliability:=best_effort"
    said = lambda: [m.msg for m in log if advice in m.msg]  # noqa: E731
    assert "RELIABILITY" in wait_until(said, "the warning")[0]


# --- the profile ---


def test_a_transport_that_the_user_has_chosen_stays(plain, monkeypatch):
    for name in transport.CHOSEN_BY:
        with monkeypatch.context() as user:
            user.setenv(name, "theirs")
            before = dict(os.environ)
            assert not transport.choose_transport() and os.environ == before


def test_too_little_room_is_named_with_the_command_that_cures_it(tmp_path):
    (tmp_path / "rmem_max").write_text("212992\n")
    [said] = transport.complaints(tmp_path, tmp_path / "rmem_max")
    assert "208 kB" in said and "sysctl -w net.core.rmem_max=4194304" in said
    (tmp_path / "rmem_max").write_text("8388608\n")
    assert not list(transport.complaints(tmp_path, tmp_path / "rmem_max"))


def test_the_next_start_cleans_up_after_a_node_that_was_killed(ros, plain, monkeypatch):
    told = Reports(ros)
    with child("upsample_node", stdout=subprocess.DEVNULL) as node:
        wait_until(told.latest, "the node", 60)
        mapped = open(f"/proc/{node.pid}/maps").read()
        segment = re.search(r"/dev/shm/fast\w+_[0-9a-f]{16}\b", mapped)[0]
        monkeypatch.setattr(transport, "SETTLED", 0.0)
        assert segment.split("/")[-1] not in transport.clean_up()  # it is alive
        node.send_signal(signal.SIGKILL)
        node.wait()
    assert os.path.exists(segment)
    assert segment.split("/")[-1] in transport.clean_up()
    assert not os.path.exists(segment) and not os.path.exists(segment + "_el")
