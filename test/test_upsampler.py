# SPDX-License-Identifier: Apache-2.0
"""Any cloud, any ratio: exact counts, nothing lost, clear refusals."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.spatial import cKDTree

from apusmog_core import Upsampler, compute
from apusmog_core.config import PRESETS
from apusmog_core.geometry import farthest, geodesic_patches
from apusmog_core.surface import choose
from apusmog_core.surface.device import DeviceSurface
from apusmog_core.surface.grow import SurfaceUpsampler
from apusmog_core.weights import build_network, save, shipped

RATIOS = (0.5, 1, 1.5, 1.98, 2.34, 3.45, 4, 4.93, 7.72, 9.51, 18.11, 22.86)
EYE = (0.0, 0.0, 0.0)


@pytest.fixture(scope="module", params=["shape", "lidar", "paper"])
def up(request):
    """Small networks without training: what is tested here holds for any weights."""
    torch.manual_seed(0)
    few = {} if request.param == "lidar" else {"neighbours": 6}
    return Upsampler(build_network(replace(PRESETS[request.param], width=16, **few)), "cpu")


def ball(count: int, seed: int = 0) -> np.ndarray:
    points = np.random.default_rng(seed).normal(size=(count, 3))
    return points / np.linalg.norm(points, axis=1, keepdims=True) + [20.0, 3.0, 0.0]


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_count_is_exactly_ratio_times_points(up, ratio):
    for count in (1, 5, 64):
        for keep in (False, True):
            dense = up.upsample(ball(count), ratio, keep_measured=keep, origin=EYE)
            assert dense.shape == (round(ratio * count), 3) and dense.dtype == np.float32
            assert np.isfinite(dense).all()


def test_clouds_of_different_sizes_and_ratios_go_together(up):
    clouds = [ball(n, n) for n in (1, 17, 90)]
    dense = up.upsample_many(clouds, [4, 0.5, 2.34], origin=EYE)
    assert [len(d) for d in dense] == [4, round(8.5), round(2.34 * 90)]


def test_measured_points_come_first_and_unchanged(up):
    points = ball(80).astype(np.float32)
    dense = up.upsample(points, 3.3, keep_measured=True, origin=EYE)
    assert np.array_equal(dense[:80], points)
    assert cKDTree(points).query(dense[80:])[0].max() > 0  # and the rest is new


def test_the_same_seed_gives_the_same_cloud(up):
    points = ball(70)
    first, again = (up.upsample(points, 2.7, origin=EYE) for _ in range(2))
    assert np.array_equal(first, again)


def test_new_points_stay_near_the_cloud(up):
    if up.config.output == "absolute":
        pytest.skip("the paper's absolute output goes anywhere before training")
    points = ball(100)
    dense = up.upsample(points, 4, origin=EYE)
    assert cKDTree(points).query(dense)[0].max() < 1.0


def test_millimetres_survive_offsets_of_a_map(up):
    offset = np.array([451_234.5, 5_412_345.25, 300.0])
    points = ball(60)
    near = up.upsample(points, 2, origin=EYE)
    far = up.upsample(points + offset, 2, origin=np.array(EYE) + offset)
    assert far.dtype == np.float64
    gap = cKDTree(near).query(far - offset)[0]
    assert np.median(gap) < 1e-3


def test_a_ratio_below_one_thins_to_points_of_the_cloud(up):
    points = ball(100).astype(np.float32)
    thin = up.upsample(points, 0.25, origin=EYE)
    assert len(thin) == 25 and cKDTree(points).query(thin)[0].max() == 0


@pytest.mark.parametrize("shape", ["plane", "line", "duplicates"])
def test_degenerate_clouds_give_finite_points(up, shape):
    points = ball(50)
    if shape == "plane":
        points[:, 0] = 20
    elif shape == "line":
        points[:, :2] = 20, 0
    else:
        points[:] = points[0]
    dense = up.upsample(points, 4.5, origin=EYE)
    assert dense.shape == (225, 3) and np.isfinite(dense).all()


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        (np.zeros((0, 3)), "empty"),
        (np.zeros((5, 4)), "shape"),
        (np.full((5, 3), np.nan), "5 of 5 points are not finite"),
        (np.array([["a", "b", "c"]]), "numbers"),
    ],
)
def test_bad_clouds_are_refused_with_the_reason(up, points, reason):
    with pytest.raises(ValueError, match=reason):
        up.upsample(points, 2, origin=EYE)


@pytest.mark.parametrize("ratio", [0, -1, np.nan, np.inf, "x", None])
def test_bad_ratios_are_refused(up, ratio):
    with pytest.raises(ValueError, match="ratio"):
        up.upsample(ball(10), ratio, origin=EYE)


def test_a_ratio_whose_output_does_not_fit_into_memory_is_refused_with_its_points(up):
    with pytest.raises(ValueError, match=r"10,000,000,000 points would not fit into memory"):
        up.upsample(ball(10), 1e9, origin=EYE)


def test_an_unknown_precision_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'float8' is not one of float32, bfloat16, float16"):
        Upsampler.load("shape", "cpu", precision="float8")


def test_threads_that_overlap_leave_torch_as_it_was():
    before = torch.get_num_threads()
    inside, leave = threading.Barrier(2), threading.Event()

    def late(_):
        inside.wait(10)
        leave.wait(10)

    try:
        torch.set_num_threads(3)
        first = threading.Thread(target=compute.in_threads, args=(late, [0, 1]))
        first.start()
        compute.in_threads(lambda _: leave.set(), [0, 1])  # begins and ends within the first
        first.join(10)
        assert torch.get_num_threads() == 3
        later = []
        new = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        new.start()
        new.join()
        assert later == [3]
    finally:
        torch.set_num_threads(before)


def test_weights_that_see_from_a_sensor_ask_for_it(up):
    if up.config.domain == "sensor":
        with pytest.raises(ValueError, match="--origin X Y Z"):
            up.upsample(ball(10), 2)
    else:
        assert len(up.upsample(ball(10), 2)) == 20


def test_a_turned_scan_gives_the_turned_result(up):
    if up.config.domain != "sensor":
        pytest.skip("only the sensor's grid knows a vertical")
    turn = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])
    points = ball(90)
    straight = up.upsample(points, 3, origin=EYE)
    turned = up.upsample(points @ turn.T, 3, origin=EYE)
    assert np.median(cKDTree(straight @ turn.T).query(turned)[0]) < 1e-3


def test_missing_weights_say_what_there_is_and_how_to_train():
    with pytest.raises(ValueError, match="apusmog train"):
        Upsampler.load("no-such-weights")


def test_weights_survive_a_file(tmp_path, up):
    save(up.network, tmp_path / "w.pt", {"note": "test"}, half=False)
    again = Upsampler.load(tmp_path / "w.pt", device="cpu")
    points = ball(40)
    assert np.array_equal(again.upsample(points, 2, origin=EYE), up.upsample(points, 2, origin=EYE))


def test_a_file_that_is_no_weights_is_named(tmp_path):
    (tmp_path / "w.pt").write_bytes(b"not weights")
    with pytest.raises(ValueError, match=r"w\.pt: not APU-SMOG weights"):
        Upsampler.load(tmp_path / "w.pt")


@pytest.mark.parametrize("name", shipped())
def test_shipped_weights_load_and_fill_a_sphere(name):
    points = ball(256)
    dense = Upsampler.load(name, device="cpu").upsample(points, 4, origin=EYE)
    radius = np.linalg.norm(dense - [20.0, 3.0, 0.0], axis=1)
    assert np.median(np.abs(radius - 1)) < 0.1


def test_patches_cover_every_point_and_follow_the_surface():
    rng = np.random.default_rng(0)
    sheets = rng.random((2000, 3)) * [1, 1, 0]
    sheets[1000:, 2] = 0.15  # two sheets closer than a patch is wide
    patches = geodesic_patches(sheets, 128)
    assert len(np.unique(patches)) > 1990
    one_sided = [np.ptp(sheets[p, 2]) == 0 for p in patches]
    assert np.mean(one_sided) > 0.9


def test_farthest_points_are_distinct_and_spread():
    points = np.random.default_rng(0).random((500, 3))
    index = farthest(points, 50)
    assert len(np.unique(index)) == 50
    random_gap = np.median(cKDTree(points[:50]).query(points[:50], k=2)[0][:, 1])
    assert np.median(cKDTree(points[index]).query(points[index], k=2)[0][:, 1]) > 1.5 * random_gap


def test_large_clouds_are_spread_out_in_blocks_to_the_exact_count(monkeypatch):
    points = np.random.default_rng(0).random((1500, 3))
    whole = choose.spread_out(points, 333)
    monkeypatch.setattr(choose, "BLOCK", 200)
    blocks = choose.spread_out(points, 333)
    gaps = [cKDTree(points[i]).query(points[i], k=2)[0][:, 1].mean() for i in (whole, blocks)]
    assert len(np.unique(blocks)) == 333 and gaps[1] > 0.85 * gaps[0]


def test_relaxed_points_are_more_even_and_nearer_to_the_surface():
    rng = np.random.default_rng(0)
    noisy = rng.random((3000, 3)) * [1, 1, 0] + [0, 0, 1] * rng.normal(0, 0.01, (3000, 1))
    chosen = noisy[farthest(noisy, 300)]
    calm = choose.relax(chosen, noisy, chosen[:0])
    assert np.abs(calm[:, 2]).mean() < 0.6 * np.abs(chosen[:, 2]).mean()
    farthest_hole = [cKDTree(c).query(noisy)[0].mean() for c in (chosen, calm)]
    assert farthest_hole[1] < farthest_hole[0]


def test_no_point_bridges_a_gap_that_the_measured_points_leave():
    rng = np.random.default_rng(0)
    plates = rng.random((600, 3)) * [1, 1, 0]
    plates[300:] += [1.3, 0, 0]
    strays = rng.random((2000, 3)) * [2.3, 1, 0.2]
    away, beside = cKDTree(plates).query(choose.pull_back_strays(strays, plates))
    assert (away < 1.001 * choose.reach_of(plates)[beside]).all()
    dense = Upsampler.load("shape", "cpu").upsample(plates, 4)
    assert not ((dense[:, 0] > 1.1) & (dense[:, 0] < 1.2)).any()


def test_candidates_reach_farther_where_gaps_between_measured_points_are_wider():
    rng = np.random.default_rng(0)
    random = rng.random((4000, 3)) * [1, 1, 0]
    reach = {}
    for name, plate in {"even": random[farthest(random, 600)], "random": random[:600]}.items():
        spacing = cKDTree(plate).query(plate, k=range(2, 8))[0].mean(axis=1)
        reach[name] = choose.reach_of(plate) / spacing
        assert np.ptp(reach[name]) < 1e-9
        doubled = choose.reach_of(np.repeat(plate, 2, axis=0))
        assert doubled == pytest.approx(np.repeat(reach[name] * spacing, 2))
    assert choose.REACH <= reach["even"][0] < 0.52 and 0.7 < reach["random"][0] <= 0.9
    crowds = np.concatenate((plate, plate + 1e-6))
    assert (choose.reach_of(crowds)[:600] < 0.91 * spacing).all()
    assert np.isinf(choose.reach_of(np.zeros((5, 3)))).all()


@pytest.mark.parametrize("way", [SurfaceUpsampler, DeviceSurface])
def test_clean_measured_points_stay_where_an_output_lies_right_beside_them(way):
    points = np.float32(ball(500) - [20.0, 3.0, 0.0])
    up = Upsampler.load("shape", "cpu")
    up.way = way(up.network, torch.device("cpu"), torch.float32)
    dense = up.upsample(points, 4)
    kept = cKDTree(dense).query(points)[0] == 0
    assert 0.3 < kept.mean() < 1  # the others would crowd it
    alone = choose.settle_on_measured(points + [5.0, 0, 0], points)
    assert np.array_equal(alone, points + [5.0, 0, 0])


def test_several_threads_give_the_cloud_of_one_and_leave_torch_as_it_was():
    up = Upsampler(build_network(PRESETS["lidar"]), "cpu")
    clouds = [ball(700, seed) for seed in range(5)]
    before, results, later = torch.get_num_threads(), [], []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(up.upsample_many(clouds, 2.5, origin=EYE))
        new = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        new.start()
        new.join()
    finally:
        torch.set_num_threads(before)
    assert later == [3]
    for one, many in zip(*results, strict=True):  # but for ties that rounding decides
        assert np.mean(cKDTree(one).query(many)[0] < 1e-4) > 0.99


def test_relaxing_leaves_fixed_points_and_duplicates_alone():
    points = np.random.default_rng(0).random((50, 3))
    twice = np.concatenate((points[:5], points[:5]))
    assert np.isfinite(choose.relax(twice, points, points[:0])).all()
    assert np.allclose(choose.relax(points[:5], points[:5], points[5:]), points[:5])


def test_work_is_cut_into_parts_of_about_the_same_size():
    sizes = np.array([5000, 100, 200, 2500, 2400])
    parts = compute.even_parts(sizes, 2)
    assert [int(sizes[p].sum()) for p in parts] == [5100, 5100]
    assert compute.even_parts(np.array([30, 40]), 8) == [slice(0, 2)]
