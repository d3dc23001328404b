# SPDX-License-Identifier: Apache-2.0
"""What is published for a scan: clouds with all fields of the input, and boxes as markers."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from geometry_msgs.msg import Point, Pose, Quaternion, Vector3
from sensor_msgs.msg import PointCloud2
from std_msgs.msg import ColorRGBA, Header
from visualization_msgs.msg import Marker, MarkerArray

from . import cloud

if TYPE_CHECKING:  # these load slowly, and the node is to answer at once
    from apusmog_core.pipeline import DenseScan, ScanPipeline, Segments
    from apusmog_core.segment.boxes import Boxes

OUTPUTS = dict(dense=PointCloud2, objects=PointCloud2, scene=PointCloud2, boxes=MarkerArray)

TEXT_HEIGHT = 0.6  # metres
THINNEST = 0.01  # metres; RViz complains about a side of 0
GOLDEN = 0.618034  # neighbouring ids get hues far apart


@dataclass
class Work:
    """One scan on its way through the node, with the settings it started with."""

    header: Header  # of the input
    source: cloud.Cloud
    wanted: set[str]  # outputs that somebody subscribes to
    pipeline: ScanPipeline
    segments: Segments
    dense: DenseScan | None  # where somebody wants it


class Points(NamedTuple):
    """Points of one output, as rows of the scan's segments that they are or come from."""

    rows: np.ndarray  # (m,)
    points: np.ndarray  # (m, 3)
    instance: np.ndarray  # (m,)
    generated: np.ndarray  # (m,) bool
    confidence: np.ndarray  # (m,)


def message(
    name: str, work: Work, header: Header, transform: np.ndarray | None
) -> PointCloud2 | MarkerArray:
    """One output as a message with this header, moved by `transform` (4, 4)."""
    segments, config = work.segments, work.pipeline.config
    if name == "boxes":
        from apusmog_core.segment.boxes import oriented_boxes

        objects = segments.instance > 0
        boxes = oriented_boxes(segments.points[objects], segments.instance[objects])
        return box_markers(header, boxes, np.eye(4) if transform is None else transform)
    chosen = dict(dense=_dense, objects=_objects, scene=_scene)[name](work)
    if config.fields == "minimal":
        points = chosen.points
        if transform is not None:
            points = points @ transform[:3, :3].T + transform[:3, 3]
        intensity = np.nan_to_num(segments.intensity[chosen.rows], posinf=0.0, neginf=0.0)
        labels = dict(instance=chosen.instance, generated=chosen.generated)
        return cloud.write(header, points, intensity=intensity, **labels)
    rows, points, *values = chosen
    values = dict(zip(cloud.APPENDED.names, values, strict=True))
    return cloud.extend(header, work.source, segments.rows[rows], points, transform, **values)


def _measured(segments: Segments, rows: np.ndarray) -> Points:
    ones = np.ones(len(rows), np.float32)
    return Points(rows, segments.points[rows], segments.instance[rows], ones == 0, ones)


def _objects(work: Work) -> Points:
    """The measured points of objects, in the order of the input."""
    return _measured(work.segments, np.flatnonzero(work.segments.instance))


def _dense(work: Work) -> Points:
    """Object after object, each with its measured points first."""
    dense = work.dense
    return Points(dense.source, dense.points, dense.instance, dense.generated, dense.confidence)


def _scene(work: Work) -> Points:
    """All measured points in the order of the input, the new ones before the last of them.

    The last point is the one that was measured last: LIO-SAM takes its time for the scan's end.
    """
    dense = _dense(work)
    kept = work.segments.instance == 0
    kept[dense.rows[~dense.generated]] = True  # all, unless the ratio is below one
    measured = _measured(work.segments, np.flatnonzero(kept))
    new = (column[dense.generated] for column in dense)
    parts = ((old[:-1], made, old[-1:]) for old, made in zip(measured, new, strict=True))
    return Points(*map(np.concatenate, parts))


def facts(work: Work) -> dict[str, object]:
    """What diagnostics tell of the latest scan, one value a name."""
    segments, dense = work.segments, work.dense
    told = {
        "weights": work.pipeline.config.weights,
        "device": work.pipeline.device,
        "instances": segments.instance.max(initial=0),
        "points in": len(work.source.points),
        "points not finite": segments.not_finite,
        "points without return": segments.no_return,
        "ring source": segments.ring_source,
        "range bias": "not known" if segments.bias is None else "left out",
        "sensor at": " ".join(f"{metres:.2f}" for metres in segments.place[:3]),
        "sensor tilt [deg]": f"{np.degrees(np.arcsin(np.linalg.norm(segments.place[3:]))):.1f}",
    }
    if mounting := getattr(work.pipeline, "mounting", None):  # none while the network loads
        told["mounting"] = mounting.text
        told["warning"] = mounting.warning or _out_of_range(
            segments, work.pipeline.config.range.max
        )
    if dense:
        told["points out"] = len(dense.points)
        told["ratio"] = f"{dense.effective_ratio:.2f}"
        told["ratio wanted"] = f"{dense.ratio:g}"
        told["budget"] = dense.limited or "not bound"
    return told


def _out_of_range(segments: Segments, farthest: float) -> str:
    """A warning where all points are too far away, as in the frame of a map."""
    if not len(segments.points) or segments.instance.any():
        return ""
    nearest = np.linalg.norm(segments.seen, axis=1).min()
    if nearest <= farthest:
        return ""
    return (
        f"the nearest point is {nearest:.0f} m away (more than range.max, {farthest:g} m): give "
        "scans in the frame of the sensor or the vehicle"
    )


# --- boxes ---------------------------------------------------------------------------------------


def box_markers(header: Header, boxes: Boxes, transform: np.ndarray) -> MarkerArray:
    """A box and its id for each instance, moved by `transform` (4, 4); those before are deleted."""
    from scipy.spatial.transform import Rotation

    markers = [Marker(header=header, action=Marker.DELETEALL)]
    centres = boxes.centre @ transform[:3, :3].T + transform[:3, 3]
    tops = centres + transform[:3, 2] * (boxes.size[:, 2:] / 2 + TEXT_HEIGHT)
    turns = Rotation.from_matrix(transform[:3, :3]) * Rotation.from_rotvec(
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
