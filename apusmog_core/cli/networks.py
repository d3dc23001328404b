# SPDX-License-Identifier: Apache-2.0
"""Commands about weights: train, train-denoiser, finetune, info, export, warm-up."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import add_settings, count, number, parse_setting, say, seed, tell
from .progress import progress, waiting
from .scores import print_table


def add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="settings of the run (.yaml)")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint")
    parser.add_argument(
        "--start", metavar="W", help="weights to start from: a shipped name or a file"
    )
    add_settings(parser, "data.road=FOLDER")


def train(args: argparse.Namespace) -> None:
    from apusmog_core.config import TrainConfig
    from apusmog_core.settings import load_yaml, with_values

    config = load_yaml(TrainConfig, args.config)  # a mistake in it shows before PyTorch loads
    config = with_values(config, dict(map(parse_setting, args.set)))
    from apusmog_core.training.loop import train

    tell(f"{train(config, resume=args.resume, start_from=args.start)}: written")


def add_train_denoiser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("meshes", type=Path, metavar="MESHES", help="a folder of meshes")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="F", help="the weights file to write"
    )
    parser.add_argument("--seed", type=seed, default=0, help="seed of everything (%(default)s)")


def train_denoiser(args: argparse.Namespace) -> None:
    from apusmog_core.surface.denoise import WEIGHTS
    from apusmog_core.training.denoiser import save_denoiser, train_denoiser

    if args.out.is_dir():
        raise ValueError(f"{args.out}: a folder; name a file to write")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_denoiser(train_denoiser(args.meshes, args.seed), args.out)
    tell(f"{args.out}: written; to use it: replace {WEIGHTS}")


def add_finetune(parser: argparse.ArgumentParser) -> None:
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
        "--steps", type=count, default=1500, metavar="N", help="optimiser steps (%(default)s)"
    )
    parser.add_argument("--rate", type=number, default=3e-4, help="learning rate (%(default)g)")
    parser.add_argument(
        "--frames",
        dest="most",
        type=count,
        default=100,
        metavar="N",
        help="most scans to use, spread evenly; the last fifth is held out (%(default)s)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument("--seed", type=seed, default=0, help="seed of everything (%(default)s)")


def finetune(args: argparse.Namespace) -> int:
    from apusmog_core.files import check_output
    from apusmog_core.training.finetune import finetune
    from apusmog_core.weights import find

    check_output(args.out, find(args.weights))
    keys = ("force", "steps", "rate", "most", "device", "seed")
    options = {key: getattr(args, key) for key in keys}
    outcome = finetune(args.scans, args.weights, args.out, **options, progress=progress)
    print_table(outcome.rows)
    if outcome.written:
        tell(f"{args.out}: written")
        return 0
    say(
        f"error: {args.out}: not written, the score on held-out scans got worse; try more scans, "
        "fewer --steps or a lower --rate (--force writes it all the same)"
    )
    return 1


def add_info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", metavar="WEIGHTS", help="a shipped name or a file")


USES = {  # domain of the mixture: what the weights are for
    "sensor": "objects of LiDAR scans, seen from the sensor (the node, apusmog scan)",
    "canonical": "shapes and other clouds without a viewpoint (apusmog upsample)",
}


def info(args: argparse.Namespace) -> None:
    from apusmog_core.config import ModelConfig
    from apusmog_core.settings import flatten, from_dict
    from apusmog_core.weights import find, read

    with waiting("loading PyTorch"):
        path, stored = find(args.weights), read(args.weights)
    model, card = from_dict(ModelConfig, stored["model"]), stored.get("card", {})
    size = sum(value.numel() for value in stored["state"].values())
    lines = {"for": USES[model.domain], "file": path, "parameters": f"{size:,}"}
    lines |= {name.replace("_", " "): value for name, value in card.items() if name not in lines}
    usual = flatten(ModelConfig())
    changed = {name: value for name, value in flatten(model).items() if value != usual[name]}
    lines["network"] = ", ".join(f"{name} {value}" for name, value in changed.items())
    page = path.with_suffix(".md")
    if page.is_file():
        lines["more"] = f"{page}: data, scores and known limits"
    tell(path.stem)
    for name, value in lines.items():
        tell(f"  {name + ':':18}{value}")


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", metavar="WEIGHTS", help="a shipped name or a file")
    parser.add_argument("--onnx", type=Path, required=True, metavar="OUT", help="the ONNX file")


def export(args: argparse.Namespace) -> None:
    from apusmog_core.export import describe_ports, export_onnx

    with waiting("tracing the network"):
        export_onnx(args.weights, args.onnx)
    tell(f"{args.onnx}: written")
    print(describe_ports(args.weights))


def add_warm_up(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", default="lidar", metavar="W", help="a shipped name or a file")


def warm_up(args: argparse.Namespace) -> None:
    """Fill the cache of machine code, as an image or an installation does once."""
    from apusmog_core.compute import CODE_FOLDER, cache_complaint
    from apusmog_core.config import PipelineConfig
    from apusmog_core.pipeline import ScanPipeline

    with waiting("compiling, which takes about a minute the first time"):
        ScanPipeline(PipelineConfig(weights=args.weights, device="cpu")).warm_up()
    if complaint := cache_complaint():
        say(f"warning: {complaint}")
    else:
        print(f"{CODE_FOLDER}: ready")
