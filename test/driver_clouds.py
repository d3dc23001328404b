# SPDX-License-Identifier: Apache-2.0
"""Clouds in the layouts of drivers, for tests: a street, with every other field filled."""

from array import array

import numpy as np
from harness import street
from sensor_msgs.msg import PointCloud2, PointField
from std_msgs.msg import Header

from apusmog_ros import cloud

I1, U1, U2, U4, F4, F8 = 1, 2, 4, 6, 7, 8
XYZ = [("x", 0, F4), ("y", 4, F4), ("z", 8, F4)]
XYZI = [*XYZ, ("intensity", 12, F4)]
XYZIRC = [*XYZ, ("intensity", 12, U1), ("return_type", 13, U1), ("channel", 14, U2)]
# Name, offset, datatype of each field; bytes a point; which field is the ring. As the sources have
# them: velodyne (branch ros2), ouster-ros (point_type original), HesaiLidar_ROS_2.0 v2.0.12,
# livox_ros_driver2 1.2.6 (PointCloud2), rslidar_sdk v1.5.19, autoware_point_types.
LAYOUTS = {
    "velodyne": ([*XYZI, ("ring", 16, U2), ("time", 18, F4)], 22, "ring"),
    "ouster": (
        [*XYZ, ("intensity", 16, F4), ("t", 20, U4), ("reflectivity", 24, U2), ("ring", 26, U2)]
        + [("ambient", 28, U2), ("range", 32, U4)],
        48,
        "ring",
    ),
    "hesai": ([*XYZI, ("ring", 16, U2), ("timestamp", 18, F8)], 26, "ring"),
    "livox": ([*XYZI, ("tag", 16, U1), ("line", 17, U1), ("timestamp", 18, F8)], 26, "line"),
    "robosense XYZIRT": ([*XYZI, ("ring", 16, U2), ("timestamp", 18, F8)], 26, "ring"),
    "robosense XYZI": (XYZI, 16, ""),
    "autoware XYZIRC": (XYZIRC, 16, "channel"),
    "autoware XYZIRCAEDT": (
        [*XYZIRC, ("azimuth", 16, F4), ("elevation", 20, F4), ("distance", 24, F4)]
        + [("time_stamp", 28, U4)],
        32,
        "channel",
    ),
    "no intensity": (
        [*XYZ, ("reflectivity", 12, U1), ("laser_number", 13, I1)],
        14,
        "laser_number",
    ),
    "float64": ([("z", 0, F8), ("y", 8, F8), ("x", 16, F8)], 24, ""),
}
TIMES = ("t", "time", "timestamp", "time_stamp")
SWEEP = {U4: 10**8, F4: 0.1, F8: 0.1}  # what a scan takes, in the unit of each type: ns or s


def driver_cloud(name: str, rows: int = 1, bigendian: bool = False) -> PointCloud2:
    """A street in the layout of a driver.

    Times rise, rings are a degree apart, other fields and the padding are random.
    """
    layout, step, ring = LAYOUTS[name]
    points = street(3)
    points = points[: len(points) // rows * rows]
    points[10:20], points[20:25] = np.nan, 0.0
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 255, (len(points), step), np.uint8)
    msg = PointCloud2(header=Header(frame_id="lidar"), height=rows, width=len(points) // rows)
    msg.fields = [PointField(name=n, offset=o, datatype=d, count=1) for n, o, d in layout]
    msg.point_step, msg.row_step, msg.is_bigendian = step, step * msg.width, bigendian
    msg.data = array("B", raw.tobytes())
    records = cloud.records(msg)  # a view of the message
    for at, axis in enumerate("xyz"):
        records[axis] = points[:, at]
    if "intensity" in records.dtype.names:
        records["intensity"] = rng.integers(0, 200, len(points))
    if ring:
        up = np.arctan2(points[:, 2], np.hypot(points[:, 0], points[:, 1]))
        records[ring] = np.nan_to_num(np.degrees(up) + 30, nan=0.0).clip(0, 100)
    for field in msg.fields:
        if field.name in TIMES:
            records[field.name] = np.linspace(0, SWEEP[field.datatype], len(points))
    return msg
