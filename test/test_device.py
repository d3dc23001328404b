# SPDX-License-Identifier: Apache-2.0
"""Whole scans on a device: few operations, one upload, one download, and the CPU's answers."""

import numpy as np
import pytest
import torch
from pretended_device import pretended_device
from scipy.spatial import cKDTree
from sensor_scans import bumpy, grid_scan

from apusmog_core import ScanPipeline, Upsampler
from apusmog_core.compute import PRECISIONS
from apusmog_core.config import PRESETS, PipelineConfig
from apusmog_core.data import open_scans
from apusmog_core.pace import typical_scan
from apusmog_core.sensor import device
from apusmog_core.sensor.compiled import CompiledRayNetwork
from apusmog_core.sensor.grow import LIMITS
from apusmog_core.sensor.lattice import judge_rays
from apusmog_core.sensor.view import ObjectScan, look_around, nearest_measured, ray_points
from apusmog_core.weights import build_network, load_network

CUDA = torch.device("cuda")


def objects(count: int = 6, **rest) -> ObjectScan:
    """A scan with a few objects beside each other, and what is around them."""
    reach = bumpy(rings=7, columns=12 * count)
    reach[2, 5:9] = np.nan
    instance = np.repeat(np.arange(count), 12)[None].repeat(7, axis=0)
    instance[:, ::12] = 0
    return grid_scan(reach, instance, shift=0.3, **rest)


@pytest.fixture
def lidar():
    return load_network("lidar")


@pytest.fixture(scope="module")
def kitti_scan():
    from conftest import DATA

    if not (DATA / "kitti_raw_0051").is_dir():
        pytest.skip("no KITTI drive in shared/data")
    one = next(iter(open_scans(DATA / "kitti_raw_0051")))
    pipeline = ScanPipeline(PipelineConfig(device="cpu", weights="lidar"))
    found = pipeline.segment(one.points, one.intensity, one.ring)
    rng = np.random.default_rng(0)
    where = (found.points, found.instance.astype(np.int64), found.ring, found.height)
    return ObjectScan(*where, bias=rng.normal(0, 0.01, 64)[found.ring - found.ring.min()])


def sizes_of(scan: ObjectScan) -> np.ndarray:
    return np.bincount(scan.instance)[1:]


# --- what a GPU is asked to do -------------------------------------------------------------------


