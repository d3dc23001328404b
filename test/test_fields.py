# SPDX-License-Identifier: Apache-2.0
"""What drivers put into a cloud comes out again: every field of measured points, bit by bit."""

from array import array

import numpy as np
import pytest
from scipy.spatial import cKDTree

pytest.importorskip("rclpy", reason="ROS 2 (rclpy) is not installed")

from driver_clouds import LAYOUTS, U2, driver_cloud  # noqa: E402
from harness import Harness, scan, street  # noqa: E402
from sensor_msgs.msg import PointCloud2, PointField  # noqa: E402

from apusmog_core.config import NodeConfig  # noqa: E402
from apusmog_core.pipeline import ScanPipeline  # noqa: E402
from apusmog_ros import cloud, outputs  # noqa: E402

APPENDED = ["instance", "generated", "confidence"]


@pytest.fixture(scope="module")
def pipeline():
    return ScanPipeline(NodeConfig(ratio=3.5))


def answer(
    msg: PointCloud2, pipeline, transform=None
) -> tuple[outputs.Work, dict[str, PointCloud2]]:
    source = cloud.read(msg)
    segments = pipeline.segment(source.points, source.intensity, source.ring)
    wanted = {"scene", "objects", "dense"}
    work = outputs.Work(msg.header, source, wanted, pipeline, segments, pipeline.densify(segments))
    return work, {name: outputs.message(name, work, msg.header, transform) for name in wanted}


