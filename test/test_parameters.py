# SPDX-License-Identifier: Apache-2.0
"""The node's parameters, over real DDS."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("rclpy", reason="ROS 2 (rclpy) is not installed")

from conftest import wait_until  # noqa: E402
from harness import Harness, scan, street  # noqa: E402
from rcl_interfaces.srv import DescribeParameters  # noqa: E402

from apusmog_core import weights  # noqa: E402
from apusmog_core.config import PRESETS, NodeConfig  # noqa: E402
from apusmog_core.pipeline import ScanPipeline  # noqa: E402
from apusmog_core.settings import from_dict, settings  # noqa: E402
from apusmog_ros import parameters  # noqa: E402

CONFIG = Path(__file__).parents[1] / "config"


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
        ("device", "cuda:\N{SUPERSCRIPT TWO}"),
        ("device", "cuda:99999999999999999999"),
        ("weights", 300 * "w"),
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


def test_a_method_whose_package_is_missing_is_refused_and_the_node_works_on(ros, monkeypatch):
    under_test = Harness(ros)
    with monkeypatch.context() as patched:
        patched.setattr("importlib.util.find_spec", lambda name: None)
        result = under_test.set(ground__method="patchwork")
    assert not result.successful and "pip install pypatchworkpp" in result.reason
    assert under_test.get("ground.method") == ["auto"] and under_test.set(ratio=3.0).successful


@pytest.mark.parametrize("wish", [dict(ratio=3.0), dict(precision="float16")])
def test_settings_that_the_pipeline_refuses_change_nothing(ros, monkeypatch, wish):
    def refuse(self, config):
        raise ValueError("not these")

    under_test = Harness(ros)
    networks = under_test.node._networks
    names = ("_pipeline", "_config", "_running", "_loading")
    before = [getattr(networks, name) for name in names]
    with monkeypatch.context() as patched:
        patched.setattr(type(networks.pipeline()), "configured", refuse)
        result = under_test.set(**wish)
    assert not result.successful and "not these" in result.reason
    assert [getattr(networks, name) for name in names] == before


def test_parameters_set_together_take_effect_together_or_not_at_all(ros):
    under_test = Harness(ros)
    assert not under_test.set(together=True, ratio=7.0, range__max=1.0).successful
    assert under_test.get("ratio", "range.max") == [4.0, 200.0]
    # one after the other the first of these would be refused: 80 is above the maximum of 75
    assert under_test.set(together=True, range__min=80.0, range__max=90).successful
    assert under_test.get("range.min", "range.max") == [80.0, 90.0]


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
    running = lambda: under_test.node._networks.pipeline().config.weights  # noqa: E731
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


def test_a_burst_of_networks_loads_one_at_a_time_and_ends_with_the_last(ros, monkeypatch):
    under_test = Harness(ros)
    warm_up, at_once, most, loads = ScanPipeline.warm_up, [], [], []

    def counted(pipeline):
        at_once.append(pipeline)
        most.append(len(at_once))
        loads.append(pipeline.config.precision)
        time.sleep(0.3)
        warm_up(pipeline)
        at_once.remove(pipeline)

    monkeypatch.setattr(ScanPipeline, "warm_up", counted)
    for precision in ["bfloat16", "float16", "float32"] * 4 + ["bfloat16"]:
        assert under_test.set(precision=precision).successful
    running = lambda: under_test.node._networks.pipeline().config.precision  # noqa: E731
    wait_until(lambda: running() == "bfloat16", "the last network", 60)
    assert max(most) == 1 and len(loads) < 7
