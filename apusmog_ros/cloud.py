# SPDX-License-Identifier: Apache-2.0
"""PointCloud2 <-> numpy: any layout in, one layout out."""

from __future__ import annotations

import numpy as np
from builtin_interfaces.msg import Time
from geometry_msgs.msg import Transform
from scipy.spatial.transform import Rotation
from sensor_msgs.msg import PointCloud2, PointField
from std_msgs.msg import Header

from apusmog_core.data.pointcloud2 import DATATYPES, decode

# x y z intensity float32, instance uint32, generated uint8, padded to 24 bytes
DENSE = np.dtype(
    [(name, "<f4") for name in ("x", "y", "z", "intensity")]
    + [("instance", "<u4"), ("generated", "u1")],
    align=True,
)
MEASURED = np.dtype([(name, "<f4") for name in ("x", "y", "z", "intensity")])

_CODES = {kind: code for code, kind in DATATYPES.items()}


def read(msg: PointCloud2) -> tuple[np.ndarray, np.ndarray | None, int]:
    """Points (n, 3), intensity (n,) or None, and how many points were not finite and left out."""
    fields = [(field.name, field.offset, field.datatype, field.count) for field in msg.fields]
    points, intensity, _, dropped = decode(
        fields, msg.height, msg.width, msg.point_step, msg.row_step, msg.is_bigendian, msg.data
    )
    return points, intensity, dropped


def write(header: Header, points: np.ndarray, dtype: np.dtype = DENSE, **columns) -> PointCloud2:
    """A message of points (n, 3) and the named columns of `dtype`; those left out are zero."""
    msg = PointCloud2(header=header, height=1, width=len(points), is_dense=True)
    msg.fields = [
        PointField(name=name, offset=offset, datatype=_CODES[kind.str[1:]], count=1)
        for name, (kind, offset) in dtype.fields.items()
    ]
    msg.point_step = dtype.itemsize
    msg.row_step = dtype.itemsize * len(points)
    data = msg.data  # grown in place and written to: assigning to the message would copy
    data.append(0)
    data *= msg.row_step
    records = np.frombuffer(data, dtype)
    for column, axis in enumerate("xyz"):
        records[axis] = points[:, column]
    for name, values in columns.items():
        if values is not None:
            records[name] = values
    return msg


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
    turn, shift = transform.rotation, transform.translation
    result = np.eye(4)
    result[:3, :3] = Rotation.from_quat([turn.x, turn.y, turn.z, turn.w]).as_matrix()
    result[:3, 3] = shift.x, shift.y, shift.z
    return result
