# SPDX-License-Identifier: Apache-2.0
"""A scan becomes a dense scan: exact counts, measured points kept, budgets held and told."""

import time

import numpy as np
import pytest
from scipy.spatial import cKDTree

from apusmog_core.config import PipelineConfig
from apusmog_core.dense import Dense
from apusmog_core.pipeline import ScanPipeline, apportion, visible_area
from apusmog_core.sample_clouds import STORED, unpack
from apusmog_core.sensor.view import ObjectScan
from apusmog_core.settings import with_values


class Interpolator:
    """Upsamples by points between random pairs; counts as the network does."""

    device = "cpu"
    seed = 0
    pause = 0.0  # seconds for each new point

    def upsample(self, cloud, ratio, keep_measured=False, origin=None):
        scan = ObjectScan(cloud, np.ones(len(cloud), int))
        return self.upsample_scan(scan, [round(ratio * len(cloud))], keep_measured).points

    def upsample_scan(self, scan, counts, keep_measured=True, spread="rings"):
        rows = [np.flatnonzero(scan.instance == number + 1) for number in range(len(counts))]
        self.sizes = [len(mine) for mine in rows]
        pairs = zip(rows, counts, strict=True)
        parts = [self._one(scan.points, r, n, keep_measured) for r, n in pairs]
        return Dense.concatenate([Dense.measured(scan.points, np.zeros(0, int)), *parts])

    def _one(self, points, rows, count, keep_measured):
        if count < len(rows):
            return Dense.measured(points, rows[:count])
        rng = np.random.default_rng(self.seed)
        new = count - len(rows) if keep_measured else count
        first, second = rows[rng.integers(0, len(rows), (2, new))]
        time.sleep(self.pause * new)
        between = 0.7 * points[first] + 0.3 * points[second]
        nearest = rows[cKDTree(points[rows]).query(between)[1]]
        made = Dense.new(between, np.ones(new, np.float32), nearest)
        return Dense.concatenate([Dense.measured(points, rows[: count - new]), made])


def thing(x, y, points, side=1.0, seed=0):
    rng = np.random.default_rng(seed)
    return np.array([x, y, -1.0]) + side * rng.random((points, 3))


SIZES = (331, 57, 203, 1009, 44)


def scan():
    """Five objects over a road, nearest last."""
    rng = np.random.default_rng(0)
    things = [thing(30 - 5 * k, 2 * k, n, seed=k) for k, n in enumerate(SIZES)]
    road = np.column_stack([rng.uniform(-40, 40, (20000, 2)), rng.normal(-1.73, 0.01, 20000)])
    return np.concatenate([*things, road]).astype(np.float32)


def pipeline(**values):
    base = PipelineConfig(device="cpu")
    return ScanPipeline(with_values(base, {"ground.method": "grid", **values}), Interpolator())


def selected(dense):
    return np.count_nonzero(dense.segments.instance)


@pytest.mark.parametrize("ratio", [1, 1.0001, 2.5, 4.93, 17, 0.37, 1e-3])
@pytest.mark.parametrize("keep", [True, False])
def test_the_count_is_exact_over_all_instances(ratio, keep):
    dense = pipeline(keep_measured=keep).process(scan(), ratio=ratio)
    assert selected(dense) == sum(SIZES)
    assert len(dense.points) == round(ratio * sum(SIZES))
    assert len(dense.points) == len(dense.instance) == len(dense.generated) == len(dense.intensity)
    assert dense.points.dtype == np.float32 and dense.instance.dtype == np.uint32
    assert dense.limited == ""


def test_measured_points_are_kept_in_their_instance_and_flagged():
    dense = pipeline().process(scan(), ratio=3.3)
    for number in range(1, 6):
        own = dense.segments.points[dense.segments.instance == number]
        rows = dense.instance == number
        np.testing.assert_array_equal(dense.points[rows & ~dense.generated], own)
        assert np.count_nonzero(rows) == pytest.approx(3.3 * len(own), abs=1)


def test_without_measured_points_everything_is_generated():
    dense = pipeline(keep_measured=False).process(scan(), ratio=2)
    assert dense.generated.all()


def test_fewer_points_than_measured_are_a_choice_of_the_measured_ones():
    dense = pipeline(keep_measured=False).process(scan(), ratio=0.5)
    assert not dense.generated.any()


def test_intensity_is_that_of_the_nearest_measured_point():
    points = scan()
    intensity = np.random.default_rng(1).random(len(points)).astype(np.float32)
    dense = pipeline().process(points, intensity)
    objects = dense.segments.instance > 0
    nearest = cKDTree(dense.segments.points[objects]).query(dense.points)[1]
    np.testing.assert_array_equal(dense.intensity, dense.segments.intensity[objects][nearest])


