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


def with_device_code(denoise: bool = False) -> Upsampler:
    """What a GPU would run, on the CPU."""
    up = Upsampler(load_network("shape"), "cpu", denoise=denoise)
    up.way = device.DeviceSurface(up.network, CPU, torch.float32, denoise)
    return up


def least_gap(points: np.ndarray) -> float:
    return float(np.quantile(cKDTree(points).query(points, k=2)[0][:, 1], 0.05))


def apart(*clouds: np.ndarray) -> torch.Tensor:
    """Points (N, 4) of all clouds, as a device has them."""
    tables = [np.insert(c, 3, i * device.APART, axis=1) for i, c in enumerate(clouds)]
    return torch.from_numpy(np.concatenate(tables).astype(np.float32))


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


@pytest.mark.parametrize("memory", [1 << 30, 1 << 14])
def test_neighbours_are_of_the_same_cloud_whatever_its_size(monkeypatch, memory):
    monkeypatch.setattr("apusmog_core.geometry.free_memory", lambda _: memory)
    clouds, queries = ([ball(n, n) for n in sizes] for sizes in ((50, 3, 1, 200), (9, 20, 5, 40)))
    sizes, counts = (np.array([len(c) for c in many]) for many in (clouds, queries))
    away, index = device.nearest_of_each(apart(*clouds), sizes, apart(*queries), counts, 5)
    begin = np.cumsum(sizes) - sizes
    found = zip(
        np.split(index.numpy(), np.cumsum(counts)[:-1]), clouds, queries, begin, strict=True
    )
    for mine, cloud, asked, first in found:
        assert np.array_equal(mine - first, nearest(cloud.astype(np.float32), 5, asked))
    assert away.max() <= 2


def chosen(clouds: list[np.ndarray], counts, fixed: float | None = None) -> list[np.ndarray]:
    """Indices of the points that are chosen of each cloud; far from `fixed` along x."""
    sizes = np.array([len(c) for c in clouds])
    plan = device.Choice(sizes, np.asarray(counts), fixed is not None)
    points = apart(*clouds)
    away = None if fixed is None else (points[:, 0] - fixed).abs()
    sent = {name: torch.from_numpy(array) for name, array in plan.packed.items()}
    index = plan.choose(points, away, sent).numpy()
    parts = np.split(index, np.cumsum(counts)[:-1])
    return [part - first for part, first in zip(parts, np.cumsum(sizes) - sizes, strict=True)]


def test_farthest_points_of_a_few_are_those_of_fpsample_cloud_by_cloud():
    clouds = [ball(200, seed) for seed in range(3)]
    for cloud, mine in zip(clouds, chosen(clouds, [40, 30, 1]), strict=True):
        assert np.array_equal(mine, farthest(cloud, len(mine)))


def test_each_cloud_gets_its_count_and_no_point_twice():
    in_one_place = np.zeros((70, 3))
    clouds = [ball(1500), in_one_place, ball(4), ball(900, 1)]
    for counts in ((1, 70, 4, 333), (1499, 1, 3, 900), (1500, 33, 1, 64)):
        found = chosen(clouds, counts)
        assert [len(np.unique(mine)) for mine in found] == list(counts)
        for mine, cloud in zip(found, clouds, strict=True):
            assert 0 <= mine.min() and mine.max() < len(cloud)


def test_points_far_from_measured_ones_go_first():
    clouds = [ball(600), ball(300, 1)]
    for cloud, mine in zip(clouds, chosen(clouds, [200, 100], fixed=1.0), strict=True):
        assert cloud[mine, 0].max() < np.median(cloud[:, 0]) + 0.1


def test_blocks_on_a_device_spread_points_as_evenly_as_those_of_the_cpu():
    cloud = ball(9000).astype(np.float32)
    cloud = cloud[cKDTree(cloud).indices]
    (mine,) = chosen([cloud], [3000])
    theirs = choose.spread_out(cloud, 3000)
    assert len(np.unique(mine)) == 3000
    assert least_gap(cloud[mine]) > 0.85 * least_gap(cloud[theirs])


def test_relaxing_on_a_device_moves_points_as_the_cpu_does():
    found, fixed = (
        [ball(n, n).astype(np.float32) for n in sizes] for sizes in ((900, 400), (50, 9))
    )
    few = [cloud[::5] for cloud in found]
    new, sizes = (np.array([len(c) for c in many]) for many in (few, found))
    away = np.concatenate(
        [cKDTree(f).query(c)[0] for f, c in zip(fixed, found, strict=True)], dtype=np.float32
    )
    mine = device.relax(apart(*few), new, apart(*found), sizes, torch.from_numpy(away)).numpy()
    theirs = [choose.relax(*three) for three in zip(few, found, fixed, strict=True)]
    assert mine[:, :3] == pytest.approx(np.concatenate(theirs), abs=1e-4)


