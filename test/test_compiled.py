# SPDX-License-Identifier: Apache-2.0
"""Machine code beside what it replaces: the network in PyTorch, and scipy's trees."""

import dataclasses
import time

import numpy as np
import pytest
import torch
from scipy.spatial import cKDTree

from apusmog_core.config import PRESETS
from apusmog_core.model import ApuSmog
from apusmog_core.sensor.compiled import CompiledApuSmog, supports
from apusmog_core.sensor.grid import ray_neighbours
from apusmog_core.sensor.kernels import LANES
from apusmog_core.sensor.neighbours import nearest_seen
from apusmog_core.upsampler import Upsampler


def network(**changes) -> ApuSmog:
    torch.manual_seed(0)
    made = ApuSmog(dataclasses.replace(PRESETS["lidar"], **changes)).eval().requires_grad_(False)
    for parameter in made.parameters():  # zeros would hide what they multiply
        parameter.add_(0.2 * torch.randn_like(parameter))
    return made


def scene(count: int, neighbours: int = 9, per: int = 3) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Points, neighbours and context of a cloud in grid steps, and rays."""
    rng = np.random.default_rng(count)
    points = rng.uniform(0, np.sqrt(count), (count, 3)) * (1, 1, 5)
    near = ray_neighbours(points, np.array([count]), neighbours)
    context = rng.normal(size=(count, 2))
    rays = rng.uniform(-1.5, 1.5, (count, per, 2))
    given = [torch.from_numpy(a)[None] for a in (points.astype(np.float32), near)]
    context, rays = (torch.from_numpy(a.astype(np.float32))[None] for a in (context, rays))
    return [*given, context], rays


@pytest.mark.parametrize("count", [1, LANES - 1, LANES, 3 * LANES + 1])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(width=12, decoder_layers=2),
        dict(neighbours=5, frequencies=3, learned_weights=False),
    ],
)
def test_machine_code_gives_the_answers_of_the_network(count, changes):
    slow = network(**changes)
    quick = CompiledApuSmog(slow)
    cloud, rays = scene(count, slow.config.neighbours)
    anchors = torch.arange(count).flip(0)
    expected, found = (n.decode_at(n.encode(*cloud), rays, anchors) for n in (slow, quick))
    for name in ("coarse", "log_scale", "hit"):
        assert torch.allclose(getattr(found, name), getattr(expected, name), atol=2e-4), name
    expected, found = (n.components(n.encode(*cloud)) for n in (slow, quick))
    assert torch.allclose(found, expected, atol=2e-4)


@pytest.mark.parametrize(
    "changes",
    [
        dict(query_self_attention=True),
        dict(encoder_layers=1),
        dict(covariance="rotation"),
        dict(width=18),
        dict(decoder_hidden=34),
    ],
)
def test_what_the_machine_code_does_not_know_stays_with_pytorch(changes):
    assert not supports(network(**changes)) and supports(network())


def test_a_cloud_comes_out_the_same_with_and_without_machine_code():
    up = Upsampler.load("lidar", "cpu")
    azimuth, elevation = np.meshgrid(np.arange(40) * 0.004, np.arange(8) * 0.008 - 0.05)
    ray = (np.cos(azimuth), np.sin(azimuth), np.tan(elevation))
    cloud = 12.0 * np.stack(ray, axis=-1).reshape(-1, 3)
    quick = up.upsample(cloud, 3.7, origin=(0, 0, 0))
    up.way._ray_network = up.network
    slow = up.upsample(cloud, 3.7, origin=(0, 0, 0))
    away = cKDTree(slow).query(quick)[0]
    assert (away < 1e-4).mean() > 0.99  # equally likely points may change places


def test_weights_that_training_has_broken_give_nan_as_the_network_does():
    broken = network()
    broken.head.offset.weight.fill_(float("nan"))
    cloud, rays = scene(10)
    quick = CompiledApuSmog(broken)
    assert quick.decode_at(quick.encode(*cloud), rays, torch.arange(10)).hit.isnan().all()


def test_networks_of_surfaces_stay_in_pytorch():
    surfaces = ApuSmog(PRESETS["shape"])
    assert not supports(surfaces)
    with pytest.raises(ValueError, match="sensor"):
        CompiledApuSmog(surfaces)


@pytest.mark.parametrize("stretch", [(1, 1), (30, 1), (1, 0), (0, 0)])
def test_nearest_rays_are_those_of_a_tree_for_each_cloud(stretch):
    rng = np.random.default_rng(0)
    sizes = np.array([1, 4, 300, 9])
    rays = np.concatenate([rng.uniform(0, np.sqrt(n), (n, 2)) * stretch for n in sizes])
    index, end = ray_neighbours(rays, sizes, 9), np.cumsum(sizes)
    for start, stop in zip(end - sizes, end, strict=True):
        cloud, found = rays[start:stop], index[start:stop]
        assert ((found >= start) & (found < stop)).all()
        k = min(9, len(cloud))
        expected = cKDTree(cloud).query(cloud, k=np.arange(1, k + 1))[0]
        away = np.linalg.norm(rays[found[:, :k]] - cloud[:, None], axis=2)
        assert np.allclose(away, expected)
        assert (found[:, k:] == np.arange(start, stop)[:, None]).all()


def test_crowds_and_copies_of_rays_take_no_longer_than_others():
    rng = np.random.default_rng(0)
    count = np.array([100_000])
    apart, crowd, copies = (rng.random((100_000, 2)) * size for size in (300, 1e-3, 0))
    ray_neighbours(apart, count, 9)  # compiles
    seconds = []
    for rays in (apart, crowd, copies):
        start = time.perf_counter()
        ray_neighbours(rays, count, 9)
        seconds.append(time.perf_counter() - start)
    assert max(seconds) < 10 * seconds[0]


def test_the_nearest_point_around_the_sensor_is_that_of_a_tree_wherever_it_lies():
    rng = np.random.default_rng(0)
    points = rng.normal(size=(2000, 3)) * (30, 30, 3)
    asked = np.concatenate(
        (
            points + rng.normal(size=points.shape) * 0.1,  # near
            rng.normal(size=(200, 3)) * 200,  # far from any
            [(0, 0, 0), (0, 0, 50), (0, 0, -50), (-20, 1e-7, 0), (-20, -1e-7, 0)],  # poles, seam
        )
    )
    for cloud in (points, points[:1], points + (100, 0, 0)):
        cloud, queries = cloud.astype(np.float32), asked.astype(np.float32)
        found = np.linalg.norm(cloud[nearest_seen(cloud, queries)] - queries, axis=1)
        assert np.allclose(found, cKDTree(cloud).query(queries)[0], rtol=1e-5)