def test_two_steps_are_the_same_as_one():
    whole, parts = pipeline(), pipeline()
    first = whole.process(scan(), ratio=2)
    second = parts.densify(parts.segment(scan()), ratio=2)
    np.testing.assert_array_equal(first.points, second.points)
    assert {"filter", "ground", "cluster", "upsample", "total"} <= set(first.timings)


@pytest.mark.parametrize(
    "points", [np.zeros((0, 3)), np.full((9, 3), np.nan), np.zeros((50, 3)), np.full((5, 3), 1e9)]
)
def test_a_scan_without_objects_gives_an_empty_dense_scan(points):
    dense = pipeline().process(points)
    assert dense.points.shape == (0, 3) and len(dense.intensity) == len(dense.generated) == 0
    assert dense.effective_ratio == 0


def test_points_that_are_not_finite_are_dropped_and_counted():
    points = np.concatenate([scan(), [[np.nan, 0, 0], [0, np.inf, 0]]])
    dense = pipeline().process(points, np.ones(len(points)), ratio=2)
    assert dense.segments.not_finite == 2 and selected(dense) == sum(SIZES)


def test_points_out_of_range_stay_in_the_scene_but_form_no_object():
    far = thing(70, 0, 300)
    segments = pipeline(**{"range.max": 60.0}).segment(np.concatenate([scan(), far]))
    assert len(segments.points) == len(scan()) + 300
    assert not segments.instance[-300:].any() and not segments.ground[-300:].any()


