# SPDX-License-Identifier: Apache-2.0
"""Boxes with their instance ids as markers."""

from __future__ import annotations

import colorsys

import numpy as np
from geometry_msgs.msg import Point, Pose, Quaternion, Vector3
from scipy.spatial.transform import Rotation
from std_msgs.msg import ColorRGBA, Header
from visualization_msgs.msg import Marker, MarkerArray

from apusmog_core.segment.boxes import Boxes

TEXT_HEIGHT = 0.6  # metres
THINNEST = 0.01  # metres; RViz complains about a side of 0
GOLDEN = 0.618034  # neighbouring ids get hues far apart


def box_markers(header: Header, boxes: Boxes, frame: np.ndarray) -> MarkerArray:
    """A box and its id for each instance, moved by `frame` (4, 4); the ones before are deleted."""
    markers = [Marker(header=header, action=Marker.DELETEALL)]
    centres = boxes.centre @ frame[:3, :3].T + frame[:3, 3]
    tops = centres + frame[:3, 2] * (boxes.size[:, 2:] / 2 + TEXT_HEIGHT)
    turns = Rotation.from_matrix(frame[:3, :3]) * Rotation.from_rotvec(
        boxes.yaw[:, None] * [0.0, 0.0, 1.0]
    )
    quaternions = turns.as_quat()
    sizes = np.maximum(boxes.size, THINNEST)
    for at, instance in enumerate(boxes.instance.tolist()):
        colour = colorsys.hsv_to_rgb(instance * GOLDEN % 1.0, 0.8, 1.0)
        box = Marker(header=header, ns="boxes", id=instance, type=Marker.CUBE)
        box.pose = Pose(
            position=_filled(Point, centres[at]), orientation=_filled(Quaternion, quaternions[at])
        )
        box.scale = _filled(Vector3, sizes[at])
        box.color = ColorRGBA(r=colour[0], g=colour[1], b=colour[2], a=0.3)
        text = Marker(header=header, ns="ids", id=instance, type=Marker.TEXT_VIEW_FACING)
        text.pose = Pose(position=_filled(Point, tops[at]))
        text.scale = Vector3(z=TEXT_HEIGHT)
        text.color = ColorRGBA(r=1.0, g=1.0, b=1.0, a=0.9)
        text.text = str(instance)
        markers += [box, text]
    return MarkerArray(markers=markers)


def _filled(kind: type, values: np.ndarray):
    return kind(**dict(zip("xyzw", values.tolist(), strict=False)))
