# SPDX-License-Identifier: Apache-2.0
"""Sparse sensors: rings are found, mounting is estimated, objects of a ring or two are objects."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation

pytest.importorskip("open3d", reason="the simulator needs Open3D")

from apusmog_core.config import PipelineConfig  # noqa: E402
from apusmog_core.pipeline import ScanPipeline  # noqa: E402
from apusmog_core.segment import Segmenter  # noqa: E402
from apusmog_core.segment.rings import describe_rings, find_rings, rings_from_order  # noqa: E402
from apusmog_core.settings import with_values  # noqa: E402
from apusmog_core.simulate import Placed, Scene, Sensor, scan, street  # noqa: E402
from apusmog_core.simulate.objects import BUILDERS  # noqa: E402
from apusmog_core.simulate.shapes import solid  # noqa: E402
from tools.found import ROSETTES, rosette_scan  # noqa: E402


@pytest.fixture(scope="module")
def scene():
    return street(seed=5)


@pytest.fixture(scope="module")
def turn(scene):
    return scan(scene, Sensor.named("VLP-16"), seed=1)


def found_names(turn, instance):
    """Names of what each instance mostly consists of."""
    names = np.array(turn.names)
    return [
        names[np.bincount(turn.instance[instance == number]).argmax()]
        for number in range(1, instance.max() + 1)
    ]


# --- rings ---------------------------------------------------------------------------------------


def shuffled(turn):
    return np.random.default_rng(0).permutation(len(turn.points))


@pytest.mark.parametrize("source", ["field", "order", "elevation"])
def test_rings_are_found_and_sorted_by_elevation(turn, source):
    order = shuffled(turn) if source == "elevation" else np.arange(len(turn.points))
    points, true = turn.points[order], turn.ring[order]
    odd = np.random.default_rng(1).permutation(16)[true] * 300 - 7  # any numbers, gaps, no order
    ring, told = find_rings(points, odd if source == "field" else None)
    rings = describe_rings(points, ring)
    assert told == source and len(rings.elevation) == 16
    np.testing.assert_array_equal(rings.row, 15 - true)
    assert np.degrees(rings.step) == pytest.approx(0.2, abs=0.01)


def test_rings_survive_noise_across_straight_ahead_and_gaps_in_the_sky():
    azimuth = np.concatenate(
        [np.linspace(0.2, 3.0, 20), [0.1, 6.2, 6.28, 0.001, 6.282], np.linspace(0.01, 6, 50)]
    )
    points = np.stack([np.cos(azimuth), np.sin(azimuth), 0 * azimuth], axis=1)
    assert rings_from_order(points).tolist() == [0] * 20 + [1] * 3 + [2] + [1] + [2] * 50
    assert rings_from_order(np.random.default_rng(0).normal(size=(9000, 3))) is None


def test_a_field_of_zeros_is_no_ring_and_a_cloud_without_rings_has_none(turn):
    order = shuffled(turn)
    zeros = np.zeros(len(order), np.uint16)
    assert find_rings(turn.points[order], zeros)[1] == "elevation"
    cloud = np.random.default_rng(0).normal(size=(5000, 3)).astype(np.float32)
    assert find_rings(cloud) == (None, "none")


def test_the_lines_of_a_rosette_are_no_rings_and_a_tilted_sensor_keeps_its_own(scene, turn):
    rosette = rosette_scan(scene, Sensor.named(), ROSETTES["rosette-360"], seed=0)
    assert find_rings(rosette.points, rosette.ring)[1] != "field"
    upside_down = Rotation.from_euler("xyz", (180, 25, 40), degrees=True)
    tilted = upside_down.apply(turn.points + [1, 0.5, 1.8])
    assert find_rings(tilted, turn.ring)[1] == "field"


def test_the_order_of_points_that_were_sorted_otherwise_holds_no_rings(turn):
    _, one_each = np.unique((turn.points / 0.5).astype(int), axis=0, return_index=True)
    ring, told = find_rings(turn.points[one_each])  # as a voxel filter leaves them
    assert told == "elevation" and len(np.unique(ring)) >= 14
    find = Segmenter().find(turn.points[one_each])
    assert not find.place.any()


def test_elevations_that_fill_everything_are_no_rings(turn):
    order = shuffled(turn)
    assert find_rings(turn.points[order] + [0, 0, 1.8])[1] == "none"


# --- the frame of the scans ----------------------------------------------------------------------


@pytest.mark.parametrize("sensor, pitch", [("VLP-16", 0), ("HDL-64E", 0), ("VLP-16", 12)])
def test_a_scan_in_the_frame_of_the_vehicle_is_as_good_as_in_the_sensor_s_own(scene, sensor, pitch):
    seen = scan(scene, Sensor.named(sensor).jittered(0), seed=0)
    place, turn = np.float32([1.3, 0, 1.9]), Rotation.from_euler("y", pitch, degrees=True)
    moved = turn.apply(seen.points).astype(np.float32) + place
    own, vehicle = (
        ScanPipeline().process(points, ring=seen.ring) for points in (seen.points, moved)
    )
    assert not own.segments.place.any()
    axis = np.sin(np.radians(pitch)), 0
    assert vehicle.segments.place == pytest.approx([*place, *axis], abs=0.1)
    found, instance = (int(dense.segments.instance.max()) for dense in (own, vehicle))
    assert instance == pytest.approx(found, rel=0.1)
    assert "ground" not in found_names(seen, vehicle.segments.instance)
    measured = ~vehicle.generated
    kept = vehicle.segments.points[vehicle.source[measured]]
    np.testing.assert_array_equal(vehicle.points[measured], kept)
    old, new = (dense.points[dense.generated] for dense in (own, vehicle))
    new = turn.inv().apply(new - place)
    assert np.percentile(cKDTree(old).query(new)[0], 90) < 0.15


def test_where_flat_ground_tells_nothing_the_first_walls_tell_where_the_sensor_stands(scene):
    device, find = Sensor.named("VLP-16").jittered(0), Segmenter()
    car_park, told = Scene([]), []
    for number in range(14):
        seen = scan(scene if number > 5 else car_park, device, seed=number)
        told.append(find.find(seen.points + np.float32([1.3, 0, 1.2]), seen.ring))
    assert not told[5].place.any()
    assert told[-1].place == pytest.approx([1.3, 0, 1.2, 0, 0], abs=0.1)
    height = told[-1].mounting.height + 1.2 - told[-1].place[2]
    assert height == pytest.approx(device.height, abs=0.1)  # of flat ground it was another


# --- objects -------------------------------------------------------------------------------------


def test_most_cars_of_sixteen_rings_are_found_and_no_ground_is_an_object(scene, turn):
    _, instance = Segmenter()(turn.points, turn.ring)
    assert "ground" not in found_names(turn, instance)
    cars = [
        (instance[turn.instance == number] > 0).any()
        for number, placed in enumerate(scene.objects, start=1)
        if placed.name in ("car", "van") and 15 < np.hypot(placed.x, placed.y) < 40
        if np.count_nonzero(turn.instance == number) >= 5
    ]
    assert len(cars) >= 5 and np.mean(cars) >= 0.8


def test_along_the_rings_the_road_is_ground_and_what_stands_on_it_is_not(turn):
    found = Segmenter().find(turn.points, turn.ring)
    near = np.linalg.norm(turn.points[:, :2], axis=1) < 30
    assert found.ground[near & (turn.instance == 0)].mean() > 0.98
    assert found.ground[near & (turn.instance > 0)].mean() < 0.02


def test_a_car_that_a_single_ring_sees_is_an_object():
    car = BUILDERS["car"](np.random.default_rng(0))
    seen = scan(Scene([Placed(car, "car", 40.0, 3.0)]), Sensor.named("VLP-16"), seed=0)
    assert len(np.unique(seen.ring[seen.instance == 1])) == 1
    _, instance = Segmenter()(seen.points, seen.ring)
    assert found_names(seen, instance) == ["car"]


@pytest.mark.parametrize("sensor", ["VLP-16", "OS1-32"])
def test_a_grass_bank_beside_the_road_is_no_object(sensor):
    edge, rise = [(-80, 11, 0), (80, 11, 0)], [(-80, 17, 3), (80, 17, 3), (-80, 60, 3), (80, 60, 3)]
    bank = solid([*edge, *rise], [(0, 1, 3), (0, 3, 2), (2, 3, 5), (2, 5, 4)], 0.3)
    car = Placed(BUILDERS["car"](np.random.default_rng(0)), "car", 12.0, 4.0)
    device = Sensor.named(sensor).jittered(0)
    seen = scan(Scene([Placed(bank, "bank", 0.0, 0.0), car]), device, seed=0)
    assert found_names(seen, Segmenter()(seen.points, seen.ring)[1]) == ["car"]


def test_a_car_beside_a_long_wall_is_an_object_of_its_own():
    car = BUILDERS["car"](np.random.default_rng(0))
    cars = Placed(car, "car", 10.0, 4.0)
    seen = scan(Scene([cars]), Sensor.named("HDL-64E"), seed=0)
    side = seen.points[seen.instance == 1, 1].max() + 0.4
    x, z = np.meshgrid(np.arange(-12, 25, 0.05), np.arange(-1.6, 0.4, 0.05))
    wall = np.stack([x, np.full_like(x, side), z], axis=-1).reshape(-1, 3).astype(np.float32)
    rows = np.degrees(np.arctan2(wall[:, 2], np.hypot(wall[:, 0], wall[:, 1])))
    beams = np.array(Sensor.named("HDL-64E").elevation)
    ring = np.abs(np.radians(rows)[:, None] - beams).argmin(1)
    points, rings = np.concatenate([seen.points, wall]), np.concatenate([seen.ring, ring])
    instance = Segmenter()(points, rings)[1][: len(seen.points)][seen.instance == 1]
    number = np.bincount(instance[instance > 0]).argmax()
    assert np.mean(instance == number) > 0.8


def test_objects_of_two_points_are_made_dense(turn):
    pipeline = ScanPipeline(PipelineConfig(device="cpu"))
    dense = pipeline.process(turn.points, ratio=4.0, ring=turn.ring)
    sizes = np.bincount(dense.segments.instance)[1:]
    assert sizes.min() <= 3
    assert len(dense.points) == 4 * sizes.sum() and np.isfinite(dense.points).all()


# --- mounting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rings", [True, False])
@pytest.mark.parametrize(
    "height, roll, pitch",
    [(0.3, 0, 0), (3.0, 0, 0), (1.73, 180, 0), (1.2, 12, -15), (2.0, 170, 8)],
)
def test_the_mounting_is_estimated_from_one_scan(scene, rings, height, roll, pitch):
    seen = scan(scene, replace(Sensor.named("VLP-16"), height=height), seed=1)
    tilt = Rotation.from_euler("xy", (roll, pitch), degrees=True).inv()
    points = tilt.apply(seen.points).astype(np.float32)
    segmenter = Segmenter(with_values(PipelineConfig(), {"ground.method": "auto"}))
    ground, instance = segmenter(points, seen.ring if rings else None)
    mounting = segmenter.mounting
    assert mounting.source == "estimated" and not mounting.warning
    assert mounting.height == pytest.approx(height, abs=0.05)
    assert abs((mounting.roll - roll + 180) % 360 - 180) < 0.5
    assert mounting.pitch == pytest.approx(pitch, abs=0.5)
    near = np.linalg.norm(points, axis=1)
    near = (near > 3) & (near < 30)
    assert ground[near & (seen.instance == 0)].mean() > 0.95
    assert {"car", "person"} & set(found_names(seen, instance))


def test_a_contradiction_is_a_warning_with_the_value_to_set(turn):
    segmenter = Segmenter(with_values(PipelineConfig(), {"ground.sensor_height": 2.6}))
    segmenter(turn.points, turn.ring)
    assert "set 1.73, or 0 for automatic" in segmenter.mounting.warning
    assert segmenter.mounting.height == 2.6
    right = Segmenter(with_values(PipelineConfig(), {"ground.sensor_height": 1.7}))
    right(turn.points, turn.ring)
    assert not right.mounting.warning
