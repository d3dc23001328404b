# SPDX-License-Identifier: Apache-2.0
"""Recordings: KITTI to rosbag2, and back to a topic bit by bit."""

import time

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 (rclpy) is not installed")

from conftest import wait_until  # noqa: E402
from rcl_interfaces.srv import SetParameters  # noqa: E402
from rclpy.parameter import Parameter  # noqa: E402
from rosgraph_msgs.msg import Clock  # noqa: E402
from sensor_msgs.msg import PointCloud2  # noqa: E402

from apusmog_core.data import KittiDrive, bag_writer, open_scans  # noqa: E402
from apusmog_ros import cloud  # noqa: E402
from apusmog_ros.replay_node import ReplayNode, main  # noqa: E402


@pytest.fixture
def drive(tmp_path):
    """A small drive in KITTI's layout: ten scans, time stamps and poses."""
    folder = tmp_path / "drive"
    scans, oxts = folder / "velodyne_points" / "data", folder / "oxts" / "data"
    scans.mkdir(parents=True)
    oxts.mkdir(parents=True)
    rng = np.random.default_rng(0)
    stamps = []
    for at in range(10):
        rng.normal(size=(500 + at, 4)).astype("<f4").tofile(scans / f"{at:010d}.bin")
        (oxts / f"{at:010d}.txt").write_text(f"49.0 {8.0 + 1e-6 * at} 110 0 0 0.1")
        stamps.append(f"2011-09-26 13:02:{25 + at // 10}.{at % 10}12345678")
    (folder / "velodyne_points" / "timestamps.txt").write_text("\n".join(stamps) + "\n")
    return folder


def replay(ros, path, **values):
    given = [Parameter(name, value=value) for name, value in dict(path=str(path), **values).items()]
    return ros.spin(ReplayNode(parameter_overrides=given, **ros.options))


@pytest.mark.parametrize("format", bag_writer.FORMATS)
def test_a_bag_holds_scans_stamps_and_poses_under_the_usual_names(drive, tmp_path, format):
    from rosbags.highlevel import AnyReader

    assert bag_writer.convert(drive, tmp_path / "bag", format) == 10
    with AnyReader([tmp_path / "bag"]) as reader:
        topics = {c.topic: (c.msgtype, c.msgcount) for c in reader.connections}
        assert topics == {
            "/kitti/velo/pointcloud": ("sensor_msgs/msg/PointCloud2", 10),
            "/tf": ("tf2_msgs/msg/TFMessage", 10),
        }
        by_topic = {topic: [] for topic in topics}
        for connection, stamp, raw in reader.messages():
            by_topic[connection.topic].append((stamp, reader.deserialize(raw, connection.msgtype)))
    source = KittiDrive(drive)
    for at, (stamp, msg) in enumerate(by_topic["/kitti/velo/pointcloud"]):
        assert msg.header.frame_id == "velo_link"
        assert [field.name for field in msg.fields] == ["x", "y", "z", "intensity"]
        assert msg.data.tobytes() == source.files[at].read_bytes()
        assert stamp == msg.header.stamp.sec * 10**9 + msg.header.stamp.nanosec
        assert stamp == pytest.approx(source.stamps[at] * 1e9, abs=1e3)
    last = by_topic["/tf"][-1][1].transforms[0]
    assert (last.header.frame_id, last.child_frame_id) == ("world", "velo_link")
    assert last.transform.translation.x == pytest.approx(source.poses[-1][0, 3])
    assert len(open_scans(tmp_path / "bag")) == 10


def test_a_bag_is_never_overwritten_and_a_truncated_scan_is_left_out(drive, tmp_path):
    broken = sorted((drive / "velodyne_points" / "data").glob("*.bin"))[3]
    broken.write_bytes(broken.read_bytes()[:-7])
    with pytest.warns(UserWarning, match=broken.name):
        assert bag_writer.convert(drive, tmp_path / "bag") == 9
    with pytest.raises(ValueError, match="exists already"):
        bag_writer.convert(drive, tmp_path / "bag")
    with pytest.raises(ValueError, match="csv"):
        bag_writer.convert(drive, tmp_path / "other", "csv")


@pytest.mark.parametrize("source", ["drive", "mcap", "sqlite3"])
def test_replay_gives_back_the_same_points_to_the_bit(ros, drive, tmp_path, source):
    path = drive
    if source != "drive":
        path = tmp_path / "bag"
        bag_writer.convert(drive, path, source)
    heard = ros.listen(PointCloud2, "points")
    node = replay(ros, path, rate=5, wait=True)
    wait_until(lambda: node.done.done() and len(heard) == 10, "ten scans and the end")
    for msg, file, stamp in zip(heard, *_recorded(drive), strict=True):
        assert msg.data.tobytes() == file.read_bytes()
        assert msg.header.frame_id == "velo_link"
        assert msg.header.stamp.sec + 1e-9 * msg.header.stamp.nanosec == pytest.approx(stamp)


def _recorded(drive):
    source = KittiDrive(drive)
    return source.files, source.stamps


def test_replay_of_a_real_drive_gives_back_its_points(ros, kitti, tmp_path):
    bag_writer.convert(kitti, tmp_path / "bag")
    heard = ros.listen(PointCloud2, "points")
    node = replay(ros, tmp_path / "bag", rate=4.0, wait=True)
    wait_until(lambda: node.done.done() and len(heard) == 20, "twenty scans and the end")
    for msg, file in zip(heard, KittiDrive(kitti).files, strict=True):
        assert msg.data.tobytes() == file.read_bytes()


