# SPDX-License-Identifier: Apache-2.0
"""SLAM and detection find in `~/scene` what they look for, by the rules of their sources."""

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 (rclpy) is not installed")

from conftest import own_domain  # noqa: E402
from driver_clouds import F4, F8, LAYOUTS, U1, U2, U4, driver_cloud  # noqa: E402
from harness import Harness  # noqa: E402

from apusmog_ros import cloud  # noqa: E402

DRIVERS = [name for name in LAYOUTS if name not in ("no intensity", "float64")]


@pytest.fixture(scope="module")
def scenes():
    """What the node answers to each driver: layout -> (sent, ~/scene)."""
    with pytest.MonkeyPatch.context() as monkeypatch, own_domain(monkeypatch) as ros:
        under_test = Harness(ros, ratio=3.5)
        heard, told = under_test.listen("scene"), {}
        for number, name in enumerate(DRIVERS):
            sent = driver_cloud(name)
            sent.header.stamp.sec = 100 + number
            told[name] = sent, under_test.ask(heard, sent)
    return told


def field(msg, *names):
    """The last of the fields with one of these names; None if there is none."""
    found = [f for f in msg.fields if f.name in names]
    return found[-1] if found else None


@pytest.mark.parametrize("name", DRIVERS)
def test_kiss_icp_reads_points_and_times(scenes, name):
    """Little endian; x, y, z float32; `t`, `time` or `timestamp` of three types, one value each."""
    sent, scene = scenes[name]
    assert not scene.is_bigendian
    assert all(field(scene, axis).datatype == F4 for axis in "xyz")
    records = cloud.records(scene)
    new = records["generated"] == 1
    assert new.any() and all(np.isfinite(records[axis]).all() for axis in "xyz")
    time = field(sent, "t", "time", "timestamp")
    if time is None:  # KISS-ICP goes on without deskewing
        assert field(scene, "t", "time", "timestamp") is None
        return
    found = field(scene, "t", "time", "timestamp")
    assert (found.name, found.datatype, found.count) == (time.name, time.datatype, 1)
    assert found.datatype in (U4, F4, F8)
    times, measured = records[found.name], cloud.records(sent)[time.name]
    # it divides by the span, which must be that of the sweep
    assert times.min() == measured.min() < times.max() == measured.max()


@pytest.mark.parametrize("name", ["velodyne", "ouster"])
def test_lio_sam_finds_rings_times_and_the_end_of_the_scan(scenes, name):
    """It matches `ring` and `time` or `t` by name and type, refuses clouds that are not dense, and
    takes the time of the last point for the end of the scan."""
    sent, scene = scenes[name]
    assert scene.is_dense and field(scene, "ring").datatype == U2
    assert (field(scene, "time") or field(scene, "t")).datatype == (
        F4 if name == "velodyne" else U4
    )
    records, given = cloud.records(scene), cloud.records(sent)
    time = field(scene, "time", "t").name
    assert records[time][-1] == given[time][-1] == given[time].max()
    assert set(records["ring"]) <= set(given["ring"])
    # the first point of a cell of its range image counts: that must be a measured one
    assert not records["generated"][: np.count_nonzero(records["generated"] == 0) - 1].any()


@pytest.mark.parametrize("name", ["autoware XYZIRC", "autoware XYZIRCAEDT"])
def test_autoware_finds_its_layout_and_bytes_that_fit_it(scenes, name):
    """The first fields by name, offset, type and count; more may follow, if the size is right."""
    _, scene = scenes[name]
    xyzirc = [("x", 0, F4), ("y", 4, F4), ("z", 8, F4)]
    xyzirc += [("intensity", 12, U1), ("return_type", 13, U1), ("channel", 14, U2)]
    aedt = [
        ("azimuth", 16, F4),
        ("elevation", 20, F4),
        ("distance", 24, F4),
        ("time_stamp", 28, U4),
    ]
    wanted = xyzirc + (aedt if name.endswith("AEDT") else [])
    found = [(f.name, f.offset, f.datatype) for f in scene.fields]
    assert found[: len(wanted)] == wanted and all(f.count == 1 for f in scene.fields)
    assert scene.width * scene.height * scene.point_step == len(scene.data)
