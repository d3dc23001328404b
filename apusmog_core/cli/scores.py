# SPDX-License-Identifier: Apache-2.0
"""`apusmog evaluate`: a network beside the baselines."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import (
    add_denoise,
    add_network,
    add_settings,
    count,
    load,
    number,
    parse_setting,
    ratio,
    say,
    stride,
)
from .progress import progress, waiting


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="what to score on", metavar="WHAT", required=True)
    for name, title in (("pugan", "PU-GAN"), ("pu1k", "PU1K")):
        help = f"the shapes of {title}'s test set: CD, HD and P2F"
        _add_shapes(kinds.add_parser(name, help=help, description=help))
    help = "rings held out of LiDAR objects: completeness, hallucination, F"
    _add_rings(kinds.add_parser("rings", help=help, description=help))
    help = "train and score the rows of the paper's ablation table"
    _add_ablation(kinds.add_parser("ablation", help=help, description=help))


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="also write the table here (.csv, .json)",
    )


def _add_scored(parser: argparse.ArgumentParser, weights: str) -> None:
    add_network(parser, weights)
    parser.add_argument(
        "--baselines", action="store_true", help="score the baselines alone, without a network"
    )
    _add_out(parser)


def _add_shapes(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=evaluate_shapes)
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="with input_2048, gt_8192 and meshes (.off) in it"
    )
    parser.add_argument(
        "--ratio", type=ratio, nargs="+", default=[4.0], metavar="R", help="ratios (4)"
    )
    parser.add_argument(
        "--noise",
        type=number,
        nargs="+",
        default=[0.0],
        metavar="D",
        help="deviations of noise added to the input, in radii of the shape (0)",
    )
    parser.add_argument(
        "--size",
        type=count,
        nargs="+",
        default=[2048],
        metavar="N",
        help="points of the input (2048)",
    )
    add_denoise(parser)
    _add_scored(parser, "shape")


def evaluate_shapes(args: argparse.Namespace) -> None:
    from apusmog_core.data.pugan import load_shapes
    from apusmog_core.evaluation.shapes import SHAPE_BASELINES
    from apusmog_core.evaluation.shapes import evaluate_shapes as score_shapes

    _check_results(args.out)
    methods = dict(SHAPE_BASELINES)
    if not args.baselines:
        up = load(args)
        methods[args.weights] = lambda points, ratio: up.upsample(points, ratio)
    rows = []
    for size in args.size:
        shapes = load_shapes(args.folder, size)
        for by in args.ratio:
            for noise in args.noise:
                scored = score_shapes(progress(shapes, "shape"), methods, by, noise, args.seed)
                rows += scored
                print_table(scored, explain=False)
    print_meanings(rows)
    _write_results(args.out, rows)


def _add_rings(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=evaluate_rings)
    parser.add_argument(
        "scans",
        type=Path,
        metavar="SCANS",
        nargs="?",
        help="a KITTI drive, a bag, a folder of scans with rings, or one such scan",
    )
    parser.add_argument(
        "--holdout",
        type=Path,
        metavar="DIR",
        help="fixed clusters of these scans (SCAN.npz), instead of finding them",
    )
    parser.add_argument(
        "--simulate",
        type=count,
        metavar="N",
        help="simulated scans instead, where the true surface is known",
    )
    parser.add_argument(
        "--meshes",
        type=Path,
        metavar="DIR",
        help="road meshes for --simulate, beside the built-in ones",
    )
    parser.add_argument(
        "--sensor",
        metavar="NAME",
        help="for --simulate: HDL-64E (the default), VLP-16 ...; an unknown name lists all",
    )
    parser.add_argument(
        "--stride",
        type=stride,
        default=2,
        metavar="N",
        help="every N-th ring is given, those between are held out (%(default)s)",
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="also with the range bias of each laser, from the kept rings of the other scans only",
    )
    parser.add_argument(
        "--frames",
        type=count,
        default=20,
        metavar="N",
        help="most scans to use, spread evenly (%(default)s)",
    )
    parser.add_argument(
        "--points",
        type=count,
        nargs=2,
        metavar=("LEAST", "MOST"),
        help="measured points of an object that is scored (64 and more); not with --holdout",
    )
    _add_scored(parser, "lidar")


def evaluate_rings(args: argparse.Namespace) -> None:
    from apusmog_core.evaluation import rings

    _check_results(args.out)
    if (args.scans is None) == (args.simulate is None):
        raise ValueError("evaluate rings: give SCANS, or --simulate N")
    if args.sensor and not args.simulate:
        raise ValueError(f"--sensor {args.sensor}: only simulated scans (--simulate) have a choice")
    up = None if args.baselines else load(args)
    cases = _ring_cases(args)
    with waiting("calibrating"):
        calibrations = rings.calibrate_scans(cases, args.scans) if args.calibrate else None
    for name, calibration in (calibrations or {}).items():
        if not calibration.converged:
            say(f"{name}: {calibration.scans} other scans are too few to calibrate from")
    rows = rings.evaluate_rings(cases, up, args.weights, calibrations, progress)
    print_table(rows)
    _write_results(args.out, rows)


def _ring_cases(args: argparse.Namespace):
    from apusmog_core.evaluation import rings

    options = dict(points=args.points or rings.SCORED_POINTS, stride=args.stride)
    if args.simulate:
        sensor = args.sensor or "HDL-64E"
        with waiting(f"simulating {args.simulate} scans"):
            return rings.simulated_cases(args.simulate, args.seed, sensor, args.meshes, **options)
    if args.holdout:
        with waiting("reading held-out rings"):
            return rings.fixed_cases(args.scans, args.holdout, args.stride)
    return rings.found_cases(args.scans, args.frames, **options)


def _add_ablation(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=evaluate_ablation)
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="settings of the full model's run (.yaml)"
    )
    parser.add_argument(
        "--patches", type=count, metavar="N", help="patches each row is trained on; else by --hours"
    )
    parser.add_argument(
        "--hours",
        type=float,
        default=2.0,
        help="for all rows together on this machine (%(default)s)",
    )
    add_settings(parser, "data.meshes=FOLDER")
    parser.add_argument(
        "--shapes",
        type=Path,
        required=True,
        metavar="DIR",
        help="test set to score on, as for pugan",
    )
    _add_out(parser)


def evaluate_ablation(args: argparse.Namespace) -> None:
    from apusmog_core.config import TrainConfig
    from apusmog_core.data.pugan import load_shapes
    from apusmog_core.evaluation import ablation
    from apusmog_core.settings import load_yaml, with_values

    _check_results(args.out)
    config = with_values(load_yaml(TrainConfig, args.config), dict(map(parse_setting, args.set)))
    shapes = load_shapes(args.shapes)
    patches = args.patches or ablation.affordable_patches(config, args.hours, shapes)
    run = ablation.ablation_runs(config, patches)["full model"]
    limit = "" if args.patches else f", about {args.hours:g} hours"
    say(f"{ablation.ROWS} rows of {patches} patches, {run.steps} steps of {run.batch}{limit}")
    rows = ablation.evaluate_ablation(config, patches, shapes, progress)
    print_table(rows)
    _write_results(args.out, rows)


def print_table(rows, explain: bool = True) -> None:
    from apusmog_core.evaluation.tables import format_table

    print(format_table(rows), flush=True)
    if explain:
        print_meanings(rows)


def print_meanings(rows) -> None:
    """What the columns are, below a table."""
    from apusmog_core.evaluation.tables import explain_columns

    if rows:
        print("\n" + explain_columns(rows), flush=True)


def _check_results(paths: list[Path]) -> None:
    """Before hours of work, not after."""
    for path in paths:
        if path.suffix not in (".csv", ".json"):
            raise ValueError(f"{path}: results are written as .csv or .json")
        if path.is_dir():
            raise ValueError(f"{path}: a folder; name a file to write")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: no such folder to write to")


def _write_results(paths: list[Path], rows) -> None:
    from apusmog_core.evaluation.tables import write_rows

    for path in paths:
        write_rows(path, rows)
        print(f"{path}: {len(rows)} rows")
