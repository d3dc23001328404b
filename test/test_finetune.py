# SPDX-License-Identifier: Apache-2.0
import functools

import numpy as np
import pytest
import torch

from apusmog_core import cli, weights
from apusmog_core.config import PRESETS
from apusmog_core.model import ApuSmog
from apusmog_core.sensor.grid import ray_grid
from apusmog_core.training import finetune
from apusmog_core.training.ray_samples import PROBE_REACH, PROBES

STEP, GAP = np.radians(0.2), np.radians(0.8)  # of the sensor that sees the wall


def wall(hole: bool = False) -> finetune.Seen:
    """A wall ten metres ahead on rings 10 to 21 of 0 to 31, perhaps with a hole in the middle."""
    ring, column = (a.ravel() for a in np.mgrid[10:22, -30:31])
    if hole:
        solid = (np.abs(ring - 15.5) > 3) | (np.abs(column) > 8)
        ring, column = ring[solid], column[solid]
    azimuth, elevation = column * STEP, (16 - ring) * GAP
    points = np.stack((np.ones(len(ring)), np.tan(azimuth), np.tan(elevation) / np.cos(azimuth)), 1)
    return finetune.Seen(10 * points, ring, (0, 31), "wall", 1)


@pytest.mark.parametrize("seed", range(4))
def test_probes_that_hit_end_on_the_surface_the_dropped_rings_saw(seed):
    sample = finetune.ring_sample(wall(), np.random.default_rng(seed))
    assert sample.probes.shape == (len(sample.points), PROBES, 3)
    ends = (sample.points[:, None] + sample.probes)[sample.hit]
    stride = 2 if abs(np.exp(sample.context[0, 0]) / 10 - 2 * GAP) < GAP / 2 else 3
    # depths are logarithmic in steps of the kept rings, azimuth in steps of the sensor
    azimuth, elevation = ends[:, 0] * STEP, ends[:, 1] * stride * GAP
    reach = np.exp(ends[:, 2] * stride * GAP)
    np.testing.assert_allclose(reach * np.cos(elevation) * np.cos(azimuth), 10, atol=0.01)
    assert sample.hit.mean() > 0.5


def test_misses_lie_in_holes_and_one_ring_or_column_outside():
    seen = wall(hole=True)
    keeps = seen.ring % 2 == 0
    grid = ray_grid(seen.points[keeps], np.zeros(3))
    hits, misses = finetune.held_rays(seen, keeps, grid, np.random.default_rng(0))
    assert len(hits) == (~keeps).sum()
    column, ring = misses[:, 0], 16 - 2 * misses[:, 1]
    in_hole = (np.abs(column) < 8.1) & (np.abs(ring - 15.5) < 3)
    outside = (np.abs(column) > 30.9) | (ring > 21.5) | (ring < 9.5)
    assert in_hole.sum() >= 3 * 13 and outside.sum() >= 60
    assert (in_hole | outside).all()
    assert np.abs(column).max() < 32.6 and ring.min() > 8.5 and ring.max() < 22.5


def test_a_ring_that_the_sensor_does_not_have_misses_nothing():
    seen = wall()
    low = finetune.Seen(seen.points, seen.ring - 10, (0, 31), "wall", 1)
    rays = ray_grid(low.points, np.zeros(3)).to_grid(low.points)
    assert list(finetune.ring_elevations(low, rays)) == list(range(13))


def test_every_anchor_has_probes_within_reach():
    sample = finetune.ring_sample(wall(hole=True), np.random.default_rng(1))
    assert (np.abs(sample.probes[..., :2]) <= np.asarray(PROBE_REACH) + 1e-5).all()
    alone = np.array([[0.0, 0.0, 5.0]])
    probes, hit = finetune.probes_around(alone, np.array([[9.0, 9.0, 5.0]]), np.zeros((0, 2)))
    assert hit.all() and not probes.any()  # the point's own ray


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
    weights.save(ApuSmog(PRESETS["lidar"]), tmp_path / "start.pt", {"preset": "lidar"})
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
    weights.save(ApuSmog(PRESETS[preset]), tmp_path / "start.pt", {})
    seen = wall()
    np.c_[seen.points, seen.ring].astype(np.float32).tofile(tmp_path / "one.bin")
    assert run(tmp_path / "one.bin", tmp_path / "start.pt", tmp_path / "out.pt") == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out.pt").exists()
