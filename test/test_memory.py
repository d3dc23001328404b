# SPDX-License-Identifier: Apache-2.0
"""A GPU without room: the failed batch goes first, then halves, then the CPU, for one scan."""

import threading
import weakref

import numpy as np
import pytest
import torch
from scipy.spatial import cKDTree
from sensor_scans import bumpy, grid_scan

from apusmog_core import Upsampler
from apusmog_core.config import PRESETS
from apusmog_core.weights import build_network

SIZE = 30  # points of each object


class Full:
    """Stands before a network's `encode` and raises as a GPU does that has room for few points."""

    def __init__(self, network, room: int):
        self.encode, self.room = network.encode, room
        self.asked: list[int] = []  # points of each call
        self.failed: list[weakref.ref] = []  # what the failed calls had allocated
        self.still_there = 0  # of these, when the next call came
        network.encode = self

    def __call__(self, points, *rest):
        count = len(points)
        self.still_there += sum(batch() is not None for batch in self.failed)
        self.asked.append(count)
        if count > self.room:
            batch = points.clone()
            self.failed.append(weakref.ref(batch))
            raise torch.cuda.OutOfMemoryError("CUDA out of memory (as the test wants it)")
        return self.encode(points, *rest)


def objects(count: int):
    """A scan of so many objects beside each other."""
    instance = np.repeat(np.arange(1, count + 1), 5)[None].repeat(SIZE // 5, axis=0)
    return grid_scan(bumpy(rings=SIZE // 5, columns=5 * count), instance)


@pytest.fixture
def up():
    torch.manual_seed(0)
    return Upsampler(build_network(PRESETS["lidar"]), "cpu", compiled=False)


def grow(up, count: int) -> list[np.ndarray]:
    counts = [4 * SIZE] * count
    return [dense.points for dense in up.upsample_scan(objects(count), counts).split(counts)]


def test_a_batch_that_does_not_fit_is_freed_and_halved(up):
    wanted = grow(up, 5)
    gpu = Full(up.network, 2 * SIZE)
    with pytest.warns(UserWarning, match="halved"):
        found = grow(up, 5)
    assert gpu.asked == [150, 60, 90, 30, 60] and gpu.still_there == 0
    for one, other in zip(wanted, found, strict=True):
        assert one.shape == other.shape
        assert cKDTree(one).query(other)[0].max() < 1e-4


def test_one_object_that_does_not_fit_is_done_by_the_cpu_for_this_scan_only(up):
    wanted, network = grow(up, 2), up.network
    gpu = Full(network, SIZE - 1)
    with pytest.warns(UserWarning, match="on the CPU"):
        found = grow(up, 2)
    assert gpu.asked == [60, 30, 30] and gpu.still_there == 0
    assert all(cKDTree(a).query(b)[0].max() < 1e-4 for a, b in zip(wanted, found, strict=True))
    gpu.room = 1000
    assert up.network is network and len(grow(up, 2)) == 2
    assert gpu.asked[3:] == [60]  # there again


def test_the_cpu_takes_over_from_half_precision():
    torch.manual_seed(0)
    network = build_network(PRESETS["lidar"])
    half = Upsampler(network, "cpu", precision="bfloat16")
    wanted = grow(half, 2)
    Full(half.network, SIZE - 1)
    with pytest.warns(UserWarning, match="on the CPU"):
        found = grow(half, 2)
    assert all(cKDTree(a).query(b)[0].max() < 0.02 for a, b in zip(wanted, found, strict=True))


def test_a_scan_beside_one_that_goes_to_the_cpu_keeps_its_network(up):
    """The second scan is in the middle of the network while the first gives up the GPU."""
    wanted, places = grow(up, 3), []
    inside, leave = threading.Event(), threading.Event()
    encode = up.network.encode

    def slow(*tensors):
        if threading.current_thread() is second:
            inside.set()
            assert leave.wait(30)
            places.extend((up.network, p.data_ptr()) for p in up.network.parameters())
            return encode(*tensors)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory (as the test wants it)")

    results = []
    second = threading.Thread(target=lambda: results.extend(grow(up, 3)))
    up.network._apply = lambda *_: pytest.fail("the network moves")  # what `.to` and `.cpu` call
    before = [(up.network, p.data_ptr()) for p in up.network.parameters()]
    up.network.encode = slow
    second.start()
    assert inside.wait(30)
    with pytest.warns(UserWarning, match="on the CPU"):
        first = grow(up, 3)
    leave.set()
    second.join(30)
    assert places == before
    for all_three in (first, results):
        for one, other in zip(wanted, all_three, strict=True):
            assert cKDTree(one).query(other)[0].max() < 1e-4


def test_the_copy_for_the_cpu_leaves_random_numbers_alone(up):
    before = torch.get_rng_state()
    up._on_cpu()
    assert torch.equal(torch.get_rng_state(), before)