@pytest.mark.parametrize("spread", ["rings", "even"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_kitti_scan_takes_at_most_200_operations_one_upload_and_one_download(
    lidar, kitti_scan, precision, spread
):
    with pretended_device() as counted:
        up = Upsampler(lidar, CUDA, precision=precision)
        counted.clear()
        up.upsample_scan(kitti_scan, 4 * sizes_of(kitti_scan), spread=spread)
        assert counted.operations.total() <= 200
        assert len(counted.uploads) == len(counted.downloads) == 1
        assert counted.synchronisations == ["nonzero"]  # how many points are the lowest


def test_a_message_becomes_dense_on_a_device_with_its_intensities():
    scan = typical_scan().only(np.arange(1, 40))
    intensity = np.arange(len(scan.points), dtype=np.float32)
    with pretended_device() as counted:
        config = PipelineConfig(device="cuda", weights="lidar", precision="bfloat16")
        pipeline = ScanPipeline(config)
        counted.clear()
        dense = pipeline.process(scan.points, intensity, ratio=4.0, ring=scan.ring)
        assert len(counted.uploads) == len(counted.downloads) == 1
    assert np.count_nonzero(dense.generated) > 1000
    assert np.array_equal(dense.intensity, dense.segments.intensity[dense.source])
    away = np.linalg.norm(dense.points - dense.segments.points[dense.source], axis=1)
    assert np.quantile(away, 0.9) < 0.5


@pytest.mark.parametrize("spread", ["rings", "even"])
def test_the_count_of_operations_does_not_grow_with_the_scan(lidar, spread):
    totals = []
    with pretended_device() as counted:
        up = Upsampler(lidar, CUDA)
        for count in (2, 12):
            scan = objects(count)
            counted.clear()
            up.upsample_scan(scan, 4 * sizes_of(scan), spread=spread)
            totals.append((counted.operations.total(), len(counted.uploads)))
    assert totals[0] == totals[1]
    assert totals[0][0] <= 200 and totals[0][1] == 1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_device_gives_what_the_cpu_gives_in_every_precision(lidar, precision):
    scan = objects()
    counts = np.round(3.6 * sizes_of(scan)).astype(int)
    wanted = Upsampler(lidar, "cpu", compiled=False).upsample_scan(scan, counts)
    with pretended_device():
        made = Upsampler(lidar, CUDA, precision=precision).upsample_scan(scan, counts)
    away = cKDTree(wanted.points).query(made.points)[0]
    assert made.points.shape == wanted.points.shape
    assert np.quantile(away, 0.9) < (1e-5 if precision == "float32" else 0.05)
    assert {p.dtype for p in lidar.parameters()} == {torch.float32}  # the caller's stay as they are


def test_the_chunk_follows_free_memory(lidar):
    scan = objects()
    counts, results, uploads = 4 * sizes_of(scan), [], []
    for memory in (8 << 30, 6 << 20):
        with pretended_device(memory) as counted:
            up = Upsampler(lidar, CUDA)
            counted.clear()
            results.append(up.upsample_scan(scan, counts))
            uploads.append(len(counted.uploads))
    assert uploads[0] == 1 and uploads[1] == len(counts)  # each object fits by itself
    one, many = results
    assert cKDTree(one.points).query(many.points)[0].max() < 1e-4


# --- the same answers ----------------------------------------------------------------------------


def check_against_machine_code(network, scan, monkeypatch):
    """The same rays, asked by the compiled path, end at the same points: confidence and source."""
    asked = {}
    points_of = device.points_of

    def watched(own, across, above, below, depth, column):
        rays = torch.stack((across, above - below), dim=1).numpy().copy()
        asked.update(rays=rays, anchors=own[:, device.PLACE].long().numpy().copy())
        return points_of(own, across, above, below, depth, column)

    monkeypatch.setattr(device, "points_of", watched)
    made = device.DeviceRays(network, torch.device("cpu"), torch.float32).grow(
        scan, 3 * sizes_of(scan), True
    )
    graph, quick = look_around(scan), CompiledRayNetwork(network)
    cloud = np.repeat(np.arange(len(graph.sizes)), graph.sizes)
    encoded = quick.encode(graph.offsets, graph.neighbours, graph.context, cloud)
    anchors, rays = asked["anchors"], asked["rays"]
    depth, log_scale, intensity = quick.decode(encoded, rays[:, None], anchors)
    points = ray_points(graph, anchors, rays, depth[:, 0])
    assert np.abs(points - made.points).max() < 1e-4
    metres = np.exp(graph.polar[:, 2]) * graph.steps[:, 0]
    where = (rays[:, None], anchors, metres, graph.border)
    sure = judge_rays(intensity, log_scale, *where, *LIMITS)
    assert np.abs(sure - made.confidence).max() < 1e-3
    # machine code goes on from there to nearer ones, which seldom differ and are hardly nearer
    nearest = nearest_measured(scan, graph, anchors, points)
    away = [np.linalg.norm(scan.points[rows] - points, axis=1) for rows in (made.source, nearest)]
    assert np.mean(away[0] - away[1]) < 0.01


def test_points_of_a_kitti_scan_are_those_of_the_machine_code(lidar, kitti_scan, monkeypatch):
    check_against_machine_code(lidar, kitti_scan, monkeypatch)


@pytest.mark.parametrize("case", ["across the seam", "no rings", "alone", "heights"])
def test_points_are_those_of_the_machine_code(lidar, monkeypatch, case):
    scan = {
        "across the seam": lambda: objects(start=np.pi - 0.06),
        "no rings": lambda: objects(ring=None),
        "alone": lambda: objects(whole=False),
        "heights": lambda: objects(
            height=np.where(np.arange(500) % 7, 0.5, np.nan)[: len(objects().points)]
        ),
    }[case]()
    check_against_machine_code(lidar, scan, monkeypatch)


def test_machine_code_and_pytorch_choose_nearly_the_same_rays(lidar, kitti_scan):
    counts = 4 * sizes_of(kitti_scan)
    one, other = (
        Upsampler(lidar, "cpu", compiled=compiled).upsample_scan(kitti_scan, counts)
        for compiled in (True, False)
    )
    assert np.mean(cKDTree(one.points).query(other.points)[0] < 1e-3) > 0.9
    assert abs(one.confidence.mean() - other.confidence.mean()) < 0.01


def test_the_seed_changes_which_of_the_last_rays_stay(lidar):
    scan = objects()
    counts = np.round(5.5 * sizes_of(scan)).astype(int)
    clouds = [
        Upsampler(lidar, "cpu", seed=seed, compiled=False).upsample_scan(scan, counts).points
        for seed in (0, 0, 7)
    ]
    assert np.array_equal(clouds[0], clouds[1]) and not np.array_equal(clouds[0], clouds[2])


def test_broken_weights_are_refused():
    network = build_network(PRESETS["lidar"])
    with torch.no_grad():
        network.mixture_head.xi[0].weight.fill_(float("nan"))
    scan = objects()
    with pytest.raises(ValueError, match="not finite"):
        Upsampler(network, "cpu", compiled=False).upsample_scan(scan, 3 * sizes_of(scan))
