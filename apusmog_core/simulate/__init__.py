# SPDX-License-Identifier: Apache-2.0
"""A LiDAR simulator: sensors by their beam tables, streets, and scans whose truth is known."""

from .sensor import (
    BEAMS,
    Hits,
    Placed,
    Scene,
    Sensor,
    SimulatedScan,
    origin_of,
    scan,
    unit_rays,
    visible_surface,
)
from .street import STREET_SPEED, drive, load_meshes, street, write_kitti

__all__ = [
    "BEAMS",
    "Hits",
    "Placed",
    "Scene",
    "Sensor",
    "SimulatedScan",
    "STREET_SPEED",
    "drive",
    "load_meshes",
    "origin_of",
    "scan",
    "street",
    "unit_rays",
    "visible_surface",
    "write_kitti",
]
