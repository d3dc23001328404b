# SPDX-License-Identifier: Apache-2.0
"""What several commands share: kinds of arguments, how to load a network, how to speak."""

from __future__ import annotations

import argparse
import math
import sys

LONGEST_ERROR = 500  # characters
CLOUDS = ".xyz .ply .pcd .bin .npy"


def ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a ratio above 0")
    return value


def number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


def seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**31:
        raise argparse.ArgumentTypeError(f"{text} is not a seed from 0 to {2**31 - 1}")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to below 1")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a count of 1 or more")
    return value


def add_network(parser: argparse.ArgumentParser, weights: str = "shape") -> None:
    parser.add_argument(
        "--weights", default=weights, metavar="W", help="a shipped name or a file (%(default)s)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument("--seed", type=seed, default=0, help="seed of the samples (%(default)s)")


def add_origin(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--origin",
        type=number,
        nargs=3,
        metavar=("X", "Y", "Z"),
        help="where the sensor stands, for clouds seen by one (a LiDAR scan: 0 0 0)",
    )


def load(args: argparse.Namespace):
    from apusmog_core.upsampler import Upsampler

    return Upsampler.load(args.weights, device=args.device, seed=args.seed)


def say(text: str) -> None:
    print(f"apusmog: {printable(text)}", file=sys.stderr)


def tell(text: str) -> None:
    """Print a result; what came from a file cannot steer the terminal."""
    print(printable(text))


def printable(text: str) -> str:
    """The text with control characters, and what no terminal can show, as escapes."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST_ERROR else text[:LONGEST_ERROR] + "..."
