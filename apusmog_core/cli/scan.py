# SPDX-License-Identifier: Apache-2.0
"""`apusmog scan`: what the node does, for files."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path

from .arguments import add_settings, list_settings, load_pipeline, plural, ratio, say, tell
from .progress import progress, waiting

FORMATS = ("bag", "pcd", "ply", "npz")


def add_scan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input", type=Path, metavar="IN", help="a bag, a KITTI drive, a folder of clouds or a cloud"
    )
    parser.add_argument(
        "output",
        type=Path,
        metavar="OUT",
        help="a new folder; or, for a single scan, a file (.pcd .ply .npz)",
    )
    parser.add_argument(
        "--ratio",
        type=ratio,
        metavar="R",
        help="output points for each point of an object, any real number (4)",
    )
    parser.add_argument(
        "--scene", action="store_true", help="the whole scan with its objects dense, not these only"
    )
    parser.add_argument(
        "--format", choices=FORMATS, default="bag", help="what the folder is to hold (%(default)s)"
    )
    parser.add_argument(
        "--topic", default="", help="topic of a bag to read (the one with most clouds)"
    )
    add_settings(parser, "cluster.min_points=8 weights=mine.pt")
    parser.details = list_settings


def scan(args: argparse.Namespace) -> int:
    from apusmog_core.data import open_scans
    from apusmog_core.data.dense_files import dense_columns, open_output
    from apusmog_core.files import check_output

    if args.output.is_file():
        check_output(args.output, args.input)
    scans = open_scans(args.input, args.topic)
    topic = "/upsampler/scene" if args.scene else "/upsampler/dense"  # as the node names them
    with open_output(args.output, args.format, len(scans), topic) as write:
        pipeline = load_pipeline(args, ratio=args.ratio)
        summary = Summary()
        for number, one in enumerate(progress(scans, "scan")):
            with waiting(f"scan {number + 1} of {len(scans)}"):
                dense = pipeline.process(one.points, one.intensity, ring=one.ring)
            write(one, dense_columns(one, dense, whole=args.scene))
            summary.add(one, dense)
        summary.unreadable = scans.skipped
        if not summary.scans:
            raise ValueError(f"{args.input}: none of its {len(scans)} scans could be read")
    tell(f"{args.output}: {summary.total()}")
    for line in summary.not_found():
        say(line)
    return 1 if summary.unreadable else 0


@dataclass
class Summary:
    """What became of the scans, counted."""

    scans: int = 0
    objects: int = 0
    measured: int = 0  # points of objects
    dense: int = 0
    empty: list[str] = field(default_factory=list)  # names of scans without an object
    limited: list[str] = field(default_factory=list)  # what budgets said
    not_finite: int = 0
    no_return: int = 0
    no_intensity: int = 0
    no_ring: int = 0
    unreadable: int = 0
    started: float = field(default_factory=time.monotonic)

    def add(self, scan, dense) -> None:
        """Count one scan and its `DenseScan`."""
        segments = dense.segments
        objects = int(segments.instance.max(initial=0))
        self.scans += 1
        self.objects += objects
        self.measured += int((segments.instance > 0).sum())
        self.dense += len(dense.points)
        self.empty += [] if objects else [scan.name]
        self.limited += [dense.limited] if dense.limited else []
        self.not_finite += scan.dropped + segments.not_finite
        self.no_return += segments.no_return
        self.no_intensity += scan.intensity is None
        self.no_ring += segments.ring_source == "none"

    def total(self) -> str:
        seconds = time.monotonic() - self.started
        return (
            f"{plural(self.scans, 'scan')}, {plural(self.objects, 'object')}; "
            f"{self.measured:,} measured points became {self.dense:,} "
            f"(× {self.dense / max(self.measured, 1):.3f}) in {seconds:.1f} s"
        )

    def not_found(self) -> list[str]:
        """A line for each thing that was missing."""
        from apusmog_core.pipeline import TO_FIND_OBJECTS

        lines = []
        if self.empty:
            some = ", ".join(self.empty[:3]) + (", ..." if len(self.empty) > 3 else "")
            lines.append(
                f"no objects found in {len(self.empty)} of {self.scans} scans ({some}): "
                f"{TO_FIND_OBJECTS}"
            )
        if self.limited:
            lines.append(f"limited in {len(self.limited)} scans, such as {self.limited[0]}")
        for count, thing, what in (
            (self.not_finite, "point", "not finite, left out"),
            (self.no_return, "point", "at (0, 0, 0), which is no return, left out"),
            (self.unreadable, "scan", "that could not be read, left out"),
            (self.no_intensity, "scan", "without intensity: it is 0"),
            (
                self.no_ring,
                "scan",
                "without rings: far objects are missed",
            ),
        ):
            lines += [f"{plural(count, thing)} {what}"] if count else []
        return lines
