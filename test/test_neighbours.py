# SPDX-License-Identifier: Apache-2.0
"""Nearest neighbours in machine code beside those of scipy's trees."""

import time

import numpy as np
import pytest
from scipy.spatial import cKDTree

from apusmog_core.sensor.neighbours import nearest_rays


def all_nearest(rays: np.ndarray, sizes: np.ndarray, k: int = 9) -> np.ndarray:
    return nearest_rays(rays, sizes, np.arange(len(rays)), sizes, k)


@pytest.mark.parametrize("stretch", [(1, 1), (30, 1), (1, 0), (0, 0)])
def test_nearest_rays_are_those_of_a_tree_for_each_cloud(stretch):
    rng = np.random.default_rng(0)
    sizes = np.array([1, 4, 300, 9])
    rays = np.concatenate([rng.uniform(0, np.sqrt(n), (n, 2)) * stretch for n in sizes])
    index, end = all_nearest(rays, sizes), np.cumsum(sizes)
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
    all_nearest(apart, count)  # compiles
    seconds = []
    for rays in (apart, crowd, copies):
        start = time.perf_counter()
        all_nearest(rays, count)
        seconds.append(time.perf_counter() - start)
    assert max(seconds) < 10 * seconds[0]
