# SPDX-License-Identifier: Apache-2.0
"""PointCloud2 messages to arrays and back."""

import time
from array import array

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 (rclpy) is not installed")

from geometry_msgs.msg import Transform  # noqa: E402
from sensor_msgs.msg import PointCloud2, PointField  # noqa: E402
from std_msgs.msg import Header  # noqa: E402

from apusmog_core.data.pointcloud2 import DATATYPES  # noqa: E402
from apusmog_ros import cloud  # noqa: E402

FLOATS = (7, 8)


def legal_cloud(rng, rows=None, columns=None):
    """A message of a random layout, and its points and intensity as they must be read."""
    rows = int(rng.integers(1, 4)) if rows is None else rows
    columns = int(rng.integers(0, 50)) if columns is None else columns
    names = ["x", "y", "z", *rng.permutation(["ring", "time", "tag"])[: rng.integers(0, 4)]]
    intensity = rng.choice(["intensity", "i", ""])
    names = list(rng.permutation(names + [intensity] * bool(intensity)))
    order = ">" if rng.random() < 0.3 else "<"
    values, fields, offset = {}, [], 0
    for name in names:
        offset += int(rng.integers(0, 5))  # padding, also such that nothing is aligned
        code = int(rng.choice(FLOATS)) if name in "xyz" else int(rng.integers(1, 9))
        count = int(rng.integers(1, 4)) if name == "tag" else 1
        kind = np.dtype(order + DATATYPES[code])
        values[name] = (rng.uniform(-60, 60, (rows, columns, count))).astype(kind)
        fields.append(PointField(name=name, offset=offset, datatype=code, count=count))
        offset += kind.itemsize * count
    step = offset + int(rng.integers(0, 9))
    row_step = columns * step + (int(rng.integers(0, 17)) if rows > 1 else 0)
    if rows * columns and rng.random() < 0.5:  # is_dense lies
        values["y"][0, 0] = rng.choice([np.nan, np.inf, -np.inf])
    data = np.zeros((rows, row_step), np.uint8)
    for field in fields:
        kind = np.dtype(order + DATATYPES[field.datatype])
        for row in range(rows):
            for at in range(columns):
                start = at * step + field.offset
                part = np.frombuffer(values[field.name][row, at].tobytes(), np.uint8)
                data[row, start : start + kind.itemsize * field.count] = part
    msg = PointCloud2(height=rows, width=columns, fields=fields, point_step=step)
    msg.row_step, msg.is_bigendian, msg.is_dense = row_step, order == ">", True
    msg.data = array("B", data.tobytes())
    points = np.concatenate([values[axis].reshape(-1, 1) for axis in "xyz"], axis=1)
    finite = np.isfinite(points).all(axis=1)
    expected = values[intensity].reshape(-1)[finite] if intensity else None
    return msg, points[finite].astype(np.float32), expected


def _no_x(msg, rng):
    msg.fields = [field for field in msg.fields if field.name != "x"]


def _unknown_type(msg, rng):
    msg.fields[0].datatype = int(rng.choice([0, 9, 77, 255]))


def _far_offset(msg, rng):
    msg.fields[-1].offset = int(rng.choice([msg.point_step, 2**16, 2**32 - 1]))


def _huge_count(msg, rng):
    msg.fields[0].count = 2**32 - 1


def _too_wide(msg, rng):
    msg.width = int(rng.choice([msg.width + 1, 10**6, 2**32 - 1]))
    msg.row_step = min(msg.width * msg.point_step, 2**32 - 1)


def _too_high(msg, rng):
    msg.height = int(rng.choice([msg.height + 1, 2**32 - 1]))


def _short(msg, rng):
    msg.data = msg.data[: int(rng.integers(0, len(msg.data)))]


def _no_step(msg, rng):
    msg.point_step = int(rng.integers(0, 3))


def _no_fields(msg, rng):
    msg.fields = []


BREAKS = (_no_x, _unknown_type, _far_offset, _huge_count, _too_wide, _too_high, _short, _no_step)
BREAKS += (_no_fields,)


