# SPDX-License-Identifier: Apache-2.0
"""Which device is faster is measured, and said; `apusmog bench` gives the figures."""

import json

import numpy as np
import pytest
import torch
from pretended_device import pretended_device

from apusmog_core import ScanPipeline, Upsampler, cli, pace, upsampler
from apusmog_core.compute import parse_device
from apusmog_core.config import PRESETS, PipelineConfig
from apusmog_core.segment import Segmenter
from apusmog_core.sensor.device import DeviceRays
from apusmog_core.weights import build_network


@pytest.fixture
def network():
    return build_network(PRESETS["lidar"])


def test_a_typical_scan_has_the_objects_that_the_node_would_find_in_it():
    scan = pace.typical_scan()
    _, found = Segmenter()(scan.points, scan.ring)
    assert 100 <= scan.instance.max() <= 120 and np.bincount(scan.instance).min() > 0
    assert np.mean(found[scan.instance > 0] > 0) > 0.8


@pytest.mark.parametrize(("gpu", "faster"), [(2.0, "cuda"), (200.0, "cpu")])
def test_auto_takes_the_faster_of_both_and_says_so(network, monkeypatch, gpu, faster):
    asked = []

    def pretended(way, scan):
        asked.append(way.device.type)
        return gpu if way.device.type == "cuda" else 80.0

    monkeypatch.setattr(upsampler, "milliseconds", pretended)
    with pretended_device():
        up = Upsampler(network, "auto")
        assert up.device.type == faster and sorted(asked) == ["cpu", "cuda"]
        assert {p.device.type for p in up.network.parameters()} == {faster}
        said = ScanPipeline(PipelineConfig(device="cpu"), up).device
    assert said.startswith(faster)
    assert f"{gpu:.0f} ms on cuda" in said and "80 ms on the CPU" in said


def test_auto_measures_for_real(network, monkeypatch):
    monkeypatch.setattr(pace, "REPEATS", 1)
    monkeypatch.setattr(
        upsampler, "typical", lambda domain: pace.typical_scan().only(np.arange(1, 9))
    )
    with pretended_device() as counted:
        up = Upsampler(network, "auto")
        assert counted.operations.total() > 100 and "ms on cuda" in up.choice


def test_auto_stays_on_the_cpu_where_the_gpu_fails(network, monkeypatch):
    def fails(way, scan):
        if way.device.type == "cuda":
            raise RuntimeError("no kernel image is available for execution on the device\nmore")
        return 80.0

    monkeypatch.setattr(upsampler, "milliseconds", fails)
    with pretended_device():
        up = Upsampler(network, "auto")
    assert up.device.type == "cpu" and "no kernel image" in up.choice and "more" not in up.choice


def test_without_a_gpu_auto_measures_nothing(network, monkeypatch):
    monkeypatch.setattr(upsampler, "milliseconds", lambda *_: pytest.fail("measured"))
    assert not torch.cuda.is_available()
    up = Upsampler(network, "auto")
    assert up.device.type == "cpu" and up.choice == ""


def test_one_of_several_gpus_is_chosen_by_its_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert parse_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="cuda:2 is not there"):
        parse_device("cuda:2")


@pytest.mark.parametrize("preset", ["lidar", "shape"])
def test_everything_is_made_on_the_gpu_that_was_chosen(preset):
    scan = pace.typical_scan().only(np.arange(1, 5)) if preset == "lidar" else pace.typical_cloud()
    with pretended_device(number=1) as counted:
        up = Upsampler(build_network(PRESETS[preset]), "cuda:1", denoise=False)
        up.upsample_scan(scan, 2 * np.bincount(scan.instance)[1:])
        assert counted.operations.total() > 50 and str(up.device) == "cuda:1"
        with pytest.raises(RuntimeError, match="made on cuda, not on cuda:1"):
            torch.zeros(3, device="cuda")


def test_bench_writes_the_figures_and_the_machine(tmp_path, monkeypatch, capsys):
    from apusmog_core.cli import bench

    monkeypatch.setattr(bench, "RATIOS", (2.0,))
    monkeypatch.setattr(pace, "REPEATS", 1)
    out = tmp_path / "out.json"
    options = ["--device", "cpu", "--weights", "lidar", "--json", str(out)]
    assert cli.main(["bench", *options]) == 0
    found = json.loads(out.read_text())
    assert {"device", "cpu", "cores", "torch"} <= set(found["machine"])
    assert [row["way"] for row in found["rows"]] == ["RayUpsampler", "DeviceRays"]
    assert all(row["ms"] > 0 and row["new_points_per_second"] > 0 for row in found["rows"])
    assert "new points/s" in capsys.readouterr().out


def test_bench_has_a_row_for_each_precision_of_a_gpu_also_where_one_fails(
    tmp_path, monkeypatch, capsys
):
    from apusmog_core.cli import bench

    grow = DeviceRays.grow

    def without_float16(way, *rest):
        if way.dtype == torch.float16:
            raise RuntimeError("not implemented for 'Half'\nmore")
        return grow(way, *rest)

    monkeypatch.setattr(DeviceRays, "grow", without_float16)
    monkeypatch.setattr(bench, "RATIOS", (2.0,))
    monkeypatch.setattr(pace, "REPEATS", 1)
    monkeypatch.setattr(pace, "typical", lambda _: pace.typical_scan().only(np.arange(1, 9)))
    out = tmp_path / "out.json"
    with pretended_device():
        options = ["--device", "cuda", "--weights", "lidar", "--json", str(out)]
        assert cli.main(["bench", *options]) == 0
    found = json.loads(out.read_text())
    assert found["machine"]["gpu"] == "pretended"
    there = [row for row in found["rows"] if row["device"].startswith("cuda")]
    assert [row["precision"] for row in there] == ["float32", "bfloat16", "float16"]
    assert [row.get("error") for row in there] == [None, None, "not implemented for 'Half'"]
    assert "not implemented" in capsys.readouterr().out


def test_bench_refuses_a_gpu_that_is_not_there(capsys):
    assert cli.main(["bench", "--device", "cuda"]) == 2
    assert "0 CUDA devices found" in capsys.readouterr().err
