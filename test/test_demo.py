# SPDX-License-Identifier: Apache-2.0
"""The demo, whole: simulator, both nodes over DDS, recording, table, picture and page."""

import re

import pytest

from apusmog_core.data import open_scans

pytest.importorskip("rclpy", reason="ROS 2 (rclpy) is not installed")
pytest.importorskip("open3d", reason="open3d, which simulates the street, is not installed")

from apusmog_ros.demo import demo  # noqa: E402


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    from apusmog_core import weights
    from apusmog_core.config import PRESETS

    file = tmp_path_factory.mktemp("weights") / "untrained.pt"
    weights.save(weights.build_network(PRESETS["lidar"]), file, card={})
    return file


def test_the_demo_makes_scans_dense_by_both_ratios_and_shows_them(ros, untrained, tmp_path, capsys):
    from apusmog_core.simulate.sensor import Sensor
    from apusmog_core.simulate.street import drive, write_kitti

    write_kitti(drive(3, sensor=Sensor.named("VLP-16")), tmp_path / "street")
    assert demo(tmp_path / "street", tmp_path / "demo", untrained) == 0
    table = capsys.readouterr().out
    rows = re.findall(r"^ +(4|6.5) +(\d+) +(\d+) +([\d,]+) +([\d,]+) +([\d.]+)$", table, re.M)
    assert [(row[0], row[5]) for row in rows] == [("4", "4.000"), ("6.5", "6.500")]
    assert re.search(r"upsample p50 \[ms\] +\d", table) and "dropped" in table
    recorded = [len(scan.points) for scan in open_scans(tmp_path / "demo" / "dense")]
    assert len(recorded) == sum(int(row[1]) for row in rows) >= 2 and min(recorded) > 0
    assert (tmp_path / "demo" / "before_after.png").stat().st_size > 10_000
    page = (tmp_path / "demo" / "view.html").read_text()
    assert '"ratio": 6.5' in page and '"confidence": true' in page


def test_a_node_that_cannot_start_ends_the_demo_with_its_reason(ros, tmp_path, capsys):
    from apusmog_core.simulate.sensor import Sensor
    from apusmog_core.simulate.street import drive, write_kitti

    write_kitti(drive(1, sensor=Sensor.named("VLP-16")), tmp_path / "street")
    assert demo(tmp_path / "street", tmp_path / "demo", "no_such_weights") == 1
    assert "no_such_weights" in capsys.readouterr().out
