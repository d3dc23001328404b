# SPDX-License-Identifier: Apache-2.0
"""The node, over real DDS."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("rclpy", reason="ROS 2 (rclpy) is not installed")

from conftest import wait_until  # noqa: E402
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus  # noqa: E402
from geometry_msgs.msg import TransformStamped  # noqa: E402
from rcl_interfaces.msg import Log  # noqa: E402
from rcl_interfaces.srv import (  # noqa: E402
    DescribeParameters,
    GetParameters,
    SetParameters,
    SetParametersAtomically,
)
from rclpy.parameter import Parameter, parameter_value_to_python  # noqa: E402
from rclpy.qos import QoSProfile, ReliabilityPolicy  # noqa: E402
from sensor_msgs.msg import PointCloud2  # noqa: E402
from std_msgs.msg import Header  # noqa: E402
from test_cloud import legal_cloud, malformed_cloud  # noqa: E402
from visualization_msgs.msg import Marker, MarkerArray  # noqa: E402

from apusmog_core import weights  # noqa: E402
from apusmog_core.config import PRESETS, NodeConfig  # noqa: E402
from apusmog_core.settings import from_dict, settings  # noqa: E402
from apusmog_ros import cloud, parameters  # noqa: E402
from apusmog_ros.upsample_node import UpsampleNode, main  # noqa: E402

CONFIG = Path(__file__).parents[1] / "config"
RELIABLE = QoSProfile(depth=300, reliability=ReliabilityPolicy.RELIABLE)


def street(objects: int = 3, seed: int = 0) -> np.ndarray:
    """Points (n, 3): flat ground, and boxes of rings on it."""
    rng = np.random.default_rng(seed)
    ground = np.column_stack([rng.uniform(-20, 20, (4000, 2)), np.full(4000, -1.73)])
    parts = [ground + rng.normal(0, 0.01, ground.shape)]
    for at in range(objects):
        angle = 2 * np.pi * at / max(objects, 1)
        side, ring = np.meshgrid(np.linspace(-1, 1, 30), np.linspace(-1.2, -0.1, 8))
        along = np.column_stack([np.zeros(side.size), side.ravel(), ring.ravel()])
        c, s = np.cos(angle), np.sin(angle)
        turn = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])
        parts.append((along + [9.0, 0, 0]) @ turn.T + rng.normal(0, 0.01, along.shape))
    return np.concatenate(parts).astype(np.float32)


def scan(points: np.ndarray, number: int = 0) -> PointCloud2:
    header = Header(frame_id="lidar")
    header.stamp.sec, header.stamp.nanosec = 100 + number, 5
    return cloud.write(header, points, cloud.MEASURED, intensity=np.full(len(points), 0.5))


class Harness:
    """A node under test, and what talks to it."""

    def __init__(self, ros, name="/upsampler", topic="points", **values):
        self.ros, self.name = ros, name
        given = dict({"qos.input_reliability": "reliable", "qos.depth": 300}, **values)
        overrides = [Parameter(n.replace("__", "."), value=v) for n, v in given.items()]
        namespace = name.rpartition("/")[0] or None
        self.node = ros.spin(
            UpsampleNode(parameter_overrides=overrides, namespace=namespace, **ros.options)
        )
        self.publisher = ros.peer.create_publisher(PointCloud2, topic, RELIABLE)

    def listen(self, output: str) -> list:
        kind = MarkerArray if output == "boxes" else PointCloud2
        heard = self.ros.listen(kind, f"{self.name}/{output}")
        count = self.node.count_subscribers
        wait_until(lambda: count(f"{self.name}/{output}"), "our subscription")
        wait_until(self.publisher.get_subscription_count, "the node's subscription")
        return heard

    def ask(self, heard: list, msg: PointCloud2) -> PointCloud2:
        """Publish a scan and wait for the answer with its stamp."""
        self.publisher.publish(msg)

        def answer():
            same = [m for m in heard if _header(m).stamp == msg.header.stamp]
            return same and same[-1]

        return wait_until(answer, "the answer to a scan")

    def set(self, together: bool = False, **values):
        given = [Parameter(n.replace("__", "."), value=v) for n, v in values.items()]
        messages = [parameter.to_parameter_msg() for parameter in given]
        kind, service = SetParameters, f"{self.name}/set_parameters"
        if together:
            kind, service = SetParametersAtomically, service + "_atomically"
        answer = self.ros.call(kind, service, kind.Request(parameters=messages))
        return answer.result if together else answer.results[0]

    def get(self, *names: str) -> list:
        request = GetParameters.Request(names=list(names))
        answer = self.ros.call(GetParameters, f"{self.name}/get_parameters", request)
        return [parameter_value_to_python(value) for value in answer.values]

    def counts(self) -> dict:
        return {"dropped": 0, "published": 0, **self.node._statistics.counts()}


def _header(msg):
    return msg.markers[0].header if isinstance(msg, MarkerArray) else msg.header


def records(msg: PointCloud2) -> np.ndarray:
    return np.frombuffer(msg.data, cloud.DENSE)


# --- scans ---


def test_a_scan_comes_out_dense_with_exact_counts_and_its_own_header(ros):
    under_test = Harness(ros, ratio=4.93)
    heard = {name: under_test.listen(name) for name in ("dense", "objects", "scene", "boxes")}
    points = street(3)
    sent = scan(points)
    dense = under_test.ask(heard["dense"], sent)
    objects, scene, boxes = (
        wait_until(lambda n=name: heard[n] and heard[n][0], name)
        for name in ("objects", "scene", "boxes")
    )
    for msg in (dense, objects, scene, *boxes.markers):
        assert msg.header == sent.header
    names = ["x", "y", "z", "intensity", "instance", "generated"]
    assert all([f.name for f in msg.fields] == names for msg in (dense, objects, scene))
    measured, made = records(objects), records(dense)
    assert len(np.unique(measured["instance"])) == 3
    assert len(made) == round(4.93 * len(measured))
    assert not measured["generated"].any()
    kept = made[made["generated"] == 0]
    assert set(kept.tolist()) == set(measured.tolist())
    assert len(scene.data) // scene.point_step == len(points) - len(measured) + len(made)
    cubes = [m for m in boxes.markers if m.type == Marker.CUBE and m.action == Marker.ADD]
    assert boxes.markers[0].action == Marker.DELETEALL
    assert sorted(m.id for m in cubes) == sorted(np.unique(measured["instance"]))


def test_a_ratio_set_between_two_scans_takes_effect_with_the_next(ros):
    under_test = Harness(ros)
    dense, objects = under_test.listen("dense"), under_test.listen("objects")
    for number, ratio in enumerate((4.0, 6.5, 6, 1.5)):
        assert under_test.set(ratio=ratio).successful
        assert under_test.get("ratio") == [float(ratio)]
        answer = under_test.ask(dense, scan(street(1), number))
        wait_until(lambda n=number: len(objects) > n, "the objects")
        assert answer.width == round(ratio * objects[number].width) > 0


def test_empty_in_is_empty_out(ros):
    under_test = Harness(ros)
    heard = {name: under_test.listen(name) for name in ("dense", "objects", "scene", "boxes")}
    under_test.ask(heard["dense"], scan(np.zeros((0, 3), np.float32)))
    for name in ("dense", "objects", "scene"):
        assert wait_until(lambda n=name: heard[n] and heard[n][0], name).width == 0
    [marker] = wait_until(lambda: heard["boxes"] and heard["boxes"][0], "boxes").markers
    assert marker.action == Marker.DELETEALL


def test_nothing_is_computed_that_nobody_subscribes_to(ros):
    under_test = Harness(ros)
    wait_until(under_test.publisher.get_subscription_count, "the node's subscription")
    under_test.publisher.publish(scan(street(1), 0))
    wait_until(lambda: under_test.counts().get("received") == 1, "the scan")
    under_test.ask(under_test.listen("objects"), scan(street(1), 1))
    assert under_test.counts()["published"] == 1
    assert np.isnan(under_test.node._statistics.percentile("upsample", 50))


def test_two_nodes_live_side_by_side_in_two_namespaces(ros):
    left = Harness(ros, "/left/upsampler", "/left/points", ratio=2.0)
    right = Harness(ros, "/right/upsampler", "/right/points", ratio=3.0)
    heard = left.listen("dense"), right.listen("dense")
    widths = [n.ask(h, scan(street(1))).width for n, h in zip((left, right), heard, strict=True)]
    assert widths[0] / 2 == widths[1] / 3 > 0


# --- parameters ---


@pytest.mark.parametrize("bad", [0, -1, 0.0, float("nan"), float("inf"), "x", 1e9, True])
def test_a_bad_ratio_is_refused_with_the_reason_and_nothing_changes(ros, bad):
    under_test = Harness(ros, ratio=2.5)
    result = under_test.set(ratio=bad)
    assert not result.successful and "ratio" in result.reason
    assert under_test.get("ratio") == [2.5] and under_test.node._config.ratio == 2.5


@pytest.mark.parametrize(
    "name, bad",
    [
        ("device", "tpu"),
        ("device", "cuda:99"),
        ("weights", "no-such-weights"),
        ("precision", "float8"),
        ("ground__method", "magic"),
        ("cluster__min_points", 0),
        ("seed", -1),
        ("keep_measured", "yes"),
        ("qos__depth", 7),
        ("range__max", 1.0),
    ],
)
def test_any_other_bad_value_is_refused_too(ros, name, bad):
    under_test = Harness(ros)
    before = under_test.get(name.replace("__", "."))
    result = under_test.set(**{name: bad})
    assert not result.successful and result.reason
    assert under_test.get(name.replace("__", ".")) == before


def test_parameters_set_together_take_effect_together_or_not_at_all(ros):
    under_test = Harness(ros)
    assert not under_test.set(together=True, ratio=7.0, range__max=1.0).successful
    assert under_test.get("ratio", "range.max") == [4.0, 60.0]
    # one after the other the first of these would be refused: 70 is above the maximum of 60
    assert under_test.set(together=True, range__min=70.0, range__max=90).successful
    assert under_test.get("range.min", "range.max") == [70.0, 90.0]


def test_a_parameter_cannot_be_deleted(ros):
    under_test = Harness(ros)
    assert not under_test.set(ratio=None).successful
    assert under_test.get("ratio") == [4.0]


def test_every_setting_is_a_parameter_with_a_description_and_its_range(ros):
    under_test = Harness(ros)
    items = list(settings(NodeConfig()))
    request = DescribeParameters.Request(names=[item.name for item in items])
    answer = ros.call(DescribeParameters, "/upsampler/describe_parameters", request)
    for item, about in zip(items, answer.descriptors, strict=True):
        assert about.description == item.help
        ranges = [*about.floating_point_range, *about.integer_range]
        assert bool(ranges) == (item.low is not None)
        if item.low is not None and item.high is not None:
            assert (ranges[0].from_value, ranges[0].to_value) == (item.low, item.high)
    assert under_test.get("ratio") == [4.0]


def test_the_parameter_file_is_what_the_node_defaults_to():
    import yaml

    file = CONFIG / "upsample.yaml"
    assert file.read_text() == parameters.as_yaml(), "python -m apusmog_ros.parameters > " + str(
        file
    )
    tree = yaml.safe_load(file.read_text())["/**"]["ros__parameters"]
    assert from_dict(NodeConfig, tree) == NodeConfig()


def test_other_weights_load_in_the_background_and_are_swapped_in(ros, tmp_path):
    under_test = Harness(ros)
    dense = under_test.listen("dense")
    before = under_test.ask(dense, scan(street(1), 0))
    other = weights.build_network(PRESETS["lidar"])
    for values in other.parameters():
        torch.nn.init.normal_(values, std=0.3)
    weights.save(other, tmp_path / "other.pt", {})
    assert under_test.set(weights=str(tmp_path / "other.pt")).successful
    running = lambda: under_test.node._pipeline.config.weights  # noqa: E731
    wait_until(lambda: running().endswith("other.pt"), "the swap")
    after = under_test.ask(dense, scan(street(1), 1))
    assert before.width == after.width and before.data != after.data


def test_weights_that_do_not_load_leave_the_old_ones_running(ros, tmp_path):
    under_test = Harness(ros)
    (tmp_path / "broken.pt").write_bytes(b"not a checkpoint")
    under_test.set(weights=str(tmp_path / "broken.pt"))
    wait_until(lambda: under_test.get("weights") == ["lidar"], "the parameter to be set back")
    assert under_test.ask(under_test.listen("dense"), scan(street(1))).width > 0


def test_parameter_calls_are_answered_while_the_network_runs(ros):
    under_test = Harness(ros, ratio=16.0)
    dense = under_test.listen("dense")
    waits = []
    for number in range(5):
        under_test.publisher.publish(scan(street(6), number))
        wait_until(lambda n=number: under_test.counts().get("received") == n + 1, "the scan")
        started = time.perf_counter()
        assert under_test.set(seed=number).successful
        waits.append(time.perf_counter() - started)
    wait_until(lambda: len(dense) > 0, "an answer")
    assert np.median(waits) < 0.1


# --- frames and quality of service ---


def test_target_frame_is_refused_with_the_reason_where_tf2_ros_is_missing(ros, monkeypatch):
    monkeypatch.setitem(sys.modules, "tf2_ros", None)
    result = Harness(ros).set(target_frame="map")
    assert not result.successful and "tf2_ros" in result.reason


class FakeTf:
    """What the node uses of tf2_ros: one known transform, from `lidar` to `map`."""

    TransformException = LookupError

    class TransformListener:
        def __init__(self, buffer, node):
            pass

    class Buffer:
        def __init__(self, node=None):
            pass

        def lookup_transform(self, target, source, stamp, timeout):
            if (target, source) != ("map", "lidar"):
                raise LookupError(f"{target} does not exist")
            found = TransformStamped()
            found.transform.translation.x = 100.0
            found.transform.rotation.z = found.transform.rotation.w = 0.5**0.5  # 90 degrees
            return found


def test_with_a_target_frame_every_output_is_moved_there_or_skipped_and_counted(ros, monkeypatch):
    monkeypatch.setitem(sys.modules, "tf2_ros", FakeTf)
    under_test = Harness(ros)
    heard, boxes = under_test.listen("objects"), under_test.listen("boxes")
    plain = under_test.ask(heard, scan(street(1), 0))
    assert under_test.set(target_frame="map").successful
    moved = under_test.ask(heard, scan(street(1), 1))
    assert moved.header.frame_id == "map" and moved.header.stamp.sec == 101
    x, y, z = cloud.read(plain)[0].T
    np.testing.assert_allclose(cloud.read(moved)[0], np.stack([100 - y, x, z], 1), atol=1e-4)
    wait_until(lambda: len(boxes) == 2, "boxes")
    centre, turned = (m.markers[1].pose.position for m in boxes)
    assert (turned.x, turned.y) == pytest.approx((100 - centre.y, centre.x), abs=1e-4)
    assert under_test.set(target_frame="mars").successful
    under_test.publisher.publish(scan(street(1), 2))
    wait_until(lambda: under_test.counts().get("untransformed") == 1, "the count")
    assert len(heard) == 2


def test_an_incompatible_quality_of_service_is_named_with_the_fix(ros):
    log = ros.listen(Log, "/rosout")
    Harness(ros)  # asks for a reliable sensor
    unreliable = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
    ros.peer.create_publisher(PointCloud2, "points", unreliable)
    said = lambda: [m.msg for m in log if "qos.input_reliability:=best_effort" in m.msg]  # noqa: E731
    assert "RELIABILITY" in wait_until(said, "the warning")[0]


# --- too much, too fast, too broken ---


def test_two_hundred_malformed_clouds_are_survived(ros):
    rng = np.random.default_rng(3)
    under_test = Harness(ros)
    dense = under_test.listen("dense")
    wrong = [malformed_cloud(rng) for _ in range(160)]
    odd = [legal_cloud(rng)[0] for _ in range(60)]
    odd.append(scan(np.full((1000, 3), np.nan, np.float32)))
    odd.append(scan(rng.normal(scale=1e30, size=(1000, 3)).astype(np.float32)))
    odd.append(scan(np.zeros((5000, 3), np.float32)))
    odd.append(scan(rng.uniform(-80, 80, (1_000_000, 3)).astype(np.float32)))
    for number, msg in enumerate([*wrong, *odd]):  # one by one, so that none is dropped
        under_test.publisher.publish(msg)

        def handled(n=number):
            c = under_test.counts()
            done = sum(c.get(k, 0) for k in ("published", "rejected", "failed", "dropped"))
            return done == n + 1

        wait_until(handled, f"cloud {number}")
    counts = under_test.counts()
    assert counts["rejected"] == len(wrong) and counts["published"] == len(odd)
    assert counts.get("failed", 0) == counts["dropped"] == 0
    good = under_test.ask(dense, scan(street(2), 7))
    assert good.width > 0


def test_of_a_burst_the_newest_is_answered_and_the_rest_counted(ros):
    under_test = Harness(ros)
    dense = under_test.listen("dense")
    for number in range(50):
        under_test.publisher.publish(scan(street(3), number))
    wait_until(lambda: dense and dense[-1].header.stamp.sec == 149, "the answer to the newest")
    counts = under_test.counts()
    assert counts["received"] == 50
    assert counts["published"] + counts["dropped"] == 50 and counts["dropped"] > 0
    stamps = [m.header.stamp.sec for m in dense]
    assert stamps == sorted(stamps) and len(stamps) == counts["published"]


# --- the process ---


@pytest.fixture
def process(ros):
    """Starts the node as a process of its own; whatever is left of it ends with the test."""
    started = []

    def start(*arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "apusmog_ros.upsample_node", "--ros-args", *arguments]
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
    assert time.monotonic() - asked < 1.5  # a second, and something for a busy machine
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
    assert any("getting ready" in line for line in child.stdout)
    child.send_signal(signal.SIGINT)
    said, _ = child.communicate(timeout=10)
    assert child.returncode == 0 and "Traceback" not in said and "upsampling" not in said


@pytest.mark.parametrize("wrong", ["ratio:=-2", "ratio:=x", "weights:=none", "seed:=1.5"])
def test_a_wrong_parameter_at_the_start_is_one_line_and_an_exit_code(ros, capfd, wrong):
    with pytest.raises(SystemExit) as ended:
        main(["--ros-args", "-p", wrong])
    said = capfd.readouterr().err
    assert ended.value.code == 1
    assert wrong.split(":")[0] in said and len(said.strip().splitlines()) == 1


def test_memory_does_not_grow_over_three_hundred_scans(ros, process):
    process("-p", "qos.input_reliability:=reliable", "-p", "diagnostics.warn_silence:=3600.0")
    dense = ros.listen(PointCloud2, "/upsampler/dense")
    status = ros.listen(DiagnosticArray, "/diagnostics")
    publisher = ros.peer.create_publisher(PointCloud2, "points", RELIABLE)
    wait_until(publisher.get_subscription_count, "the node")
    wait_until(lambda: ros.peer.count_publishers("/upsampler/dense"), "its output")
    points = street(1)

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


def test_diagnostics_tell_rates_stages_and_what_is_wrong(ros):
    under_test = Harness(ros, diagnostics__warn_silence=1.0)
    status = ros.listen(DiagnosticArray, "/diagnostics")
    under_test.ask(under_test.listen("dense"), scan(street(2)))
    told = lambda: status and {p.key: p.value for p in status[-1].status[0].values}  # noqa: E731
    values = wait_until(lambda: told() and told().get("published") == "1" and told(), "the count")
    assert status[-1].status[0].name == "/upsampler"
    for key in ("rate in [Hz]", "rate out [Hz]", "dropped", "instances", "points in", "points out"):
        assert key in values
    for key in ("ratio", "device", "memory [MB]", "age p50/p99 [ms]", "publish p50/p99 [ms]"):
        assert key in values
    assert values["instances"] == "2"
    levels = lambda: [(s.level, s.message) for m in status for s in m.status]  # noqa: E731
    silent = lambda: [m for lv, m in levels() if lv == DiagnosticStatus.WARN and "no scan" in m]  # noqa: E731
    assert "more than 1 s" in wait_until(silent, "a warning")[0]