@pytest.mark.parametrize("bigendian", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_measured_points_keep_every_field_bit_by_bit(pipeline, name, bigendian):
    msg = driver_cloud(name, bigendian=bigendian)
    given = cloud.records(msg)
    kept = np.flatnonzero(np.isfinite(given["x"]) & (given["x"] != 0))
    work, answers = answer(msg, pipeline)
    assert (work.segments.not_finite, work.segments.no_return) == (10, 5)
    for out in answers.values():
        described = [(f.name, f.offset, f.datatype, f.count) for f in out.fields]
        asked = [(f.name, f.offset, f.datatype, f.count) for f in msg.fields]
        assert described[: len(asked)] == asked
        assert [f.name for f in out.fields[len(asked) :]] == APPENDED
        assert out.is_bigendian == bigendian and out.point_step % 4 == 0
    scene, objects, dense = (cloud.records(answers[n]) for n in ("scene", "objects", "dense"))
    new = scene["generated"] == 1
    assert len(scene) - len(kept) == new.sum() == round(3.5 * len(objects)) - len(objects) > 0
    assert not new[: len(kept) - 1].any() and not new[-1]
    old = scene[~new]  # in the order of the input
    measured = dense[dense["generated"] == 0]
    for field in given.dtype.names:
        assert old[field].tobytes() == given[field][kept].tobytes()
        inside = given[field][kept][old["instance"] > 0]
        assert objects[field].tobytes() == inside.tobytes()
        assert sorted(v.tobytes() for v in measured[field]) == sorted(v.tobytes() for v in inside)
    assert (old["confidence"] == 1).all() and (scene["confidence"] <= 1).all()
    assert len(np.unique(objects["instance"])) == 3


@pytest.mark.parametrize("name", LAYOUTS)
def test_new_points_have_ring_and_time_of_a_measured_point_beside_them(pipeline, name):
    msg = driver_cloud(name)
    work, answers = answer(msg, pipeline)
    segments, made = work.segments, work.dense
    given, dense = cloud.records(msg), cloud.records(answers["dense"])
    new = made.generated
    source = made.source[new]
    for field in set(given.dtype.names) - set("xyz"):
        assert dense[field][new].tobytes() == given[field][segments.rows[source]].tobytes()
    np.testing.assert_array_equal(segments.instance[source], made.instance[new])
    away = np.linalg.norm(made.points[new] - segments.points[source], axis=1)
    nearest, _ = cKDTree(segments.points[segments.instance > 0]).query(made.points[new])
    # the nearest of those that the network looked at, which is mostly the nearest of all
    assert np.mean(away < nearest + 0.01) > 0.75 and np.max(away - nearest) < 0.35


@pytest.mark.parametrize("name", LAYOUTS)
def test_rings_are_read_whatever_the_driver_calls_them(name):
    msg, field = driver_cloud(name), LAYOUTS[name][2]
    ring = cloud.read(msg).ring
    if field:
        np.testing.assert_array_equal(ring, cloud.records(msg)[field])
    else:
        assert ring is None


def test_rows_of_an_organised_cloud_are_its_rings_or_columns_where_there_are_fewer():
    by_rows = cloud.read(driver_cloud("robosense XYZI", rows=16))
    np.testing.assert_array_equal(by_rows.ring, np.repeat(np.arange(16), len(by_rows.ring) // 16))
    by_columns = driver_cloud("robosense XYZI", rows=16)
    by_columns.height, by_columns.width = by_columns.width, by_columns.height
    by_columns.row_step = by_columns.point_step * by_columns.width
    ring = cloud.read(by_columns).ring
    np.testing.assert_array_equal(ring, np.tile(np.arange(16), len(ring) // 16))
    by_columns.height, by_columns.width = by_columns.height * 16, 1
    by_columns.row_step = by_columns.point_step
    assert cloud.read(by_columns).ring is None


def test_reflectivity_serves_where_there_is_no_intensity():
    msg = driver_cloud("no intensity")
    np.testing.assert_array_equal(cloud.read(msg).intensity, cloud.records(msg)["reflectivity"])


def test_padded_rows_and_fields_of_several_values_come_out_again(pipeline):
    msg = driver_cloud("velodyne", rows=4)
    padded = np.frombuffer(msg.data, np.uint8).reshape(4, msg.row_step)
    msg.data = array("B", np.pad(padded, ((0, 0), (0, 9))).tobytes())
    msg.row_step += 9
    msg.fields = [*msg.fields[:5], PointField(name="pair", offset=18, datatype=U2, count=2)]
    out = answer(msg, pipeline)[1]["objects"]
    kept = {row.tobytes() for row in cloud.records(msg)["pair"]}
    assert len(cloud.records(out)) and {row.tobytes() for row in cloud.records(out)["pair"]} <= kept


def test_fields_of_ours_in_the_input_give_way_to_new_ones(pipeline):
    _, first = answer(driver_cloud("velodyne"), pipeline)
    _, second = answer(first["objects"], pipeline)
    names = [field.name for field in second["scene"].fields]
    assert names == ["x", "y", "z", "intensity", "ring", "time", *APPENDED]


def test_a_frame_moves_measured_and_new_points_and_nothing_else(pipeline):
    msg, transform = driver_cloud("float64"), np.eye(4)
    transform[:3, :3], transform[:3, 3] = [[0, -1, 0], [1, 0, 0], [0, 0, 1]], (4.5e6, 0, 7)
    _, plain = answer(msg, pipeline)
    _, moved = answer(msg, pipeline, transform)
    before, after = (cloud.records(a["scene"]) for a in (plain, moved))
    np.testing.assert_allclose(after["x"], 4.5e6 - before["y"], atol=1e-6)  # float64 stays exact
    np.testing.assert_allclose(after["z"], 7 + before["z"], atol=1e-9)
    assert after["instance"].tobytes() == before["instance"].tobytes()


def test_minimal_fields_are_six_of_fixed_type_on_request(ros):
    under_test = Harness(ros, fields="minimal")
    heard = under_test.listen("scene")
    msg = driver_cloud("autoware XYZIRC")
    told = under_test.ask(heard, msg)
    assert [f.name for f in told.fields] == ["x", "y", "z", "intensity", "instance", "generated"]
    assert told.point_step == 24
    measured = np.frombuffer(told.data, cloud.MINIMAL)
    assert set(measured["intensity"]) <= set(map(float, range(200)))
    assert under_test.set(fields="all").successful
    assert under_test.ask(heard, scan(street(1), 1)).point_step == 28
