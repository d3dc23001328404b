# SPDX-License-Identifier: Apache-2.0
"""The examples run as their first lines say, as processes of their own."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import wait_until

from apusmog_core.data import read_points

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def untrained(tmp_path_factory) -> dict[str, Path]:
    """Networks of each preset as they start: the counts are exact before anything is learned."""
    from apusmog_core import weights
    from apusmog_core.config import PRESETS

    folder = tmp_path_factory.mktemp("weights")
    files = {name: folder / f"{name}.pt" for name in ("shape", "lidar")}
    for name, file in files.items():
        weights.save(weights.build_network(PRESETS[name]), file, card={})
    return files


def run(*command) -> str:
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_upsample_file_writes_the_exact_number_of_points(tmp_path, untrained):
    sparse = tmp_path / "ball.xyz"
    points = np.random.default_rng(0).normal(size=(200, 3))
    np.savetxt(sparse, points / np.linalg.norm(points, axis=1, keepdims=True))
    out = tmp_path / "dense.ply"
    options = ["--ratio", 4.93, "--weights", untrained["shape"]]
    assert "200 -> 986 points" in run(EXAMPLES / "upsample_file.py", sparse, out, *options)
    assert len(read_points(out).points) == 986


def test_pipeline_on_kitti_makes_every_scan_of_a_drive_dense(tmp_path, untrained):
    pytest.importorskip("open3d", reason="open3d, which simulates the drive, is not installed")
    from apusmog_core.simulate.sensor import Sensor
    from apusmog_core.simulate.street import drive, write_kitti

    write_kitti(drive(2, sensor=Sensor.named("VLP-16")), tmp_path / "street")
    script = EXAMPLES / "pipeline_on_kitti.py"
    options = ["--weights", untrained["lidar"], "--out", tmp_path / "dense"]
    text = run(script, tmp_path / "street", *options)
    counts = re.findall(r"(\d+) -> (\d+) object points", text)
    assert len(counts) == 2
    for (before, after), file in zip(counts, sorted((tmp_path / "dense").iterdir()), strict=True):
        assert int(after) == 4 * int(before) == len(read_points(file).points)


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_every_example_explains_itself(example):
    if example == "subscribe_dense.py":
        pytest.importorskip("rclpy", reason="ROS 2 (rclpy) is not installed")
    assert f"usage: {example}" in run(EXAMPLES / example, "--help")


def test_subscribe_dense_reports_the_nearest_object(ros):
    from std_msgs.msg import Header

    from apusmog_ros import cloud

    points = np.array([[9, 0, 0], [3, 4, 0], [3, 5, 0]], np.float32)
    msg = cloud.write(Header(), points, instance=[1, 2, 2], generated=[0, 0, 1])
    publisher = ros.peer.create_publisher(cloud.PointCloud2, "dense", 10)
    command = [sys.executable, EXAMPLES / "subscribe_dense.py"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as listener:
        try:
            wait_until(publisher.get_subscription_count, "the listener")
            publisher.publish(msg)
            assert "object 2 at 5.00 m: 2 points, 1 of them new" in listener.stderr.readline()
            listener.send_signal(signal.SIGINT)
            assert listener.wait(10) == 0, listener.stderr.read()
        finally:
            listener.kill()
