# SPDX-License-Identifier: Apache-2.0
"""PointCloud2 as plain numbers: any field layout to arrays, without a message library."""

from __future__ import annotations

import numpy as np

# sensor_msgs/msg/PointField datatype -> numpy
DATATYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 8: "f8"}

INTENSITY = ("intensity", "i", "reflectivity")  # the first of these that there is
RING = ("ring", "channel", "line", "laser_number")  # the first of these that is an integer

EXACT_M = 5e-4  # metres that a coordinate may move when it is stored: it keeps its millimetres

Field = tuple[str, int, int, int]  # name, offset, datatype, count


def structured(
    fields: list[Field],
    height: int,
    width: int,
    point_step: int,
    row_step: int,
    is_bigendian: bool,
    data,
) -> np.ndarray:
    """The message's bytes as a (height, width) structured array: a view, nothing is copied."""
    dtype = _dtype(fields, point_step, is_bigendian)
    buffer = np.frombuffer(data, np.uint8)
    if height * width == 0:
        return np.empty((height, width), dtype)
    if height > 1 and row_step < width * point_step:
        raise ValueError(
            f"row_step {row_step} is less than width {width} * point_step {point_step}"
        )
    row_step = row_step if height > 1 else width * point_step  # one row: often left at 0
    if len(buffer) < height * row_step:
        raise ValueError(
            f"data has {len(buffer)} bytes, but height {height} * {row_step} bytes a row "
            f"are {height * row_step}"
        )
    return np.ndarray((height, width), dtype, buffer, strides=(row_step, point_step))


def columns(
    cloud: np.ndarray,
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Points (n, 3) as `narrowed`, intensity and ring (n,) or None, of a (height, width) cloud.

    Nothing is left out: row i of each is point i. Without a field for it, the rings of an organised
    cloud are its rows (Ouster) or, if there are fewer of them, its columns (RoboSense).
    """
    names = cloud.dtype.names or ()
    missing = [axis for axis in "xyz" if axis not in names]
    if missing:
        raise ValueError(f"no field {', '.join(missing)}; fields: {', '.join(names) or 'none'}")
    kind = np.result_type(*(wide(cloud.dtype[axis].base) for axis in "xyz"))
    points = np.empty((cloud.size, 3), kind)
    for at, axis in enumerate("xyz"):
        points[:, at] = column(cloud, axis)
    shade = next((name for name in INTENSITY if name in names), None)
    intensity = None if shade is None else column(cloud, shade).astype(np.float32)
    whole = [name for name in RING if name in names and cloud.dtype[name].base.kind in "iu"]
    if whole:
        ring = column(cloud, whole[0]).astype(np.int32)
    else:
        row, place = np.indices(cloud.shape, np.int32)
        rings = row if cloud.shape[0] <= cloud.shape[1] else place
        ring = rings.reshape(-1) if min(cloud.shape) > 1 else None
    return narrowed(points), intensity, ring


def wide(dtype: np.dtype) -> type:
    """float32 or float64, whatever holds the numbers of a type."""
    return np.float32 if np.can_cast(dtype, np.float32) else np.float64


def narrowed(points: np.ndarray) -> np.ndarray:
    """Coordinates as float32, or as float64 where float32 could not hold their millimetres.

    What is beyond the largest float32 is no coordinate, and becomes infinite.
    """
    if points.dtype == np.float32:
        return points
    points = points.astype(np.float64, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = points.astype(np.float32)
        exact = not (np.abs(narrow - points) > EXACT_M).any()
    return narrow if exact else np.where(np.isinf(narrow), narrow, points)


def decode(
    fields: list[Field],
    height: int,
    width: int,
    point_step: int,
    row_step: int,
    is_bigendian: bool,
    data,
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None, int]:
    """Points (n, 3) as `narrowed`, intensity and ring (n,) or None, how many were not finite.

    `is_dense` is not asked for: drivers set it whether it is true or not.
    """
    cloud = structured(fields, height, width, point_step, row_step, is_bigendian, data)
    return drop_nonfinite(*columns(cloud))


def drop_nonfinite(
    points: np.ndarray, intensity: np.ndarray | None, ring: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None, int]:
    """The arrays without points that are not finite, and their number; bad intensity becomes 0."""
    finite = np.isfinite(points[:, 0]) & np.isfinite(points[:, 1]) & np.isfinite(points[:, 2])
    dropped = int(len(points) - np.count_nonzero(finite))
    if dropped:
        points = points[finite]
        intensity = None if intensity is None else intensity[finite]
        ring = None if ring is None else ring[finite]
    if intensity is not None:
        intensity = np.nan_to_num(intensity, nan=0.0, posinf=0.0, neginf=0.0)
    return points, intensity, ring, dropped


def _dtype(fields: list[Field], point_step: int, is_bigendian: bool) -> np.dtype:
    order = ">" if is_bigendian else "<"
    layout: dict[str, tuple[object, int]] = {}  # of fields with the same name the first counts
    for name, offset, datatype, count in fields:
        if datatype not in DATATYPES:
            raise ValueError(f"field {name} has the unknown datatype {datatype}")
        kind = np.dtype(order + DATATYPES[datatype])
        count = max(count, 1)  # some drivers leave it at 0
        if offset + kind.itemsize * count > point_step:
            raise ValueError(
                f"field {name} ends at byte {offset + kind.itemsize * count} of a point, "
                f"but point_step is {point_step}"
            )
        if name:  # nameless fields are padding
            layout.setdefault(name, (kind if count == 1 else (kind, (count,)), offset))
    return np.dtype(
        {
            "names": list(layout),
            "formats": [kind for kind, _ in layout.values()],
            "offsets": [offset for _, offset in layout.values()],
            "itemsize": point_step,
        }
    )


def column(cloud: np.ndarray, name: str) -> np.ndarray:
    """One field of every point, flat; of a field with several values the first."""
    values = cloud[name]
    return (values if values.ndim == 2 else values[..., 0]).reshape(-1)
