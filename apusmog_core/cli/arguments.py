# SPDX-License-Identifier: Apache-2.0
"""What several commands share: kinds of arguments, how to load a network, how to speak."""

from __future__ import annotations

import argparse
import math
import sys
from contextlib import suppress

from ..text import printable
from .progress import waiting

LONGEST_ERROR = 1000  # characters
CLOUDS = ".xyz .ply .pcd .bin .npy .npz"
LIBRARIES = "libusb-1.0-0 libgl1 libegl1 libx11-6 libgomp1"  # of the system, for Open3D
EXTRAS = {  # module: the extra of setup.py that installs it
    "open3d": "lidar",
    "pypatchworkpp": "lidar",
    "matplotlib": "lidar",
    "h5py": "train",
    "tensorboard": "train",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "rclpy": "ros",
}


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


def stride(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"{text}: no ring is held out; give 2 or more")
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


def add_denoise(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-denoise",
        dest="denoise",
        action="store_false",
        help="leave the noise of clouds without viewpoint as it is",
    )


def load(args: argparse.Namespace):
    with waiting("loading PyTorch and the network"):
        from apusmog_core.upsampler import Upsampler

        options = {"denoise": args.denoise} if "denoise" in args else {}
        return Upsampler.load(args.weights, device=args.device, seed=args.seed, **options)


def add_settings(parser: argparse.ArgumentParser, example: str) -> None:
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help=f"settings that differ from the defaults, such as {example}",
    )


def list_settings() -> str:
    """The pipeline's settings, for help."""
    from apusmog_core.config import PipelineConfig
    from apusmog_core.settings import settings

    known = list(settings(PipelineConfig))
    width = max(len(item.name) for item in known)
    lines = [f"  {item.name:{width}}  {item.help} ({item.default})" for item in known]
    return "settings for --set:\n" + "\n".join(lines)


def parse_setting(text: str) -> tuple[str, object]:
    """'NAME=VALUE' with the value as YAML reads it."""
    from apusmog_core.settings import parse_yaml

    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set: {text!r} is not NAME=VALUE")
    value = parse_yaml(value)
    if isinstance(value, str):  # YAML takes 5e-4 for text
        with suppress(ValueError):
            return name, float(value)
    return name, value


def load_pipeline(args: argparse.Namespace, **chosen):
    """A pipeline with the settings of the command line, ready to run; None chooses nothing."""
    from apusmog_core.config import PipelineConfig
    from apusmog_core.settings import with_values

    chosen = {name: value for name, value in chosen.items() if value is not None}
    given = dict(map(parse_setting, args.set))
    for name in chosen.keys() & given.keys():
        raise ValueError(f"--{name} and --set {name}={given[name]}: give one of them")
    config = with_values(PipelineConfig(), chosen | given)
    with waiting("loading the network; the first time it is compiled, for about a minute"):
        from apusmog_core.pipeline import ScanPipeline

        pipeline = ScanPipeline(config)
        pipeline.warm_up()
    return pipeline


def plural(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'s' if count != 1 else ''}"


def say(text: str) -> None:
    print(f"apusmog: {printable(text)}", file=sys.stderr)


def tell(text: str) -> None:
    """Print a result; what came from a file cannot steer the terminal."""
    print(printable(text))


def missing_package(error: ImportError | OSError) -> str:
    """Which extra to install for a module that is not there."""
    module = (getattr(error, "name", "") or "").split(".")[0]
    if isinstance(error, ModuleNotFoundError) and module in EXTRAS:
        extra = EXTRAS[module]
        return (
            f"this needs {module}, which the extra '{extra}' installs: pip install '.[{extra}]' "
            "in the folder of the repository"
        )
    if "cannot open shared object" in str(error):
        return f"{one_line(error)}; on Debian or Ubuntu: sudo apt-get install {LIBRARIES}"
    return one_line(error)


def one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST_ERROR else text[:LONGEST_ERROR] + "..."
