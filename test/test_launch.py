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
ARGUMENTS = "topic ratio min_confidence weights device target_frame reliability config bag".split()
ARGUMENTS += "rate loop rviz use_sim_time name namespace".split()
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
        file.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" -m apusmog_ros.running {module}_node "$@"\n'
        )
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


@pytest.fixture
def scans(tmp_path) -> Path:
    (tmp_path / "scans").mkdir()
    for number in range(3):
        points = street(2, number)
        np.column_stack([points, points[:, :1]]).tofile(tmp_path / "scans" / f"{number}.bin")
    return tmp_path / "scans"


def test_node_and_replay_start_a_dense_cloud_arrives_and_ctrl_c_ends_all(ros, launch, scans):
    dense = ros.listen(PointCloud2, "/left/upsampler/dense")
    running = launch(
        topic="lidar", ratio=6, weights="lidar", bag=scans, loop=True, namespace="left"
    )
    cloud = wait_until(lambda: dense and dense[-1].width and dense[-1], "a dense cloud", 60)
    assert cloud.width > 0 and cloud.header.frame_id == "velo_link"
    wait_until(lambda: ros.peer.count_publishers("/left/lidar") == 1, "the replay's topic", 10)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does, to all of them
    asked = time.monotonic()
    running.wait(timeout=30)
    assert time.monotonic() - asked < 5
    said = running.log.read_text()
    assert "Traceback" not in said and "escalating" not in said
    assert said.count("process has finished cleanly") == 2


@pytest.mark.parametrize(
    "wrong, reason",
    [
        (dict(ratio="many"), "ratio:=many is not a number"),
        (dict(min_confidence="much"), "min_confidence:=much is not a number"),
        (dict(rate="fast", bag="."), "rate:=fast is not a number"),
        (dict(rviz="maybe"), "maybe"),
        (dict(loop="often"), "often"),
        (dict(use_sim_time="2"), "use_sim_time"),
        (dict(reliability="some"), "reliability"),
        (dict(config="no/such.yaml"), "config:=no/such.yaml: no such file"),
        (dict(config="."), "config:=.: a folder; name a file"),
        (dict(bag="no/such/bag"), "bag:=no/such/bag: no such file"),
        (dict(name=""), "name:="),
    ],
)
def test_an_argument_that_makes_no_sense_is_named_before_anything_starts(launch, wrong, reason):
    failed = launch(**wrong)
    assert failed.wait(timeout=30) != 0
    said = failed.log.read_text()
    assert reason in said and "process started" not in said


@pytest.mark.parametrize(
    "wrong, reason", [(dict(weights="none"), "weights 'none'"), (dict(bag="."), "no scans here")]
)
def test_one_process_that_fails_ends_the_others(
    launch, scans, tmp_path, monkeypatch, wrong, reason
):
    monkeypatch.chdir(tmp_path)
    failed = launch(**{"bag": scans, "loop": "true", **wrong})
    failed.wait(timeout=60)
    said = failed.log.read_text()
    assert reason in said and said.count("process has died") == 1
    assert said.count("process has finished cleanly") == 1 and "Traceback" not in said


def test_a_recording_that_is_over_leaves_the_node(ros, launch, scans):
    running = launch(bag=scans)
    said = running.log.read_text
    wait_until(lambda: "[apusmog-replay-2]: process has finished cleanly" in said(), "the end", 60)
    wait_until(lambda: "upsampling with" in said(), "the network", 60)
    assert running.poll() is None and "[apusmog-upsample-node-1]: process has" not in said()
    os.killpg(running.pid, signal.SIGINT)
    running.wait(timeout=30)


def test_rviz_that_is_not_installed_is_named_before_anything_starts(launch):
    if rviz_is_installed():
        pytest.skip("rviz2 is installed")
    failed = launch(rviz="true")
    assert failed.wait(timeout=30) != 0
    said = failed.log.read_text()
    assert "rviz2 is not installed" in said and "process started" not in said


def test_rviz_starts_in_the_frame_of_the_first_scan(launch, scans, tmp_path, monkeypatch):
    prefix = tmp_path / "prefix"  # where a stand-in for rviz2 is installed
    for folder in ("share/ament_index/resource_index/packages", "lib/rviz2"):
        (prefix / folder).mkdir(parents=True)
    (prefix / "share/ament_index/resource_index/packages/rviz2").touch()
    program = prefix / "lib/rviz2/rviz2"
    program.write_text(f'#!/bin/sh\necho "$@" > "{tmp_path}/shown"\nsleep 60\n')
    program.chmod(0o755)
    paths = os.pathsep.join([str(prefix), os.environ.get("AMENT_PREFIX_PATH", "")])
    monkeypatch.setenv("AMENT_PREFIX_PATH", paths)
    running = launch(bag=scans, loop="true", rviz="true", weights="lidar")
    wait_until((tmp_path / "shown").exists, "RViz", 60)
    shown = wait_until((tmp_path / "shown").read_text, "its arguments")
    assert "-f velo_link" in shown and "upsample.rviz" in shown
    wait_until(lambda: "[rviz2-3]: process started" in running.log.read_text(), "launch to know")
    os.killpg(running.pid, signal.SIGINT)
    running.wait(timeout=30)


def rviz_is_installed() -> bool:
    from ament_index_python.packages import PackageNotFoundError, get_package_prefix

    try:
        return bool(get_package_prefix("rviz2"))
    except (PackageNotFoundError, OSError):
        return False
