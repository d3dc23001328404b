# SPDX-License-Identifier: Apache-2.0
import csv
import json
from pathlib import Path

import numpy as np
import pytest

from apusmog_core.config import TrainConfig
from apusmog_core.data import pu1k, pugan
from apusmog_core.evaluation import ablation, rings, shapes, tables
from apusmog_core.settings import flatten
from apusmog_core.upsampler import Upsampler

DATA = Path(__file__).parents[2] / "shared" / "data"
real_scans = pytest.mark.skipif(
    not (DATA / "ring_holdout").is_dir(), reason="the KITTI scans of shared/data are not here"
)
real_shapes = pytest.mark.skipif(
    not (DATA / "pugan_test").is_dir(), reason="the PU-GAN shapes of shared/data are not here"
)

GROUPS = ("surface", "surface 0-15 m", "surface 15-30 m", "surface 30-45 m", "vegetation")
PUBLISHED = {  # completeness, hallucination, F@10cm in each group
    "nothing": [
        (0.177, 0, 0.219), (0.101, 0, 0.865), (0.172, 0, 0.101), (0.238, 0, 0), (0.232, 0, 0.054),
    ],
    "range-interpolation": [
        (0.115, 0.028, 0.726), (0.071, 0.017, 0.891), (0.120, 0.025, 0.704),
        (0.137, 0.039, 0.653), (0.189, 0.036, 0.401),
    ],
    "midpoint": [
        (0.114, 0.055, 0.692), (0.072, 0.031, 0.883), (0.118, 0.053, 0.674),
        (0.134, 0.072, 0.599), (0.168, 0.102, 0.400),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def kitti_cases():
    return rings.fixed_cases(DATA / "kitti_raw_0051", DATA / "ring_holdout")


@real_scans
@pytest.mark.parametrize("method", PUBLISHED)
def test_baselines_on_real_rings_score_as_published_within_two_percent(kitti_cases, method):
    scores = rings.score_rings(kitti_cases, rings.RING_BASELINES[method])
    assert [scores[group]["clusters"] for group in GROUPS] == [129, 25, 66, 38, 163]
    for group, expected in zip(GROUPS, PUBLISHED[method], strict=True):
        found = [scores[group][name] for name in ("completeness", "hallucination", "f_10")]
        # 2 %, and half of the last digit printed
        assert found == pytest.approx(expected, rel=0.02, abs=0.0005), group


@real_scans
def test_held_rings_are_the_odd_ones_and_none_is_given(kitti_cases):
    for case in kitti_cases:
        assert (case.ring % 2 == 0).all()
        assert len(case.points) + len(case.held) == len(case.full)
        assert round(case.ratio * len(case.points)) == len(case.full)


@real_scans
def test_roughness_tells_vegetation_from_surfaces_as_the_fixed_clusters_do(kitti_cases):
    fixed = np.load(DATA / "ring_holdout" / "0000000000.npz")
    scan = DATA / "kitti_raw_0051/velodyne_points/data/0000000000.bin"
    points = np.fromfile(scan, np.float32).reshape(-1, 4)[:, :3]
    for j, index in enumerate(np.split(fixed["index"], fixed["offset"][1:-1])):
        found = rings.roughness(points[index], fixed["ring"][index])
        assert found == pytest.approx(fixed["roughness"][j], abs=1e-4)


@real_scans
def test_objects_are_found_in_scans_that_come_without_clusters():
    cases = rings.found_cases(DATA / "kitti_raw_0051", most=1)
    scores = rings.score_rings(cases, rings.RING_BASELINES["range-interpolation"])
    assert scores["surface"]["clusters"] >= 15 and scores["vegetation"]["clusters"] >= 15
    # on other clusters of the same drive the score is much the same
    assert scores["surface"]["f_10"] == pytest.approx(0.726, abs=0.1)


@pytest.mark.skipif(not (DATA / "sensors").is_dir(), reason="no scans of other sensors here")
def test_one_file_with_rings_is_enough_at_any_stride():
    file = DATA / "sensors" / "pandar64_street.pcd"
    two, four = (rings.found_cases(file, stride=stride) for stride in (2, 4))
    assert len(two) >= len(four) >= 15
    assert all((case.ring % 4 == 0).all() and case.stride == 4 for case in four)
    assert np.mean([case.ratio for case in four]) > 1.5 * np.mean([case.ratio for case in two])


def flat_case(stride: int) -> rings.RingCase:
    """A wall at x = 10 whose rings are evenly spaced on it, across 21 columns."""
    ring, y = (a.ravel() for a in np.meshgrid(np.arange(13), np.linspace(-1, 1, 21), indexing="ij"))
    points = np.stack((np.full(len(y), 10.0), y, 0.1 * ring), axis=1)
    kept, row = rings.keep_rings(points, ring, stride)
    named = dict(surface=True, scan_name="wall", cluster=0)
    return rings.hold_out(kept, row, points, ring, stride, **named)


@pytest.mark.parametrize("stride", [2, 3, 4])
def test_interpolation_between_every_nth_ring_of_a_wall_is_the_wall(stride):
    case = flat_case(stride)
    assert set(case.ring) == set(range(0, 13, stride))
    output = rings.RING_BASELINES["range-interpolation"](case)
    assert len(output) == len(case.full)
    assert output[np.lexsort(output.T)] == pytest.approx(case.full[np.lexsort(case.full.T)])
    scores = rings.score_ring(case, output)
    assert scores["f_10"] == 1 and scores["completeness"] == pytest.approx(0, abs=1e-9)
    assert rings.score_ring(case, case.points)["completeness"] > 0.05


def test_scans_without_an_object_to_score_are_refused_with_advice():
    pytest.importorskip("open3d")
    with pytest.raises(ValueError, match="no object of 900000 points within 45 m.*--stride"):
        rings.simulated_cases(count=1, sensor="VLP-16", points=(900_000, 1_000_000))


def test_scans_without_rings_are_refused_by_name(tmp_path):
    np.save(tmp_path / "cloud.npy", np.random.default_rng(0).normal(size=(500, 3)))
    with pytest.raises(ValueError, match="cloud shows no rings"):
        rings.found_cases(tmp_path)


def test_a_whole_sensor_holds_nothing_out_and_gives_what_the_ratio_asks_for():
    case = flat_case(1)
    assert len(case.held) == 0 and len(case.points) == len(case.full)
    (dense,) = rings.dense_rings(Upsampler.load("lidar", "cpu"), [case], ratio=2.5)
    assert len(dense.points) == round(2.5 * len(case.points))


def test_scans_in_another_frame_are_refused_with_where_the_sensor_is(tmp_path):
    simulate = pytest.importorskip("apusmog_core.simulate")
    turn = simulate.scan(simulate.street(1), simulate.Sensor.named())
    records = np.column_stack((turn.points + [1.3, 0, 1.9], turn.intensity))
    records.astype(np.float32).tofile(tmp_path / "000000.bin")
    with pytest.raises(ValueError, match=r"measured from \(1\.3 .* 1\.9\).*own frame"):
        rings.found_cases(tmp_path)


@real_shapes
def test_midpoint_on_pugan_scores_as_published_within_two_percent():
    found = pugan.load_shapes(DATA / "pugan_test")
    methods = {"midpoint": shapes.SHAPE_BASELINES["midpoint"]}
    mean = shapes.evaluate_shapes(found, methods)[-1]
    assert mean["shape"] == "mean of 27"
    found = [1e3 * mean[name] for name in ("cd", "hd", "hd_sum", "p2f")]
    assert found == pytest.approx([0.238, 1.288, 2.110, 2.034], rel=0.02)


def test_simulated_objects_know_their_true_surface():
    pytest.importorskip("open3d")
    cases = rings.simulated_cases(count=1)
    assert len(cases) >= 10
    scores = rings.score_rings(cases, lambda case: case.full)["surface"]
    assert 0.003 < scores["surface_error"] < 0.02  # the sensor's 2 cm noise, across the surface
    moved = rings.score_rings(cases, lambda case: case.full + [0, 0, 1.0])["surface"]
    assert moved["surface_error"] > 0.1


@pytest.fixture
def shape_folder(tmp_path):
    """Two shapes of 64 points; only the first has a mesh, so only it can be scored elsewhere."""
    rng = np.random.default_rng(0)
    for name, count in (("input_64", 64), ("gt_256", 256)):
        (tmp_path / "test" / name).mkdir(parents=True)
        for shape in ("cube", "blob"):
            points = rng.uniform(0, 1, (count, 3)) * [1, 1, 0]
            np.savetxt(tmp_path / "test" / name / f"{shape}.xyz", points)
    off = "OFF\n4 2 0\n0 0 0\n1 0 0\n1 1 0\n0 1 0\n3 0 1 2\n3 0 2 3\n"
    (tmp_path / "cube.off").write_text(off)
    return tmp_path


def test_ratios_without_published_truth_are_scored_against_the_mesh(shape_folder, monkeypatch):
    pytest.importorskip("open3d")
    monkeypatch.setenv("XDG_CACHE_HOME", str(shape_folder / "cache"))
    found = pugan.load_shapes(shape_folder, size=64)
    rows = shapes.evaluate_shapes(found, shapes.SHAPE_BASELINES, ratio=4)
    assert {row["shape"] for row in rows} == {"cube", "blob", "mean of 2"}
    rows = shapes.evaluate_shapes(found, shapes.SHAPE_BASELINES, ratio=2.5)
    assert {row["shape"] for row in rows} == {"cube", "mean of 1"}
    assert len(list((shape_folder / "cache").rglob("cube_*_160.npy"))) == 1


def test_inputs_larger_than_published_are_sampled_from_meshes(shape_folder, monkeypatch):
    pytest.importorskip("open3d")
    monkeypatch.setenv("XDG_CACHE_HOME", str(shape_folder / "cache"))
    monkeypatch.setattr(pugan, "PUBLISHED_SIZE", 64)
    (large,) = pugan.load_shapes(shape_folder, size=100)
    assert large.name == "cube" and large.points.shape == (100, 3)
    (shape_folder / "cube.off").unlink()
    with pytest.raises(ValueError, match="no mesh"):
        pugan.load_shapes(shape_folder, size=100)


def test_noise_is_given_in_radii_of_the_shape():
    cloud = 50 * np.random.default_rng(0).normal(size=(20000, 3))
    radius = np.linalg.norm(cloud - cloud.mean(axis=0), axis=1).max()
    moved = shapes.add_noise(cloud, 0.02) - cloud
    assert moved.std() == pytest.approx(0.02 * radius, rel=0.02)


def test_results_are_written_unscaled_as_csv_and_json(tmp_path):
    rows = [{"method": "nothing", "cd": 0.00025, "p2f": float("nan")}]
    tables.write_rows(tmp_path / "a.csv", rows)
    tables.write_rows(tmp_path / "a.json", rows)
    with open(tmp_path / "a.csv") as file:
        assert next(csv.DictReader(file))["cd"] == "0.00025"
    assert json.loads((tmp_path / "a.json").read_text())[0] == {
        "method": "nothing",
        "cd": 0.00025,
        "p2f": None,
    }
    assert "0.250" in tables.format_table(rows)
    with pytest.raises(ValueError, match="csv or .json"):
        tables.write_rows(tmp_path / "a.txt", rows)


def test_each_ablation_run_differs_from_the_full_model_in_what_it_is_named_for():
    config = TrainConfig(preset="paper", out="runs/x", batch=64, warmup=500)
    runs = ablation.ablation_runs(config, patches=64_000)
    full = flatten(runs["full model"]) | flatten(runs["full model"].network)
    assert (full["steps"], full["batch"], full["warmup"]) == (1000, 64, 100)
    assert full["choice"] == "farthest"  # the paper's protocol
    short = ablation.ablation_runs(config, patches=4000)["full model"]
    assert (short.steps, short.batch) == (500, 8)
    changed = {}
    for name, run in runs.items():
        values = flatten(run) | flatten(run.network)
        changed[name] = {k: v for k, v in values.items() if v != full[k] and k != "out"}
    assert changed == {
        "full model": {},
        "uniform sphere": {"uniform_sphere": True},
        "N/4 components": {"component_share": 0.25},
        "no refinement": {"refinements": 0},
        "no reconstruction": {"lambda_reconstruction": 0.0},
        "ACD for upsampling": {"lambda_reconstruction": 0.0, "loss": "acd"},
    }
    assert len({run.out for run in runs.values()}) == 6


def test_training_patches_are_read_as_published_and_other_files_are_refused(tmp_path):
    h5py = pytest.importorskip("h5py")
    good, bad = tmp_path / "good.h5", tmp_path / "bad.h5"
    with h5py.File(good, "w") as file:
        file["poisson_256"] = np.zeros((3, 256, 3))
        file["poisson_1024"] = np.ones((3, 1024, 6))
    points, target = pu1k.read_patches(good)
    assert points.shape == (3, 256, 3) and target.shape == (3, 1024, 3)
    assert points.dtype == target.dtype == np.float32
    with h5py.File(bad, "w") as file:
        file["poisson_256"] = np.zeros((3, 256, 3))
    with pytest.raises(ValueError, match="bad.h5: no 'poisson_1024'"):
        pu1k.read_patches(bad)
    bad.write_bytes(b"no HDF5")
    with pytest.raises(ValueError, match="bad.h5: not a readable"):
        pu1k.read_patches(bad)
