# SPDX-License-Identifier: Apache-2.0
"""Commands that turn clouds into others: upsample, mesh, simulate, bag, view."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import (
    CLOUDS,
    add_network,
    add_origin,
    count,
    load,
    one_line,
    ratio,
    say,
    seed,
    share,
    tell,
)

DEEPEST = 10  # octree of a mesh: one more takes gigabytes


def add_upsample(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input", type=Path, metavar="IN", help=f"a cloud ({CLOUDS}) or a folder of them"
    )
    parser.add_argument(
        "output", type=Path, metavar="OUT", help="a file of any of these kinds, or a folder"
    )
    parser.add_argument(
        "--ratio",
        type=ratio,
        default=4.0,
        metavar="R",
        help="output points for each input point, any real number (%(default)g)",
    )
    parser.add_argument(
        "--keep-measured",
        action="store_true",
        help="the measured points come first, new ones go where they are missing",
    )
    add_origin(parser)
    add_network(parser)


def upsample(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    pairs = _pairs(args.input, args.output)
    up = load(args)
    if args.input.is_file():
        tell(_upsample_file(up, args, *pairs[0]))
        return 0
    failed = 0
    for source, target in tqdm(pairs, unit="cloud", disable=None):
        try:
            _upsample_file(up, args, source, target)
        except ValueError as error:  # one bad file must not stop a folder
            failed += 1
            if failed == len(pairs):  # they are all bad: the arguments may be
                raise
            say(f"skipped {source.name}: {one_line(error)}")
    return 1 if failed else 0


def _upsample_file(up, args: argparse.Namespace, source: Path, target: Path) -> str:
    """Read, upsample and write one cloud; what to say about it."""
    from apusmog_core.data import read_points, write_points

    scan = read_points(source)
    dense = up.upsample(scan.points, args.ratio, args.keep_measured, args.origin)
    if not len(dense):
        raise ValueError(f"{source}: ratio {args.ratio:g} leaves none of {len(scan.points)} points")
    write_points(target, dense, _nearest_intensity(scan, dense))
    left_out = f" ({scan.dropped} not finite left out)" if scan.dropped else ""
    return f"{target}: {len(scan.points)} points{left_out} became {len(dense)}"


def _pairs(source: Path, target: Path) -> list[tuple[Path, Path]]:
    """Files to read and to write; ValueError before any work where one of them cannot be."""
    from apusmog_core.data.clouds import READERS, WRITERS
    from apusmog_core.files import check_output

    if not source.exists():
        raise ValueError(f"{source}: no such file or folder")
    if not source.is_dir():
        check_output(target, source)
        if target.suffix.lower() not in WRITERS:
            raise ValueError(f"{target}: unknown kind of file; known: {', '.join(WRITERS)}")
        target.parent.mkdir(parents=True, exist_ok=True)
        return [(source, target)]
    files = sorted(file for file in source.iterdir() if file.suffix.lower() in READERS)
    if not files:
        raise ValueError(f"{source}: no clouds in this folder; known: {', '.join(READERS)}")
    if source.resolve() == target.resolve():
        raise ValueError(f"{target}: the output folder must not be the input folder")
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        check_output(target / file.name, *files)
    return [(file, target / file.name) for file in files]


def _nearest_intensity(scan, dense):
    """Intensity of the nearest measured point, where the input has any."""
    if scan.intensity is None:
        return None
    from apusmog_core.geometry import search

    return scan.intensity[search(scan.points, dense, 1)[1]]


def add_mesh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", type=Path, metavar="IN", help=f"a cloud ({CLOUDS})")
    parser.add_argument("output", type=Path, metavar="OUT", help="the mesh: .ply .obj .stl .off")
    parser.add_argument(
        "--ratio",
        type=ratio,
        default=4.0,
        metavar="R",
        help="upsample by this first (%(default)g)",
    )
    parser.add_argument(
        "--depth",
        type=int,
        choices=range(1, DEEPEST + 1),
        default=8,
        metavar="N",
        help=f"depth of the Poisson octree, 1 to {DEEPEST} (%(default)s)",
    )
    parser.add_argument(
        "--trim",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="cut away this share of vertices, least supported first (%(default)g)",
    )
    add_origin(parser)
    add_network(parser)


def mesh(args: argparse.Namespace) -> None:
    from apusmog_core.data import read_points
    from apusmog_core.files import check_output
    from apusmog_core.surface.mesh import MESHES, reconstruct

    if args.output.suffix.lower() not in MESHES:
        raise ValueError(f"{args.output}: unknown kind of mesh; known: {', '.join(MESHES)}")
    check_output(args.output, args.input)
    scan = read_points(args.input)
    dense = load(args).upsample(scan.points, args.ratio, origin=args.origin)
    vertices, triangles = reconstruct(dense, args.output, args.origin, args.depth, args.trim)
    tell(f"{args.output}: {vertices} vertices, {triangles} triangles from {len(dense)} points")


def add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", type=Path, metavar="OUT", help="the folder to write")
    parser.add_argument(
        "--frames", type=count, default=20, help="scans, ten a second (%(default)s)"
    )
    parser.add_argument(
        "--sensor",
        default="HDL-64E",
        help="HDL-64E, VLP-16, VLP-32C, OS1-64 or OS1-128 (%(default)s)",
    )
    parser.add_argument(
        "--meshes",
        type=Path,
        metavar="DIR",
        help="road meshes with a MANIFEST.tsv, beside the built-in ones",
    )
    parser.add_argument("--seed", type=seed, default=0, help="seed of the street (%(default)s)")


def simulate(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    from apusmog_core.files import check_new_folder
    from apusmog_core.simulate.sensor import Sensor
    from apusmog_core.simulate.street import drive, write_kitti

    check_new_folder(args.output)
    scans = drive(args.frames, args.seed, Sensor.named(args.sensor), args.meshes)
    count = write_kitti(tqdm(scans, total=args.frames, unit="scan", disable=None), args.output)
    tell(f"{args.output}: {count} scans")


def add_bag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "kitti", type=Path, metavar="KITTI_DIR", help="a raw drive or odometry sequence"
    )
    parser.add_argument(
        "output", type=Path, metavar="OUT", help="the bag's folder, which must be new"
    )
    parser.add_argument(
        "--format", choices=("mcap", "sqlite3"), default="mcap", help="(%(default)s)"
    )


def bag(args: argparse.Namespace) -> None:
    from apusmog_core.data.bag_writer import convert

    tell(f"{args.output}: {convert(args.kitti, args.output, args.format)} scans")


def add_view(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="clouds, bags or folders"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("view.html"), help="the page (%(default)s)"
    )
    parser.add_argument(
        "--ratio",
        type=ratio,
        nargs="+",
        default=[],
        metavar="R",
        help="also show the objects upsampled by these ratios",
    )


def view(args: argparse.Namespace) -> None:
    from apusmog_core.view import view

    tell(str(view(args.files, args.out, args.ratio)))
