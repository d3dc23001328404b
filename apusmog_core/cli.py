# SPDX-License-Identifier: Apache-2.0
"""The `apusmog` command. Each subcommand imports what it needs when it runs, so help is instant."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

CLOUDS = ".xyz .ply .pcd .bin .npy"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 (failed), 2 (bad usage or input) or 130 (Ctrl-C)."""
    args = build_parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _say(f"warning: {message}")
            return args.run(args) or 0
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `apusmog ... | head`
        sys.stdout = None
        return 1
    except (ValueError, FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        _say(f"error: {_one_line(error)}")
        return 2
    except (OSError, ImportError) as error:
        _say(f"error: {_one_line(error)}")
        return 1


def _say(text: str) -> None:
    print(f"apusmog: {text}", file=sys.stderr)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, like every other error."""

    def error(self, message: str):
        _say(f"error: {message} (see '{self.prog} --help')")
        raise SystemExit(2)


def build_parser() -> argparse.ArgumentParser:
    """All commands and their arguments; `args.run(args)` runs the one chosen."""
    parser = _Parser(
        prog="apusmog",
        description="Make sparse point clouds dense, by any real ratio, with APU-SMOG.",
        epilog="'apusmog COMMAND --help' explains a command.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run, help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help)
        added.set_defaults(run=run)
        return added

    _add_upsample(command("upsample", upsample, "upsample a cloud, or a folder of clouds"))
    _add_mesh(command("mesh", mesh, "upsample a cloud and reconstruct its surface"))
    _add_train(command("train", train, "train a network"))
    _add_finetune(command("finetune", finetune, "continue training on your own unlabelled scans"))
    _add_evaluate(commands)
    _add_info(command("info", info, "say what is in a weights file"))
    _add_simulate(command("simulate", simulate, "write simulated LiDAR scans as a KITTI drive"))
    _add_bag(command("bag", bag, "convert a KITTI drive to a rosbag2"))
    _add_export(command("export", export, "export a network to ONNX"))
    _add_view(command("view", view, "make a 3-D page of clouds, bags or folders"))
    _add_demo(command("demo", demo, "run the whole pipeline and show what comes out"))
    _add_figures(command("figures", figures, "draw the pictures of the documentation"))
    _add_bench(command("bench", bench, "measure speed and memory, or compare two runs"))
    return parser


# --- arguments that several commands share -------------------------------------------------------


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a ratio above 0")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to below 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a count of 1 or more")
    return value


def _add_network(parser: argparse.ArgumentParser, weights: str = "default") -> None:
    parser.add_argument(
        "--weights", default=weights, metavar="W", help="a shipped name or a file (%(default)s)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples (%(default)s)")


def _add_origin(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--origin",
        type=float,
        nargs=3,
        metavar=("X", "Y", "Z"),
        help="where the sensor stands, for clouds seen by one (a LiDAR scan: 0 0 0)",
    )


def _load(args: argparse.Namespace):
    from apusmog_core.upsampler import Upsampler

    return Upsampler.load(args.weights, device=args.device, seed=args.seed)


# --- upsample, mesh ------------------------------------------------------------------------------


def _add_upsample(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input", type=Path, metavar="IN", help=f"a cloud ({CLOUDS}) or a folder of them"
    )
    parser.add_argument(
        "output", type=Path, metavar="OUT", help="a file of any of these kinds, or a folder"
    )
    parser.add_argument(
        "--ratio",
        type=_ratio,
        default=4.0,
        metavar="R",
        help="output points for each input point, any real number (%(default)g)",
    )
    parser.add_argument(
        "--keep-input",
        action="store_true",
        help="the measured points come first, new ones go where they are missing",
    )
    _add_origin(parser)
    _add_network(parser)


def upsample(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from apusmog_core.data import read_points, write_points

    pairs = _pairs(args.input, args.output)
    up = _load(args)
    failed = 0
    for source, target in tqdm(pairs, unit="cloud", disable=len(pairs) == 1 or None):
        try:
            scan = read_points(source)
        except ValueError as error:
            if len(pairs) == 1:
                raise
            _say(f"skipped {_one_line(error)}")  # one bad file must not stop a folder
            failed += 1
            continue
        dense = up.upsample(scan.points, args.ratio, args.keep_input, args.origin)
        write_points(target, dense, _nearest_intensity(scan, dense))
        if len(pairs) == 1:
            left_out = f" ({scan.dropped} not finite left out)" if scan.dropped else ""
            print(f"{target}: {len(scan.points)} points{left_out} became {len(dense)}")
    return 1 if failed else 0


def _pairs(source: Path, target: Path) -> list[tuple[Path, Path]]:
    """Files to read and to write; ValueError before any work where one of them cannot be."""
    from apusmog_core.data.clouds import READERS, WRITERS

    if not source.exists():
        raise ValueError(f"{source}: no such file or folder")
    if source.is_file():
        if target.suffix.lower() not in WRITERS:
            raise ValueError(f"{target}: unknown kind of file; known: {', '.join(WRITERS)}")
        target.parent.mkdir(parents=True, exist_ok=True)
        return [(source, target)]
    files = sorted(file for file in source.iterdir() if file.suffix.lower() in READERS)
    if not files:
        raise ValueError(f"{source}: no clouds in this folder; known: {', '.join(READERS)}")
    target.mkdir(parents=True, exist_ok=True)
    if source.resolve() == target.resolve():
        raise ValueError(f"{target}: the output folder must not be the input folder")
    return [(file, target / file.name) for file in files]


def _nearest_intensity(scan, dense):
    """Intensity of the nearest measured point, where the input has any."""
    if scan.intensity is None:
        return None
    from scipy.spatial import cKDTree

    return scan.intensity[cKDTree(scan.points).query(dense)[1]]


def _add_mesh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", type=Path, metavar="IN", help=f"a cloud ({CLOUDS})")
    parser.add_argument("output", type=Path, metavar="OUT", help="the mesh: .ply .obj .stl .off")
    parser.add_argument(
        "--ratio",
        type=_ratio,
        default=4.0,
        metavar="R",
        help="upsample by this first (%(default)g)",
    )
    parser.add_argument(
        "--depth", type=_count, default=8, help="depth of the Poisson octree (%(default)s)"
    )
    parser.add_argument(
        "--trim",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="cut away this share of vertices, least supported first (%(default)g)",
    )
    _add_origin(parser)
    _add_network(parser)


def mesh(args: argparse.Namespace) -> None:
    from apusmog_core.data import read_points
    from apusmog_core.mesh import MESHES, reconstruct

    if args.output.suffix.lower() not in MESHES:
        raise ValueError(f"{args.output}: unknown kind of mesh; known: {', '.join(MESHES)}")
    scan = read_points(args.input)
    dense = _load(args).upsample(scan.points, args.ratio, origin=args.origin)
    vertices, triangles = reconstruct(dense, args.output, args.origin, args.depth, args.trim)
    print(f"{args.output}: {vertices} vertices, {triangles} triangles from {len(dense)} points")


# --- train, finetune, info, export ---------------------------------------------------------------


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="settings of the run (.yaml)")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="settings that differ from the file, such as data.road=FOLDER",
    )


def _assignment(text: str) -> tuple[str, object]:
    import yaml

    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set: {text!r} is not NAME=VALUE")
    return name, yaml.safe_load(value)


def train(args: argparse.Namespace) -> None:
    from apusmog_core.config import TrainConfig, load_yaml, with_values

    config = load_yaml(TrainConfig, args.config)  # a mistake in it shows before PyTorch loads
    config = with_values(config, dict(map(_assignment, args.set)))
    from apusmog_core.train import train

    print(f"{train(config, resume=args.resume)}: written")


def _add_finetune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "scans",
        type=Path,
        metavar="SCANS",
        help="a KITTI drive, a bag or a folder of scans with rings",
    )
    parser.add_argument(
        "--weights", required=True, metavar="W", help="what to start from: a shipped name or a file"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="F", help="the weights file to write"
    )
    parser.add_argument("--force", action="store_true", help="write it even if it scores worse")
    parser.add_argument(
        "--steps", type=_count, default=400, metavar="N", help="optimiser steps (%(default)s)"
    )
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate (%(default)g)")
    parser.add_argument(
        "--frames",
        type=_count,
        default=100,
        metavar="N",
        help="most scans to use, spread evenly; the last fifth is held out (%(default)s)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything (%(default)s)")


def finetune(args: argparse.Namespace) -> int:
    from apusmog_core.finetune import finetune

    keys = ("force", "steps", "rate", "frames", "device", "seed")
    options = {key: getattr(args, key) for key in keys}
    outcome = finetune(args.scans, args.weights, args.out, **options)
    _print_table(outcome.rows)
    if outcome.written:
        print(f"{args.out}: written")
        return 0
    _say(
        f"error: {args.out}: not written, the score on held-out scans got worse; try more scans, "
        "fewer --steps or a lower --rate (--force writes it all the same)"
    )
    return 1


def _add_info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", metavar="WEIGHTS", help="a shipped name or a file")


def info(args: argparse.Namespace) -> None:
    from apusmog_core.weights import find, read

    stored = read(args.weights)
    print(f"file: {find(args.weights)}")
    for title in ("card", "model"):
        for name, value in stored.get(title, {}).items():
            print(f"{title}.{name}: {value}")


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", metavar="WEIGHTS", help="a shipped name or a file")
    parser.add_argument("--onnx", type=Path, required=True, metavar="OUT", help="the ONNX file")


def export(args: argparse.Namespace) -> None:
    from apusmog_core.export import export_onnx

    export_onnx(args.weights, args.onnx)
    print(f"{args.onnx}: written")


# --- evaluate ------------------------------------------------------------------------------------


def _add_evaluate(commands) -> None:
    help = "score a network beside the baselines"
    parser = commands.add_parser("evaluate", help=help, description=help)
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
    _add_network(parser, weights)
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
        "--ratio", type=_ratio, nargs="+", default=[4.0], metavar="R", help="ratios (4)"
    )
    parser.add_argument(
        "--noise",
        type=float,
        nargs="+",
        default=[0.0],
        metavar="D",
        help="deviations of noise added to the input, in radii of the shape (0)",
    )
    parser.add_argument(
        "--size",
        type=_count,
        nargs="+",
        default=[2048],
        metavar="N",
        help="points of the input (2048)",
    )
    _add_scored(parser, "default")


def evaluate_shapes(args: argparse.Namespace) -> None:
    from apusmog_core import evaluate
    from apusmog_core.data.pugan import load_shapes

    _check_results(args.out)
    methods = dict(evaluate.SHAPE_BASELINES)
    if not args.baselines:
        up = _load(args)
        methods["model"] = lambda points, ratio: up.upsample(points, ratio)
    rows = []
    for size in args.size:
        shapes = load_shapes(args.folder, size)
        for ratio in args.ratio:
            for noise in args.noise:
                scored = evaluate.evaluate_shapes(
                    _progress(shapes), methods, ratio, noise, args.seed
                )
                rows += scored
                _print_table(scored)
    _write_results(args.out, rows)


def _add_rings(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=evaluate_rings)
    parser.add_argument(
        "scans",
        type=Path,
        metavar="SCANS",
        nargs="?",
        help="a KITTI drive, a bag or a folder of scans with rings",
    )
    parser.add_argument(
        "--holdout",
        type=Path,
        metavar="DIR",
        help="fixed clusters of these scans (FRAME.npz), instead of finding them",
    )
    parser.add_argument(
        "--simulate",
        type=_count,
        metavar="FRAMES",
        help="simulated scans instead, where the true surface is known",
    )
    parser.add_argument(
        "--meshes",
        type=Path,
        metavar="DIR",
        help="road meshes for --simulate, beside the built-in ones",
    )
    parser.add_argument(
        "--frames",
        type=_count,
        default=20,
        metavar="N",
        help="most scans to use, spread evenly (%(default)s)",
    )
    parser.add_argument(
        "--points",
        type=_count,
        nargs=2,
        metavar=("LEAST", "MOST"),
        help="measured points of an object that is scored (64 and more); not with --holdout",
    )
    _add_scored(parser, "fast")


def evaluate_rings(args: argparse.Namespace) -> None:
    from apusmog_core import evaluate

    _check_results(args.out)
    if (args.scans is None) == (args.simulate is None):
        raise ValueError("evaluate rings: give SCANS, or --simulate FRAMES")
    up = None if args.baselines else _load(args)
    points = args.points or evaluate.SCORED_POINTS
    if args.simulate:
        cases = evaluate.simulated_cases(
            args.simulate, args.seed, meshes=args.meshes, points=points
        )
    elif args.holdout:
        cases = evaluate.ring_cases(args.scans, args.holdout)
    else:
        cases = evaluate.found_cases(args.scans, args.frames, points)
    rows = evaluate.evaluate_rings(cases, up)
    _print_table(rows)
    _write_results(args.out, rows)


def _add_ablation(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=evaluate_ablation)
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="settings of the full model's run (.yaml)"
    )
    parser.add_argument(
        "--patches", type=_count, required=True, metavar="N", help="patches each row is trained on"
    )
    parser.add_argument(
        "--shapes",
        type=Path,
        required=True,
        metavar="DIR",
        help="test set to score on, as for pugan",
    )
    _add_out(parser)


def evaluate_ablation(args: argparse.Namespace) -> None:
    from apusmog_core import evaluate
    from apusmog_core.config import TrainConfig, load_yaml
    from apusmog_core.data.pugan import load_shapes

    _check_results(args.out)
    config = load_yaml(TrainConfig, args.config)
    rows = evaluate.evaluate_ablation(config, args.patches, load_shapes(args.shapes))
    _print_table(rows)
    _write_results(args.out, rows)


def _progress(items):
    from tqdm import tqdm

    return tqdm(items, unit="shape", leave=False, disable=None)


def _print_table(rows) -> None:
    from apusmog_core.evaluate import format_table

    print(format_table(rows), flush=True)


def _check_results(paths: list[Path]) -> None:
    """Before hours of work, not after."""
    for path in paths:
        if path.suffix not in (".csv", ".json"):
            raise ValueError(f"{path}: results are written as .csv or .json")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: no such folder to write to")


def _write_results(paths: list[Path], rows) -> None:
    from apusmog_core.evaluate import write_rows

    for path in paths:
        write_rows(path, rows)


# --- simulate, bag, view, demo, figures, bench ---------------------------------------------------


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", type=Path, metavar="OUT", help="the folder to write")
    parser.add_argument(
        "--frames", type=_count, default=20, help="scans, ten a second (%(default)s)"
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
    parser.add_argument("--seed", type=int, default=0, help="seed of the street (%(default)s)")


def simulate(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    from apusmog_core.simulate import Sensor, drive, write_kitti

    scans = drive(args.frames, args.seed, Sensor.named(args.sensor), args.meshes)
    count = write_kitti(tqdm(scans, total=args.frames, unit="scan", disable=None), args.output)
    print(f"{args.output}: {count} scans")


def _add_bag(parser: argparse.ArgumentParser) -> None:
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
    from apusmog_ros.bag import convert

    print(f"{args.output}: {convert(args.kitti, args.output, args.format)} scans")


def _add_view(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="clouds, bags or folders"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("view.html"), help="the page (%(default)s)"
    )
    parser.add_argument(
        "--ratio",
        type=_ratio,
        nargs="+",
        default=[],
        metavar="R",
        help="also show the objects upsampled by these ratios",
    )


def view(args: argparse.Namespace) -> None:
    from apusmog_core.view import view

    print(view(args.files, args.out, args.ratio))


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bag", type=Path, help="a bag or folder of scans; simulated otherwise")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder (%(default)s)")


def demo(args: argparse.Namespace) -> int:
    from apusmog_core.demo import demo

    return demo(args.bag, args.out)


def _add_figures(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", type=Path, metavar="OUT", help="the folder to write")
    parser.add_argument(
        "--surface-weights",
        default="default",
        metavar="W",
        help="a shipped name or a file, for clouds seen from nowhere (%(default)s)",
    )
    parser.add_argument(
        "--mesh", type=Path, metavar="FILE", help="shape of the ratios, instead of a knot"
    )
    _add_network(parser, "fast")


def figures(args: argparse.Namespace) -> None:
    from apusmog_core.figures import figures

    options = (args.weights, args.surface_weights, args.mesh, args.device, args.seed)
    for path in figures(args.output, *options):
        print(path)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="sections to measure (all)")
    parser.add_argument("--compare", nargs=2, metavar=("OLD", "NEW"), help="two saved runs")


def bench(args: argparse.Namespace) -> int:
    from apusmog_core.bench import SECTIONS, bench, compare

    if args.compare:
        print(compare(*args.compare))
        return 0
    unknown = set(args.only or ()) - set(SECTIONS)
    if unknown:
        raise ValueError(f"unknown section {', '.join(unknown)}; known: {', '.join(SECTIONS)}")
    return bench(args.only)