def test_a_ros_1_bag_is_played_too(ros, tmp_path):
    from rosbags.rosbag1 import Writer
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS1_NOETIC)
    types, kind = store.types, "sensor_msgs/msg/PointCloud2"
    points = np.random.default_rng(2).normal(size=(50, 3)).astype("<f4")
    field = types["sensor_msgs/msg/PointField"]
    with Writer(tmp_path / "one.bag") as writer:
        connection = writer.add_connection("/velodyne", kind, typestore=store)
        header = types["std_msgs/msg/Header"](
            0, types["builtin_interfaces/msg/Time"](5, 6), "lidar"
        )
        fields = [field(name, 4 * at, 7, 1) for at, name in enumerate("xyz")]
        raw = np.frombuffer(points.tobytes(), np.uint8)
        msg = types[kind](header, 1, 50, fields, False, 12, 600, raw, True)
        writer.write(connection, 5_000_000_006, store.serialize_ros1(msg, kind))
    heard = ros.listen(PointCloud2, "points")
    replay(ros, tmp_path / "one.bag", wait=True)
    msg = wait_until(lambda: heard and heard[0], "the scan")
    np.testing.assert_array_equal(cloud.read(msg).points, points)
    assert (msg.header.frame_id, msg.header.stamp.sec, msg.header.stamp.nanosec) == ("lidar", 5, 6)


def test_rate_and_start_are_kept(ros, drive):
    heard = ros.listen(PointCloud2, "points")
    node = replay(ros, drive, rate=2.0, start=0.45, wait=True)
    begin = wait_until(lambda: heard and time.monotonic(), "the first scan")
    wait_until(node.done.done, "the end")
    wait_until(lambda: len(heard) >= 5, "the last scan")  # acknowledged is not yet heard
    assert len(heard) == 5 and node.done.result() == 5
    assert 0.15 < time.monotonic() - begin < 10  # 0.4 s of recording at twice its speed


def test_pause_holds_and_loop_goes_on(ros, drive):
    heard = ros.listen(PointCloud2, "points")
    node = replay(ros, drive, rate=10.0, paused=True, loop=True)
    wait_until(lambda: node.count_subscribers("points"), "discovery")
    request = SetParameters.Request(
        parameters=[Parameter("paused", value=False).to_parameter_msg()]
    )
    assert not heard
    answer = ros.call(SetParameters, "/replay/set_parameters", request)
    assert answer.results[0].successful
    wait_until(lambda: len(heard) > 12, "more scans than recorded")
    assert not node.done.done()


def test_a_loop_keeps_the_pace_at_its_seam(ros, drive, monkeypatch):
    due, wait = [], ReplayNode._wait

    def noted(node, when, stamp):
        due.append(when)
        return wait(node, when, stamp)

    monkeypatch.setattr(ReplayNode, "_wait", noted)
    heard = ros.listen(PointCloud2, "points")
    replay(ros, drive, loop=True, wait=True, rate=2.0)
    wait_until(lambda: len(heard) > 12, "the second round")
    gaps = np.diff(due[:13])  # when scans are due: a busy machine sends them later
    assert np.median(gaps) == pytest.approx(0.05, rel=0.2)
    assert gaps[9] > 0.025  # the seam


def test_messages_that_cannot_be_read_are_skipped_and_counted(ros, drive, tmp_path):
    import sqlite3

    bag_writer.convert(drive, tmp_path / "bag", "sqlite3")
    with sqlite3.connect(next((tmp_path / "bag").glob("*.db3"))) as base:
        clouds = "topic_id = (select id from topics where type like '%PointCloud2')"
        ids = [row[0] for row in base.execute(f"select id from messages where {clouds}")]
        for row in (ids[2], ids[7]):
            base.execute("update messages set data = substr(data, 1, 90) where id = ?", (row,))
    heard = ros.listen(PointCloud2, "points")
    node = replay(ros, tmp_path / "bag", rate=5, wait=True)
    wait_until(lambda: node.done.done() and len(heard) == 8, "eight scans and the end")
    assert (node.done.result(), node.skipped) == (8, 2)


@pytest.mark.parametrize("loop", [False, True])
def test_a_recording_without_anything_to_play_ends_with_the_reason(ros, drive, loop):
    node = replay(ros, drive, start=100.0, loop=loop)
    wait_until(node.done.done, "the end")
    with pytest.raises(ValueError, match="drive: no scan after 100 s could be played"):
        node.done.result()


def test_stamps_and_clock_come_on_request(ros, drive):
    heard, clock = ros.listen(PointCloud2, "points"), ros.listen(Clock, "/clock")
    before = time.time()
    node = replay(ros, drive, rate=2.0, stamps="now", clock=True, wait=True)
    wait_until(node.done.done, "the end")
    wait_until(lambda: len(heard) == 10 and clock, "scans and time")
    assert all(before - 1 < m.header.stamp.sec < time.time() + 1 for m in heard)
    times = [m.clock.sec + 1e-9 * m.clock.nanosec for m in clock]
    assert times == sorted(times) and len(times) > 10
    first, *_, last = KittiDrive(drive).stamps
    assert first - 0.1 < times[0] and times[-1] == pytest.approx(last)


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ([], "nothing to play"),
        (["no/such/bag"], "no/such/bag: no such file"),
        (["a", "b"], "one path at a time"),
        ([".", "--ros-args", "-p", "rate:=0"], "rate: 0.0 is below"),
        ([".", "--ros-args", "-p", "frame:="], "Failed to parse ROS arguments"),
    ],
)
def test_a_wrong_start_is_one_line_and_an_exit_code(ros, capfd, arguments, reason):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capfd.readouterr().err or str(ended.value)
    assert ended.value.code not in (0, None)
    assert said.startswith(reason) and len(said.strip().splitlines()) == 1
