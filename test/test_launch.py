# SPDX-License-Identifier: Apache-2.0
"""The launch file, with the real launch and launch_ros."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 (rclpy) is not installed")
pytest.importorskip("launch.launch_service", reason="launch is not installed")
pytest.importorskip("launch_ros.actions", reason="launch_ros is not installed")

from conftest import wait_until  # noqa: E402
from harness import street  # noqa: E402
from launch.launch_context import LaunchContext  # noqa: E402
from launch.launch_description_sources import PythonLaunchDescriptionSource  # noqa: E402
from sensor_msgs.msg import PointCloud2  # noqa: E402

FILE = Path(__file__).parents[1] / "launch" / "upsample.launch.py"
ARGUMENTS = "topic ratio weights device config bag rate loop rviz namespace".split()
RUN = """
import sys
from launch import LaunchDescription, LaunchService
from launch.actions import IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
path, *given = sys.argv[1:]
arguments = [pair.split(":=") for pair in given]
source = PythonLaunchDescriptionSource(path)
service = LaunchService()
included = IncludeLaunchDescription(source, launch_arguments=arguments)
service.include_launch_description(LaunchDescription([included]))
sys.exit(service.run())
"""


@pytest.fixture
def launch(tmp_path, monkeypatch, ros):
    """Starts the launch file as `ros2 launch` does, with the scripts of this source tree."""
    for script, module in (("apusmog-upsample-node", "upsample"), ("apusmog-replay", "replay")):
        file = tmp_path / script
        file.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m apusmog_ros.{module}_node "$@"\n')
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    root = str(FILE.parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    started = []

    def start(**arguments) -> subprocess.Popen:
        given = [f"{name}:={value}" for name, value in arguments.items()]
        command = [sys.executable, "-c", RUN, str(FILE), *given]
        output = (tmp_path / "log").open("w+")
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        child.log = tmp_path / "log"
        started.append(child)
        return child

    yield start
    for child in started:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def test_every_argument_is_listed_with_a_description():
    description = PythonLaunchDescriptionSource(str(FILE)).get_launch_description(LaunchContext())
    listed = {
        argument.name: argument.description for argument in description.get_launch_arguments()
    }
    assert list(listed) == ARGUMENTS
    assert all(len(text) > 15 and text != "no description given" for text in listed.values())


def test_node_and_replay_start_a_dense_cloud_arrives_and_ctrl_c_ends_all(ros, launch, tmp_path):
    (tmp_path / "scans").mkdir()
    for number in range(3):
        points = street(2, number)
        np.column_stack([points, points[:, :1]]).tofile(tmp_path / "scans" / f"{number}.bin")
    dense = ros.listen(PointCloud2, "/left/upsampler/dense")
    running = launch(
        topic="lidar", ratio=6, weights="lidar", bag=tmp_path / "scans", loop=True, namespace="left"
    )
    cloud = wait_until(lambda: dense and dense[0], "a dense cloud", 60)
    assert cloud.width > 0 and cloud.header.frame_id == "velo_link"
    assert ros.peer.count_publishers("/left/lidar") == 1
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does, to all of them
    asked = time.monotonic()
    running.wait(timeout=30)
    assert time.monotonic() - asked < 5
    said = running.log.read_text()
    assert "Traceback" not in said and "escalating" not in said
    assert said.count("process has finished cleanly") == 2


def test_an_argument_that_makes_no_sense_is_named(launch):
    failed = launch(ratio="many")
    assert failed.wait(timeout=30) != 0
    assert "ratio:=many is not a number" in failed.log.read_text()
