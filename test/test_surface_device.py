# SPDX-License-Identifier: Apache-2.0
"""Clouds without a viewpoint on a device: chosen there, together, as evenly as on the CPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from pretended_device import pretended_device
from scipy.spatial import cKDTree

from apusmog_core import Upsampler
from apusmog_core.compute import PRECISIONS
from apusmog_core.config import PRESETS
from apusmog_core.geometry import farthest, nearest, nearest_on_device
from apusmog_core.surface import choose, device
from apusmog_core.weights import build_network, load_network

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def ball(count: int, seed: int = 0) -> np.ndarray:
    points = np.random.default_rng(seed).normal(size=(count, 3))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def least_gap(points: np.ndarray) -> float:
    return float(np.quantile(cKDTree(points).query(points, k=2)[0][:, 1], 0.05))


def as_batch(*clouds: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.stack(clouds).astype(np.float32))


@pytest.mark.parametrize("memory", [1 << 30, 1 << 16])
def test_neighbours_by_all_distances_are_those_of_a_tree(monkeypatch, memory):
    monkeypatch.setattr("apusmog_core.geometry.free_memory", lambda _: memory)
    points, queries = as_batch(ball(300), ball(300, 1)), as_batch(ball(70, 2), ball(70, 3))
    away, index = nearest_on_device(points, queries, 5)
    for b in range(2):
        assert np.array_equal(index[b].numpy(), nearest(points[b].numpy(), 5, queries[b].numpy()))
    expected = (queries[0, 0] - points[0, index[0, 0]]).norm(dim=-1)
    assert torch.allclose(away[0, 0], expected, atol=1e-6)


def test_farthest_points_of_several_clouds_are_those_of_fpsample():
    clouds = [ball(200, seed) for seed in range(3)]
    real = torch.ones(3, 200, dtype=torch.bool)
    found = device.farthest_in_batch(as_batch(*clouds), real, 40).numpy()
    for cloud, mine in zip(clouds, found, strict=True):
        assert np.array_equal(mine, farthest(cloud, 40))


def test_points_that_only_fill_a_block_are_never_chosen():
    points = as_batch(ball(1500))
    for count in (1, 333, 1499, 1500):
        (index,) = device.spread_out(points, count).numpy()
        assert len(index) == count and len(np.unique(index)) == count


def test_blocks_on_a_device_spread_points_as_evenly_as_those_of_the_cpu():
    cloud = ball(9000).astype(np.float32)
    (mine,) = device.spread_out(as_batch(cloud), 3000).numpy()
    theirs = choose.spread_out(cloud, 3000)
    assert len(np.unique(mine)) == 3000
    assert least_gap(cloud[mine]) > 0.9 * least_gap(cloud[theirs])


def test_relaxing_on_a_device_moves_points_as_the_cpu_does():
    found, fixed = ball(900).astype(np.float32), ball(50, 1).astype(np.float32)
    chosen = found[::5]
    mine = device.relax(*(as_batch(c) for c in (chosen, found, fixed)))[0].numpy()
    assert mine == pytest.approx(choose.relax(chosen, found, fixed), abs=1e-4)


@pytest.mark.parametrize("keep", [False, True])
def test_trained_weights_give_clouds_as_even_and_as_near_to_the_surface_as_on_the_cpu(keep):
    clouds = [ball(400, seed) for seed in range(3)]
    there = device.DeviceSurface(load_network("shape"), CPU, torch.float32, denoise=False)
    up = Upsampler(load_network("shape"), "cpu", denoise=False)
    expected = up.upsample_many(clouds, 4, keep_measured=keep)
    up.way = there
    found = up.upsample_many(clouds, 4, keep_measured=keep)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape == (1600, 3)
        off = [np.abs(np.linalg.norm(c, axis=1) - 1).mean() for c in (mine, theirs)]
        assert off[0] < 1.1 * off[1] and least_gap(mine) > 0.85 * least_gap(theirs)


def test_noisy_clouds_are_denoised_beside_clean_ones():
    rng = np.random.default_rng(0)
    clouds = [ball(1100), ball(1100, 1) + rng.normal(0, 0.02, (1100, 3))]
    up = Upsampler(load_network("shape"), "cpu")
    expected = up.upsample_many(clouds, 2)
    up.way = device.DeviceSurface(load_network("shape"), CPU, torch.float32)
    for mine, theirs in zip(up.upsample_many(clouds, 2), expected, strict=True):
        off = [np.abs(np.linalg.norm(c, axis=1) - 1).mean() for c in (mine, theirs)]
        assert off[0] < 1.1 * off[1]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("preset", ["shape", "paper"])
def test_presets_and_precisions_run_on_the_device(preset, precision):
    torch.manual_seed(0)
    network = build_network(replace(PRESETS[preset], width=16, neighbours=6))
    clouds = [ball(60), ball(40), ball(60, 1)]
    with pretended_device():
        up = Upsampler(network, CUDA, precision=precision, denoise=False)
        dense = up.upsample_many(clouds, [3, 2.5, 3])
    assert [len(d) for d in dense] == [180, 100, 180]
    assert all(np.isfinite(d).all() for d in dense)


def test_clouds_of_one_size_go_there_and_come_back_together():
    network = build_network(replace(PRESETS["shape"], width=16, neighbours=6))
    with pretended_device() as counted:
        up = Upsampler(network, CUDA, denoise=False)
        totals = []
        for count in (1, 5):
            counted.clear()
            up.upsample_many([ball(80, seed) for seed in range(count)], 3)
            totals.append(counted.operations.total())
            points = [size for size in counted.downloads if size > 8]
            assert len(points) == 1
            assert not counted.synchronisations
    assert totals[1] < 1.1 * totals[0]
