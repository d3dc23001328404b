# SPDX-License-Identifier: Apache-2.0
"""Commands that show and measure: demo, figures, bench."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import add_network


def add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bag", type=Path, help="a bag or folder of scans; simulated otherwise")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder (%(default)s)")


def demo(args: argparse.Namespace) -> int:
    from apusmog_core.demo import demo

    return demo(args.bag, args.out)


def add_figures(parser: argparse.ArgumentParser) -> None:
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
    add_network(parser, "fast")


def figures(args: argparse.Namespace) -> None:
    from apusmog_core.figures import figures

    options = (args.weights, args.surface_weights, args.mesh, args.device, args.seed)
    for path in figures(args.output, *options):
        print(path)


def add_bench(parser: argparse.ArgumentParser) -> None:
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
