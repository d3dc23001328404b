# SPDX-License-Identifier: Apache-2.0
"""PointCloud2 <-> numpy: any layout in; out, the same layout with three more fields."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from builtin_interfaces.msg import Time
from geometry_msgs.msg import Transform
from sensor_msgs.msg import PointCloud2, PointField
from std_msgs.msg import Header

from apusmog_core.data.pointcloud2 import DATATYPES, column, columns, structured

# `fields: minimal`: x y z intensity float32, instance uint32, generated uint8, padded to 24 bytes
MINIMAL = np.dtype(
    [(name, "<f4") for name in ("x", "y", "z", "intensity")]
    + [("instance", "<u4"), ("generated", "u1")],
    align=True,
)
MEASURED = np.dtype([(name, "<f4") for name in ("x", "y", "z", "intensity")])
APPENDED = np.dtype([("instance", "u4"), ("generated", "u1"), ("confidence", "f4")], align=True)

_CODES = {kind: code for code, kind in DATATYPES.items()}


@dataclass(frozen=True, eq=False)
class Cloud:
    """A message's points, none left out, and its bytes, from which they are written again."""

    points: np.ndarray  # (n, 3) float32
    intensity: np.ndarray | None  # (n,) float32
    ring: np.ndarray | None  # (n,) int32
    records: np.ndarray  # (height, width) structured: the fields that have a name
    fields: list[PointField]
    is_bigendian: bool

    def rows(self) -> np.ndarray:
        """The bytes of each point (n,), with what lies between and behind its fields."""
        return self.records.view(f"V{self.records.dtype.itemsize}").reshape(-1)


def read(msg: PointCloud2) -> Cloud:
    """The points of a message of any layout; ValueError says what is wrong with it."""
    layout = _structured(msg)
    return Cloud(*columns(layout), layout, list(msg.fields), msg.is_bigendian)


def records(msg: PointCloud2) -> np.ndarray:
    """The points of a message as a structured array (n,) with its fields."""
    return _structured(msg).reshape(-1)


def _structured(msg: PointCloud2) -> np.ndarray:
    fields = [(field.name, field.offset, field.datatype, field.count) for field in msg.fields]
    size = (msg.height, msg.width, msg.point_step, msg.row_step)
    return structured(fields, *size, msg.is_bigendian, msg.data)


def write(header: Header, points: np.ndarray, dtype: np.dtype = MINIMAL, **values) -> PointCloud2:
    """A message of points (n, 3) and the named columns of `dtype`; those left out are zero."""
    fields = [
        PointField(name=name, offset=offset, datatype=_CODES[kind.str[1:]], count=1)
        for name, (kind, offset) in dtype.fields.items()
    ]
    msg, data = _empty(header, len(points), fields, dtype.itemsize)
    rows = np.frombuffer(data, dtype)
    for at, axis in enumerate("xyz"):
        rows[axis] = points[:, at]
    for name, given in values.items():
        if given is not None:
            rows[name] = given
    return msg


def extend(
    header: Header,
    source: Cloud,
    rows: np.ndarray,
    points: np.ndarray,
    transform: np.ndarray | None = None,
    **values: np.ndarray,
) -> PointCloud2:
    """Points `rows` (m,) of a cloud with all their fields, and APPENDED ones with their `values`.

    points (m, 3) replace x, y and z where `generated` is set; measured ones stay bit by bit, but
    for a `transform` (4, 4) that everything is moved by.
    """
    order = ">" if source.is_bigendian else "<"
    step = source.records.dtype.itemsize
    begin = -(-step // 4) * 4
    appended = APPENDED.newbyteorder(order)
    own = [field for field in source.fields if field.name not in APPENDED.names]  # ours win
    new = [
        PointField(name=name, offset=begin + offset, datatype=_CODES[kind.str[1:]], count=1)
        for name, (kind, offset) in appended.fields.items()
    ]
    msg, data = _empty(header, len(rows), [*own, *new], begin + appended.itemsize)
    msg.is_bigendian = source.is_bigendian
    if len(rows) == 0:
        return msg
    place = (len(rows),)
    np.ndarray(place, f"V{step}", data, 0, (msg.point_step,))[:] = source.rows()[rows]
    extra = np.ndarray(place, appended, data, begin, (msg.point_step,))
    for name in APPENDED.names:
        extra[name] = values[name]
    out = np.ndarray((1, *place), source.records.dtype, data, 0, (0, msg.point_step))
    _place(out, points, values["generated"].astype(bool), transform)
    return msg


def _place(out: np.ndarray, points: np.ndarray, generated: np.ndarray, transform) -> None:
    """Write coordinates into records (1, m): those of generated points, and of all if moved."""
    axes = [column(out, axis) for axis in "xyz"]  # views
    if transform is None:
        for at, axis in enumerate(axes):
            axis[generated] = points[generated, at]
        return
    exact = np.where(generated[:, None], points, np.stack(axes, axis=1).astype(np.float64))
    moved = exact @ transform[:3, :3].T + transform[:3, 3]
    for at, axis in enumerate(axes):
        axis[:] = moved[:, at]


def _empty(header: Header, count: int, fields: list[PointField], step: int):
    """A message of zeros, and its bytes to write to: assigning to the message would copy."""
    msg = PointCloud2(header=header, height=1, width=count, is_dense=True, fields=fields)
    msg.point_step, msg.row_step = step, step * count
    data = msg.data
    data.append(0)
    data *= msg.row_step
    return msg, data


def from_bag(recorded) -> PointCloud2:
    """The message that rosbags read, ROS 1 or 2, as one that rclpy publishes."""
    stamp = Time(sec=recorded.header.stamp.sec, nanosec=recorded.header.stamp.nanosec)
    msg = PointCloud2(header=Header(stamp=stamp, frame_id=recorded.header.frame_id))
    msg.fields = [
        PointField(name=f.name, offset=f.offset, datatype=f.datatype, count=f.count)
        for f in recorded.fields
    ]
    for name in ("height", "width", "is_bigendian", "point_step", "row_step", "is_dense"):
        setattr(msg, name, getattr(recorded, name))
    msg.data.frombytes(recorded.data.data)
    return msg


def matrix(transform: Transform) -> np.ndarray:
    """A transform message as a (4, 4) matrix."""
    from scipy.spatial.transform import Rotation

    turn, shift = transform.rotation, transform.translation
    result = np.eye(4)
    result[:3, :3] = Rotation.from_quat([turn.x, turn.y, turn.z, turn.w]).as_matrix()
    result[:3, 3] = shift.x, shift.y, shift.z
    return result
