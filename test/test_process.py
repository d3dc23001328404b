# SPDX-License-Identifier: Apache-2.0
"""The node as a process: start, Ctrl-C, memory, what it leaves behind."""

import fcntl
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 (rclpy) is not installed")

from conftest import wait_until  # noqa: E402
from diagnostic_msgs.msg import DiagnosticArray  # noqa: E402
from harness import RELIABLE, sample_street, scan, street  # noqa: E402
from rcl_interfaces.msg import Parameter as ParameterMessage  # noqa: E402
from rcl_interfaces.msg import ParameterValue  # noqa: E402
from rcl_interfaces.srv import GetParameters, SetParameters  # noqa: E402
from rclpy.serialization import serialize_message  # noqa: E402
from sensor_msgs.msg import PointCloud2  # noqa: E402

from apusmog_core.data import write_points  # noqa: E402
from apusmog_ros import cloud  # noqa: E402
from apusmog_ros.upsample_node import main  # noqa: E402

UPSAMPLE = ("-m", "apusmog_ros.running", "upsample_node")
RESOURCE = Path(__file__).parents[1] / "resource"
START = ["ratio:=-2", "ratio:=x", "weights:=none", "seed:=1.5", "device:=cuda:99999999999999999999"]
START += ["device:=cuda:\N{SUPERSCRIPT TWO}", f"weights:={300 * 'w'}", "qos.input_reliability:=no"]


@pytest.fixture
def process(ros):
    """Starts a node as a process of its own; whatever is left of it ends with the test."""
    started = []

    def start(*arguments: str, program: tuple[str, ...] = UPSAMPLE) -> subprocess.Popen:
        command = [sys.executable, *program, "--ros-args", *arguments]
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


def test_ctrl_c_in_the_middle_of_a_scan_ends_the_node_within_a_second(ros, process):
    child = process("-p", "ratio:=200.0", "-p", "max_points_out:=0")
    status = ros.listen(DiagnosticArray, "/diagnostics")
    ros.listen(PointCloud2, "/upsampler/dense")
    publisher = ros.peer.create_publisher(PointCloud2, "points", RELIABLE)
    wait_until(publisher.get_subscription_count, "the node")
    wait_until(lambda: status, "the node at work")
    message = scan(street(12))

    def at_work() -> bool:
        """Keeps the node busy, and says whether it was when it reported last."""
        publisher.publish(message)
        counts = {p.key: p.value for p in status[-1].status[0].values}
        received, *done = (int(counts[key]) for key in ("received", "published", "dropped"))
        return received - sum(done) > 1

    wait_until(at_work, "scans under way")
    child.send_signal(signal.SIGINT)
    asked = time.monotonic()
    said, _ = child.communicate(timeout=20)
    assert time.monotonic() - asked < 3  # a second, and something for a busy machine
    assert child.returncode == 0 and "Traceback" not in said, said


def test_ctrl_c_that_c_plus_plus_makes_another_error_of_ends_a_node_as_any_other(ros):
    node = """
import os, signal, time
from rclpy.node import Node
from rclpy.task import Future
from apusmog_ros.running import run

class Interrupted(Node):
    def __init__(self):
        super().__init__("interrupted")
        self.done = Future()
        self.create_timer(0.01, self.work)

    def work(self):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(20)
        except KeyboardInterrupt:
            raise RuntimeError("as pybind11 does, while a message is taken")

    def close(self):
        os.kill(os.getpid(), signal.SIGINT)  # a second one

run(Interrupted)
"""
    ended = subprocess.run([sys.executable, "-c", node], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr


def test_ctrl_c_ends_a_node_that_is_still_compiling(ros, process, monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))  # nothing is kept from before
    child = process()
    assert any("compiling" in line for line in child.stdout)
    child.send_signal(signal.SIGINT)
    said, _ = child.communicate(timeout=10)
    assert child.returncode == 0 and "Traceback" not in said and "upsampling" not in said


@pytest.mark.parametrize(
    "number, program, moments",
    [
        (signal.SIGINT, UPSAMPLE, (0.0, 0.1, 0.2, 0.5, 0.9, 1.4, 2.0)),
        (signal.SIGTERM, UPSAMPLE, (0.1, 0.9)),
        (signal.SIGINT, ("-m", "apusmog_ros.upsample_node"), (0.0, 0.5)),
        (signal.SIGINT, (str(RESOURCE / "upsample_node"),), (0.2, 0.9)),  # what `ros2 run` starts
        (signal.SIGINT, ("-m", "apusmog_ros.replay_node"), (0.0, 0.5)),
        (signal.SIGINT, (str(RESOURCE / "replay_node"),), (0.2, 0.9)),
    ],
)
def test_a_signal_at_any_moment_of_the_start_ends_the_node_without_a_trace(
    ros, process, number, program, moments, tmp_path
):
    if "replay" in program[-1]:
        write_points(tmp_path / "a.npy", street(1))
        program = (*program, str(tmp_path / "a.npy"))
    for moment in moments:
        child = process("-p", "loop:=true", program=program)
        wait_until(lambda c=child: listens(c), "Python itself to have started")
        begin = time.monotonic()
        wait_until(lambda m=moment, b=begin: time.monotonic() > b + m, "the moment")
        segments = set(re.findall(r"/dev/shm/fast\w+_[0-9a-f]{16}\b", maps(child)))
        child.send_signal(number)
        said, _ = child.communicate(timeout=20)
        assert (child.returncode, said.count("Traceback")) == (0, 0), f"{moment} s: {said}"
        assert not [f for f in segments if Path(f).exists() and not is_alive(f)]


