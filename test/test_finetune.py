# SPDX-License-Identifier: Apache-2.0
import functools

import numpy as np
import pytest
import torch

from apusmog_core import cli, weights
from apusmog_core.config import PRESETS
from apusmog_core.segment import Found, Mounting
from apusmog_core.training import finetune
from apusmog_core.training.probes import PROBES

STEP, GAP = np.radians(0.2), np.radians(0.8)  # of the sensor that sees the wall
COLUMNS = np.arange(-60, 61)


def wall(hole: str = "") -> finetune.FullScan:
    """A wall ten metres ahead on rings 10 to 21 of 32, with another one far behind.

    A hole in the middle of it shows the `wall` behind, or `nothing` returns from there."""
    ring, column = (a.ravel() for a in np.meshgrid(np.arange(32), COLUMNS, indexing="ij"))
    near = (np.abs(ring - 15.5) < 6) & (np.abs(column) <= 30)
    inside = (np.abs(ring - 15.5) < 3) & (np.abs(column) < 9)
    there = ~inside if hole == "nothing" else np.ones(len(ring), bool)
    near = (near & ~(inside & (hole != "")))[there]
    ring, column = ring[there], column[there]
    azimuth, elevation = column * STEP, (ring - 16) * GAP
    ray = (np.ones(len(ring)), np.tan(azimuth), np.tan(elevation) / np.cos(azimuth))
    points = np.where(near, 10.0, 40.0)[:, None] * np.stack(ray, axis=1)
    nowhere = np.zeros(len(ring), bool)
    found = Found(nowhere, near.astype(np.uint32), ring, "field", None, Mounting(1.7, 0.0, 0.0))
    return finetune.FullScan.of(points, ring, found)


def probed(scan: finetune.FullScan, stride: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Rings and columns (m, 2) that probes ask, as numbers, and whether they hit (m,)."""
    rng = np.random.default_rng(0)
    objects = finetune.dropped_objects(scan, stride, 0, rng)
    assert len(objects) == 1
    probes, hit = objects[0].probes, objects[0].hit
    kept = np.flatnonzero((scan.rings.number % stride == 0) & (scan.found.instance == 1))
    assert probes.shape == (len(kept), PROBES, 3)
    ring = scan.rings.number[kept, None] + stride * probes[..., 1]
    column = scan.polar[kept, None, 0] / STEP + probes[..., 0]
    reach = np.exp(scan.polar[kept, None, 2] + probes[..., 2] * stride * GAP)
    flat = reach * np.cos((ring - 16) * GAP) * np.cos(column * STEP)
    np.testing.assert_allclose(flat[hit], 10, atol=0.05)  # where it hits, it ends on the wall
    return np.stack((ring, column), axis=-1).reshape(-1, 2), hit.ravel()


@pytest.mark.parametrize("stride", [2, 4])
def test_dropped_rings_hit_the_wall_they_saw_and_miss_beside_it(stride):
    where, hit = probed(wall(), stride)
    on_wall = (np.abs(where[:, 0] - 15.5) < 5.9) & (np.abs(where[:, 1]) < 30.5)
    assert (hit == on_wall).all()
    assert 0.5 < hit.mean() < 1
    assert (np.abs(where[:, 0] % stride) > 0.3).mean() > 0.9  # rings that were not given


def test_a_ray_through_a_hole_misses_where_something_behind_returned():
    where, hit = probed(wall(hole="wall"))
    inside = (np.abs(where[:, 0] - 15.5) < 2.9) & (np.abs(where[:, 1]) < 8.5)
    assert inside.sum() > 20
    assert not hit[inside].any()


def test_nothing_is_learned_where_nothing_returned():
    where, hit = probed(wall(hole="nothing"))
    inside = (np.abs(where[:, 0] - 15.5) < 2.4) & (np.abs(where[:, 1]) < 8.5)
    assert not inside.any()
    assert not hit.all()  # but beside the wall it is


def test_a_return_close_by_that_is_of_no_object_is_left_out():
    scan = wall()
    scan.found.instance[(scan.rings.number == 15) & (scan.found.instance == 1)] = 0
    where, hit = probed(scan)
    on_ring = (np.abs(where[:, 0] - 15) < 0.3) & (np.abs(where[:, 1]) < 30.5)
    assert not on_ring.any()
    assert hit.any()


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drive(tmp_path_factory):
    pytest.importorskip("open3d", reason="the simulator needs open3d")
    pytest.importorskip("tensorboard", reason="training logs to tensorboard")
    from apusmog_core.simulate.sensor import Sensor
    from apusmog_core.simulate.street import drive, write_kitti

    folder = tmp_path_factory.mktemp("drive")
    write_kitti(drive(2, seed=3, sensor=Sensor.named("VLP-32C")), folder)
    with pytest.MonkeyPatch.context() as patch:  # the objects of this drive are found once
        patch.setattr(finetune, "prepare", functools.cache(finetune.prepare))
        yield folder


@pytest.fixture
def start(tmp_path):
    torch.manual_seed(0)
    weights.save(
        weights.build_network(PRESETS["lidar"]), tmp_path / "start.pt", {"preset": "lidar"}
    )
    return tmp_path / "start.pt"


def run(drive, start, out, *options) -> int:
    command = ["finetune", str(drive), "--weights", str(start), "--out", str(out)]
    return cli.main([*command, "--device", "cpu", "--steps", "3", *options])


def test_worse_weights_are_refused_until_forced(drive, start, tmp_path, capsys):
    out = tmp_path / "tuned.pt"
    out.write_bytes(start.read_bytes())
    before = out.read_bytes()
    assert run(drive, start, out, "--rate", "3") == 1  # a rate that breaks any network
    said = capsys.readouterr()
    assert "tuned.pt: not written" in said.err
    assert all(word in said.out for word in ("before", "after", "tuned.pt now", "F@10cm"))
    assert out.read_bytes() == before
    assert run(drive, start, out, "--rate", "3", "--force") == 0
    card = weights.read(out)["card"]
    assert card["preset"] == "lidar" and card["finetuned_from"] == str(start)
    assert card["held_out_f10_after"] < card["held_out_f10_before"]


def test_weights_that_are_no_worse_are_written(drive, start, tmp_path, monkeypatch):
    better = iter([0.5, 0.6])
    monkeypatch.setattr(finetune, "deciding_score", lambda table: next(better))
    out = tmp_path / "new" / "tuned.pt"
    assert run(drive, start, out) == 0
    moved = weights.load_network(out).state_dict()
    old = weights.load_network(start).state_dict()
    assert any((moved[name] != old[name]).any() for name in old)


@pytest.mark.parametrize("domain, complaint", [("canonical", "do not see rays"), ("sensor", "two")])
def test_what_cannot_be_tuned_is_refused_in_one_line(domain, complaint, tmp_path, capsys):
    preset = "shape" if domain == "canonical" else "lidar"
    weights.save(weights.build_network(PRESETS[preset]), tmp_path / "start.pt", {})
    seen = wall()
    np.c_[seen.points, seen.rings.number].astype(np.float32).tofile(tmp_path / "one.bin")
    assert run(tmp_path / "one.bin", tmp_path / "start.pt", tmp_path / "out.pt") == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out.pt").exists()
