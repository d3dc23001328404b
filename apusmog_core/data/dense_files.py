# SPDX-License-Identifier: Apache-2.0
"""Dense scans as files: one of its own for each, or all in one rosbag2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ..files import check_new_folder, written_whole
from .bag_writer import FRAME, cloud_writer
from .clouds import READERS, Scan, write_columns
from .records import to_records

SUFFIXES = (".pcd", ".ply", ".npz")
Columns = dict[str, np.ndarray]
Write = Callable[[Scan, Columns], None]


def dense_columns(scan: Scan, dense, whole: bool = False) -> Columns:
    """Columns of the output for a scan and its `DenseScan`: its objects, or the whole scene.

    A new point has the fields of the nearest measured one; measured points keep all of theirs.
    """
    segments = dense.segments
    rest = np.flatnonzero(segments.instance == 0) if whole else np.zeros(0, np.int64)
    source = np.concatenate([rest, dense.source])  # points of `segments`

    def joined(kept, new) -> np.ndarray:
        return np.concatenate([np.broadcast_to(kept, (len(rest), *new.shape[1:])), new])

    generated = joined(np.uint8(0), dense.generated.astype(np.uint8))
    points = scan.points[segments.rows[source]]  # those that were measured, with all their digits
    points[generated > 0] = dense.points[dense.generated]
    columns = {axis: points[:, i] for i, axis in enumerate("xyz")}
    columns["intensity"] = segments.intensity[source]
    ring = segments.ring
    if ring is not None:
        columns["ring"] = ring[source].astype(np.uint16)
    columns |= {name: values[segments.rows[source]] for name, values in scan.fields.items()}
    columns["instance"] = joined(np.uint32(0), dense.instance)
    columns["generated"] = generated
    columns["confidence"] = joined(np.float32(1), dense.confidence)
    return columns


@contextmanager
def open_output(out: Path, format: str, count: int, topic: str) -> Iterator[Write]:
    """A function that writes a scan and its columns; `format` is that of a folder's content."""
    if out.suffix.lower() in SUFFIXES:
        if count != 1:
            raise ValueError(f"{out}: {count} scans do not fit into one file; name a folder")
        out.parent.mkdir(parents=True, exist_ok=True)
        yield lambda scan, columns: write_columns(out, columns)
    elif out.suffix.lower() in (*READERS, ".bag", ".db3", ".mcap"):
        known = ", ".join(SUFFIXES)
        raise ValueError(f"{out}: not written as such; known: {known}, or name a folder for a bag")
    elif format == "bag":
        check_new_folder(out)
        with _new_bag(out, topic) as write:
            yield write
    else:
        check_new_folder(out)
        with written_whole(out) as place:
            place.mkdir()
            yield lambda scan, columns: write_columns(place / f"{scan.name}.{format}", columns)


@contextmanager
def _new_bag(out: Path, topic: str) -> Iterator[Write]:
    """A bag that is there, whole, after the last scan, or not at all."""
    with written_whole(out) as place, cloud_writer(place, topic) as write:

        def write_scan(scan: Scan, columns: Columns) -> None:
            stamp = scan.stamp_ns if scan.stamp_ns is not None else round(scan.stamp * 1e9)
            write(stamp, scan.frame or FRAME, to_records(columns))

        yield write_scan