def listens(child: subprocess.Popen) -> bool:
    """Whether it has a handler for SIGTERM, which is the first thing that a node of ours sets."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{child.pid}/status").read_text())[1]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def maps(child: subprocess.Popen) -> str:
    return Path(f"/proc/{child.pid}/maps").read_text()


def is_alive(segment: str) -> bool:
    """Whether a process holds the lock beside a segment of shared memory."""
    with open(segment + "_el") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def test_objects_are_dense_while_the_first_start_still_compiles(
    ros, process, monkeypatch, tmp_path
):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))  # nothing is kept from before
    answers = ros.listen(PointCloud2, "/upsampler/dense")
    status = ros.listen(DiagnosticArray, "/diagnostics")
    publisher = ros.peer.create_publisher(PointCloud2, "points", RELIABLE)
    begin = time.monotonic()
    process()
    wait_until(publisher.get_subscription_count, "the node")
    request = GetParameters.Request(names=["ratio"])
    assert ros.call(GetParameters, "/upsampler/get_parameters", request).values
    sent = scan(sample_street())
    while not answers:
        publisher.publish(sent)
        wait_until(lambda: answers or time.monotonic() % 0.1 < 0.01, "an answer")
    assert time.monotonic() - begin < 45  # 4 s on a machine with nothing else to do
    assert np.count_nonzero(cloud.records(answers[0])["generated"]) > 5000
    told = lambda: status and status[-1].status[0].message  # noqa: E731
    wait_until(lambda: told() and ("interpolated" in told() or "age" in told()), "diagnostics")


def test_nothing_of_a_library_is_on_standard_output(ros):
    command = [sys.executable, "-m", "apusmog_ros.running", "upsample_node"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as child:
        deadline = threading.Timer(120, child.kill)
        deadline.start()
        assert any("upsampling with" in line for line in child.stderr)
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=20)[0] == ""
        deadline.cancel()


def test_a_parameter_file_that_ros_cannot_parse_is_an_error_without_a_trace(ros, capfd, tmp_path):
    (tmp_path / "odd.yaml").write_text("[[[[")
    with pytest.raises(SystemExit) as ended:
        main(["--ros-args", "--params-file", str(tmp_path / "odd.yaml")])
    said = capfd.readouterr().err.strip().splitlines()
    assert ended.value.code == 1 and "odd.yaml" in said[-1] and len(said) <= 2  # one is ROS's own


@pytest.mark.parametrize("wrong", START)
def test_a_wrong_parameter_at_the_start_is_one_line_and_an_exit_code(ros, capfd, wrong):
    with pytest.raises(SystemExit) as ended:
        main(["--ros-args", "-p", wrong])
    said = capfd.readouterr().err
    assert ended.value.code == 1
    assert wrong.split(":")[0] in said and len(said.strip().splitlines()) == 1


def test_what_rclpy_cannot_take_and_odd_names_do_not_end_the_node(ros, process):
    child = process("-p", "fields:=minimal")
    scenes = ros.listen(PointCloud2, "/upsampler/scene")
    publisher = ros.peer.create_publisher(PointCloud2, "points", RELIABLE)
    wait_until(publisher.get_subscription_count, "the node")
    client = ros.peer.create_client(SetParameters, "/upsampler/set_parameters")
    wait_until(client.service_is_ready, "its services")
    unknown = ParameterMessage(name="ratio", value=ParameterValue(type=77))
    client.call_async(SetParameters.Request(parameters=[unknown]))
    good = scan(street(1))
    for text in (b"\xff\xfe\xfd\xfc\xfb", b"\x1b[2J\n"):
        publisher.publish(serialize_message(good).replace(b"lidar", text))
    publisher.publish(serialize_message(good)[:100])  # cut off
    while not any(m.header.frame_id == "lidar" for m in scenes):
        publisher.publish(good)
        wait_until(lambda: time.monotonic() % 0.1 < 0.01, "the next try")
        assert child.poll() is None
    request = GetParameters.Request(names=["ratio"])
    assert ros.call(GetParameters, "/upsampler/get_parameters", request).values
    child.send_signal(signal.SIGINT)
    said, _ = child.communicate(timeout=20)
    assert child.returncode == 0 and "77 is not a valid" in said
    assert "\x1b" not in said and "Traceback" not in said


def test_memory_does_not_grow_over_three_hundred_scans(ros, process):
    process("-p", "qos.input_reliability:=reliable", "-p", "diagnostics.warn_silence:=3600.0")
    dense = ros.listen(PointCloud2, "/upsampler/dense")
    status = ros.listen(DiagnosticArray, "/diagnostics")
    publisher = ros.peer.create_publisher(PointCloud2, "points", RELIABLE)
    wait_until(publisher.get_subscription_count, "the node")
    wait_until(lambda: ros.peer.count_publishers("/upsampler/dense"), "its output")
    points = street(1)
    told = lambda: status and {p.key: p.value for p in status[-1].status[0].values}  # noqa: E731
    wait_until(lambda: told() and told()["network"] == "ready", "the network", 120)

    def memory_after(scans: int) -> float:
        while len(dense) < scans:
            heard = len(dense)
            publisher.publish(scan(points, heard))
            wait_until(lambda n=heard: len(dense) > n, f"answer {heard}")
        del status[:]
        values = wait_until(lambda: status and status[-1].status[0].values, "diagnostics")
        return float(next(p.value for p in values if p.key == "memory [MB]"))

    early = memory_after(50)
    assert memory_after(300) - early < 20.0