@pytest.mark.parametrize(
    "points, intensity, ratio, reason",
    [
        (np.zeros((5, 4)), None, 2, "shape"),
        (np.zeros((5, 3)), np.zeros(4), 2, "5 points"),
        (np.zeros((5, 3)), None, 0, "ratio"),
        (np.zeros((5, 3)), None, float("nan"), "ratio"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(points, intensity, ratio, reason):
    with pytest.raises(ValueError, match=reason):
        pipeline().process(points, intensity, ratio)


# --- ratios and budgets --------------------------------------------------------------------------


def test_the_points_budget_serves_the_fewest_points_first_and_the_rest_passes_through():
    room = sum(SIZES) + 3 * (44 + 57) + 100  # ratio 4 adds three for each
    dense = pipeline(max_points_out=room).process(scan(), ratio=4)
    assert len(dense.points) == sum(SIZES) + 3 * (44 + 57) <= room
    assert dense.limited == "max_points_out: 3 of 5 instances pass through"
    assert dense.effective_ratio < 4 == dense.ratio
    for number in range(1, 6):
        own = np.count_nonzero(dense.segments.instance == number)
        grown = np.count_nonzero(dense.instance == number)
        assert grown == (4 * own if own in (44, 57) else own)


@pytest.mark.parametrize("ratio", [0.9, 4.0])
def test_a_budget_below_the_measured_points_thins_all_of_them_alike(ratio):
    dense = pipeline(max_points_out=1000).process(scan(), ratio=ratio)
    assert len(dense.points) == 1000 and "thinned to 1000" in dense.limited
    assert not dense.generated.any()
    share = np.bincount(dense.instance)[1:] / np.bincount(dense.segments.instance)[1:]
    assert np.ptp(share) < 0.03
    np.testing.assert_array_equal(dense.points, dense.segments.points[dense.source])


def test_the_time_budget_is_held_from_the_first_scan_on():
    slow = pipeline(time_budget_ms=60.0)
    slow.upsampler.pause = 1e-4  # 0.1 ms a point: room for some 600 of 4932
    for _ in range(3):
        dense = slow.process(scan(), ratio=4)
        assert 3 * (44 + 57) <= dense.generated.sum() < 1000
        assert dense.limited.startswith("time_budget_ms: ")


def test_a_density_gives_most_to_far_objects_and_never_more_than_the_ratio():
    bare = {"ratio": 8.0, "ground.method": "none"}
    near, far = thing(5, 0, 900, seed=1), thing(35, 0, 60, seed=2)
    sparse = pipeline(density=400.0, **bare).process(np.concatenate([near, far]))
    gain = np.bincount(sparse.instance)[1:] / np.bincount(sparse.segments.instance)[1:]
    assert gain[0] == 1.0  # has 900 points a square metre already
    area = visible_area(sparse.segments.points[sparse.segments.instance == 2])
    assert np.count_nonzero(sparse.instance == 2) == pytest.approx(400 * area, abs=1)
    assert gain[1] > 3
    capped = pipeline(density=1e6, **bare).process(np.concatenate([near, far]))
    assert len(capped.points) == 8 * 960


def test_the_visible_area_does_not_depend_on_the_direction():
    board = np.stack(np.meshgrid([0.0], np.linspace(-1, 1, 9), np.linspace(0, 1.5, 7)), -1)
    board = board.reshape(-1, 3) + [10, 0, 0]
    for angle in (0.0, 1.0, 3.0, -2.0):
        c, s = np.cos(angle), np.sin(angle)
        assert visible_area(board @ [[c, s, 0], [-s, c, 0], [0, 0, 1]]) == pytest.approx(3.0)


def test_shares_add_up_and_are_off_by_less_than_one():
    wanted = np.random.default_rng(0).uniform(0, 9, 1000)
    counts = apportion(wanted)
    assert counts.sum() == round(wanted.sum()) and np.abs(counts - wanted).max() < 1


def test_new_settings_keep_the_network_and_the_terrain():
    before = pipeline()
    after = before.configured(with_values(before.config, {"ratio": 2.0}))
    assert after.upsampler is before.upsampler and after.segmenter.ground is before.segmenter.ground
    assert len(after.process(scan()).points) == 2 * sum(SIZES)
    assert before.config.ratio == 4.0


def test_the_shipped_network_makes_a_scan_dense():
    street = unpack(np.load(STORED)["street_vlp16"])
    pipeline = ScanPipeline(PipelineConfig(device="cpu"))
    dense = pipeline.process(street["points"], ring=street["ring"], ratio=2.5)
    measured = dense.segments.points[dense.segments.instance > 0]
    assert len(dense.points) == round(2.5 * len(measured)) and len(measured) > 500
    away = cKDTree(measured).query(dense.points[dense.generated])[0]
    gap = np.radians(2.0) * np.linalg.norm(dense.points[dense.generated], axis=1)
    assert (away < 0.1 + gap).mean() > 0.99  # between two rings of a VLP-16


def test_the_network_is_given_the_whole_scan_with_rings_and_heights(monkeypatch):
    """Objects that a budget leaves out are surroundings; the others are numbered anew."""
    given = []
    made = pipeline(max_points_out=sum(SIZES) + 3 * (44 + 57) + 100, spread="even")
    upsample = made.upsampler.upsample_scan
    monkeypatch.setattr(
        made.upsampler, "upsample_scan", lambda *scan: given.append(scan) or upsample(*scan)
    )
    dense = made.process(scan(), ratio=4)
    (seen, counts, keep_measured, spread) = given[0]
    assert len(seen.points) == len(scan()) and seen.whole
    assert seen.ring is dense.segments.ring and seen.height is dense.segments.height
    assert sorted(np.bincount(seen.instance)[1:]) == [44, 57]
    assert sorted(counts) == [4 * 44, 4 * 57] and (keep_measured, spread) == (True, "even")


def test_unsure_points_are_left_out_where_asked_for_and_measured_ones_never():
    made = pipeline(min_confidence=0.5)
    upsample = made.upsampler.upsample_scan

    def doubtful(*scan):
        found = upsample(*scan)
        found.confidence[::2] = 0.4
        return found

    made.upsampler.upsample_scan = doubtful
    dense = made.process(scan(), ratio=3)
    assert np.count_nonzero(~dense.generated) == sum(SIZES)
    assert dense.generated.sum() == pytest.approx(sum(SIZES), abs=5)  # half of twice as many
    assert (dense.confidence[dense.generated] >= 0.5).all()


@pytest.mark.parametrize("least, share", [(0.0, 1.0), (0.5, 0.5)])
def test_filler_is_left_out_where_sure_points_are_asked_for(least, share):
    made = pipeline(min_confidence=least)
    upsample = made.upsampler.upsample_scan

    def filled_up(*scan):
        found = upsample(*scan)
        found.filler[::2] = found.generated[::2]
        return found

    made.upsampler.upsample_scan = filled_up
    dense = made.process(scan(), ratio=3)
    assert np.count_nonzero(~dense.generated) == sum(SIZES)
    assert dense.generated.sum() == pytest.approx(2 * share * sum(SIZES), abs=5)


def test_a_pipeline_without_settings_has_the_default_ones():
    assert ScanPipeline(upsampler=Interpolator()).config == PipelineConfig()


def test_a_copy_with_another_seed_leaves_the_first_as_it_was():
    first = ScanPipeline(upsampler=Interpolator())
    other = first.configured(PipelineConfig(seed=7))
    assert (first.upsampler.seed, other.upsampler.seed) == (0, 7)