def malformed_cloud(rng):
    """A message that no reader can make sense of."""
    msg, _, _ = legal_cloud(rng, columns=int(rng.integers(1, 50)))
    BREAKS[rng.integers(len(BREAKS))](msg, rng)
    return msg


@pytest.mark.parametrize("seed", range(60))
def test_any_legal_layout_is_read(seed):
    msg, points, intensity = legal_cloud(np.random.default_rng(seed))
    read = cloud.read(msg)
    finite = np.isfinite(read.points).all(axis=1)
    np.testing.assert_array_equal(read.points[finite], points)
    assert len(read.points) == msg.height * msg.width
    if intensity is None:
        assert read.intensity is None
    else:
        np.testing.assert_array_equal(read.intensity[finite], intensity.astype(np.float32))


@pytest.mark.parametrize("seed", range(40))
def test_sizes_that_disagree_are_refused_in_words(seed):
    msg = malformed_cloud(np.random.default_rng(seed))
    with pytest.raises(ValueError, match=r"field|bytes|row_step|point_step"):
        cloud.read(msg)


def test_what_is_written_has_the_published_layout_and_reads_back():
    rng = np.random.default_rng(1)
    points = rng.normal(size=(100, 3)).astype(np.float32)
    shades, generated = rng.random(100).astype(np.float32), rng.random(100) < 0.5
    ids = np.arange(100, dtype=np.uint32)
    header = Header(frame_id="lidar")
    msg = cloud.write(header, points, intensity=shades, instance=ids, generated=generated)
    layout = [(f.name, f.datatype, f.count) for f in msg.fields]
    floats = [(name, PointField.FLOAT32, 1) for name in ("x", "y", "z", "intensity")]
    extra = [("instance", PointField.UINT32, 1), ("generated", PointField.UINT8, 1)]
    assert layout == floats + extra
    assert (msg.header, msg.height, msg.width) == (header, 1, 100)
    assert len(msg.data) == msg.row_step == 100 * msg.point_step
    np.testing.assert_array_equal(cloud.read(msg).points, points)
    records = np.frombuffer(msg.data, cloud.MINIMAL)
    np.testing.assert_array_equal(records["instance"], ids)
    np.testing.assert_array_equal(records["generated"], generated)


def test_an_empty_cloud_is_written_and_read():
    msg = cloud.write(Header(), np.zeros((0, 3), np.float32))
    assert msg.width == 0 and len(msg.fields) == 6
    assert len(cloud.read(msg).points) == 0


def test_writing_takes_less_than_a_millisecond_per_megabyte():
    points = np.zeros((40_000, 3), np.float32)

    def cost():
        start = time.thread_time()
        msg = cloud.write(Header(), points, generated=np.ones(len(points), bool))
        return 1e3 * (time.thread_time() - start) / (len(msg.data) / 1e6)

    assert min(cost() for _ in range(20)) < 1.0


def test_sensor_msgs_py_reads_the_same_points():
    reference = pytest.importorskip(
        "sensor_msgs_py.point_cloud2", reason="sensor_msgs_py is not installed"
    )
    for seed in range(60):
        msg, _, _ = legal_cloud(np.random.default_rng(seed), rows=1, columns=20)
        ours = cloud.read(msg).points  # first: the reference swaps big-endian bytes in the message
        ours = ours[np.isfinite(ours).all(axis=1)]
        theirs = reference.read_points(msg, ("x", "y", "z"), skip_nans=False)
        theirs = np.stack([theirs[axis] for axis in "xyz"], axis=1).astype(np.float32)
        np.testing.assert_array_equal(ours, theirs[np.isfinite(theirs).all(axis=1)])


def test_a_transform_message_is_its_matrix():
    transform = Transform()
    transform.translation.x, transform.rotation.z, transform.rotation.w = 1.0, 0.5**0.5, 0.5**0.5
    moved = cloud.matrix(transform) @ [2.0, 0.0, 0.0, 1.0]
    np.testing.assert_allclose(moved, [1.0, 2.0, 0.0, 1.0], atol=1e-12)
