# SPDX-License-Identifier: Apache-2.0
"""`apusmog bench`: how fast the networks are on this machine, as a table and as JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .arguments import tell
from .progress import waiting

WEIGHTS = ("lidar", "shape")
RATIOS = (2.0, 4.0, 8.0)


def add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument(
        "--json", type=Path, metavar="OUT", help="a file for the figures, to compare or to send"
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        default=WEIGHTS,
        metavar="W",
        help=f"shipped names or files ({' '.join(WEIGHTS)})",
    )


def bench(args: argparse.Namespace) -> None:
    from apusmog_core.files import check_output, written_whole

    if args.json:
        check_output(args.json)
    with waiting("loading PyTorch"):
        from apusmog_core.compute import PRECISIONS, parse_device
        from apusmog_core.pace import machine, measure
        from apusmog_core.upsampler import Upsampler
        from apusmog_core.weights import load_network

    device = parse_device(args.device)
    runs = [("cpu", "float32", True), ("cpu", "float32", False)]
    if device.type == "cuda":
        runs += [(str(device), precision, True) for precision in PRECISIONS]
    rows = []
    for name in args.weights:
        for place, precision, compiled in runs:
            up = Upsampler(load_network(name), place, precision=precision, compiled=compiled)
            if not compiled and up.config.domain != "sensor":
                continue  # without a viewpoint there is no machine code
            with waiting(f"{name} on {place} in {precision}"):
                rows += [{"weights": name, **measure(up, ratio)} for ratio in RATIOS]
    found = {"machine": machine(device), "rows": rows}
    tell(", ".join(f"{key} {value}" for key, value in found["machine"].items()))
    for row in rows:
        what = f"{row['weights']:8}{row['device']:8}{row['precision']:10}{row['way']:18}"
        tell(f"{what}ratio {row['ratio']:<4g}{row.get('error') or _speed(row)}")
    if args.json:
        with written_whole(args.json) as place:
            place.write_text(json.dumps(found, indent=1) + "\n")
        tell(f"{args.json}: written")


def _speed(row: dict) -> str:
    return f"{row['ms']:9.1f} ms{row['new_points_per_second']:>12,} new points/s"