@pytest.mark.parametrize("keep", [False, True])
def test_trained_weights_give_clouds_as_even_and_as_near_to_the_surface_as_on_the_cpu(keep):
    clouds = [ball(250 + 50 * seed, seed) for seed in range(6)]
    up = Upsampler(load_network("shape"), "cpu", denoise=False)
    expected = up.upsample_many(clouds, 4, keep_measured=keep)
    found = with_device_code().upsample_many(clouds, 4, keep_measured=keep)
    assert [c.shape for c in found] == [c.shape for c in expected]
    for mine, theirs in zip(found, expected, strict=True):
        off = [np.abs(np.linalg.norm(c, axis=1) - 1).mean() for c in (mine, theirs)]
        assert off[0] < 1.1 * off[1] and least_gap(mine) > 0.7 * least_gap(theirs)
    gaps = [np.mean([least_gap(c) for c in dense]) for dense in (found, expected)]
    assert gaps[0] > 0.85 * gaps[1]


def test_strays_are_pulled_back_on_a_device_as_on_the_cpu():
    clouds = [ball(n, n) for n in (60, 4)]
    moved = [
        c.repeat(3, 0) + np.random.default_rng(0).normal(0, 0.2, (3 * len(c), 3)) for c in clouds
    ]
    found = apart(*moved).unflatten(0, (64, 3))
    reach = torch.from_numpy(
        np.concatenate([choose.reach_of(c) for c in clouds]).astype(np.float32)
    )
    mine = device.pull_back_strays(found, apart(*clouds), reach, np.array([60, 4])).flatten(0, 1)
    theirs = [choose.pull_back_strays(m, c) for m, c in zip(moved, clouds, strict=True)]
    assert mine[:, :3].numpy() == pytest.approx(np.concatenate(theirs), abs=1e-4)


def test_noisy_clouds_are_denoised_beside_clean_ones():
    rng = np.random.default_rng(0)
    clouds = [ball(1100), ball(1100, 1) + rng.normal(0, 0.02, (1100, 3))]
    expected = Upsampler(load_network("shape"), "cpu").upsample_many(clouds, 2)
    found = with_device_code(denoise=True).upsample_many(clouds, 2)
    for mine, theirs in zip(found, expected, strict=True):
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


@pytest.mark.parametrize("keep", [False, True])
def test_clouds_of_any_sizes_go_there_and_come_back_together(keep):
    network = build_network(replace(PRESETS["shape"], width=16, neighbours=6))
    with pretended_device() as counted:
        up = Upsampler(network, CUDA, denoise=False)
        totals = []
        for sizes in ([80], [80, 33, 90, 4, 61]):
            counted.clear()
            up.upsample_many([ball(n, n) for n in sizes], 3, keep_measured=keep)
            totals.append(counted.operations.total())
            assert len(counted.uploads) == len(counted.downloads) == 1
            assert not counted.synchronisations
    assert totals[1] < 1.1 * totals[0]


def test_the_farthest_points_of_a_cloud_take_few_operations():
    with pretended_device() as counted:
        up = Upsampler(load_network("shape"), CUDA, denoise=False)
        counted.clear()
        up.upsample(ball(1024), 4)
        assert counted.operations.total() <= 500 and not counted.synchronisations
        assert len(counted.uploads) == len(counted.downloads) == 1


def test_a_cloud_does_not_depend_on_those_beside_it():
    up = with_device_code()
    alone = up.upsample(ball(300), 4)
    beside = up.upsample_many([7 * ball(120, 1) + 50, ball(300)], 4)[1]
    assert cKDTree(alone).query(beside)[0].max() < 1e-4


def test_a_cloud_with_too_many_candidates_is_chosen_from_on_the_cpu(monkeypatch):
    clouds = [ball(60), ball(300, 1)]
    expected = Upsampler(load_network("shape"), "cpu", denoise=False).upsample_many(clouds, 4)
    up, there = with_device_code(), []
    grow_together = up.way._grow_together

    def noted(some, *rest):
        there.extend(len(one.measured) for one in some)
        return grow_together(some, *rest)

    up.way._grow_together = noted
    up.upsample_many(clouds, 4)
    monkeypatch.setattr(device, "MOST_CANDIDATES", 4000)
    found = up.upsample_many(clouds, 4)
    assert there == [60, 300, 60] and [len(c) for c in found] == [240, 1200]
    assert found[1] == pytest.approx(expected[1], abs=1e-5)


def test_without_room_for_all_clouds_half_of_them_go_at_a_time():
    network = build_network(replace(PRESETS["shape"], width=16, neighbours=6))
    clouds = [ball(n, n) for n in (40, 70, 30, 60)]
    with pretended_device():
        up = Upsampler(network, CUDA, denoise=False)
        wanted, encode = up.upsample_many(clouds, 3), up.network.encode

        def full(points, *rest, **options):
            if points.shape[1] > 120:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory (as the test wants it)")
            return encode(points, *rest, **options)

        up.network.encode = full
        with pytest.warns(UserWarning, match="halved"):
            found = up.upsample_many(clouds, 3)
    for one, other in zip(wanted, found, strict=True):
        assert one.shape == other.shape and cKDTree(one).query(other)[0].max() < 1e-4
