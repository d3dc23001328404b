# SPDX-License-Identifier: Apache-2.0
"""The `apusmog` command. Each subcommand imports what it needs when it runs, so help is instant."""

from __future__ import annotations

import argparse
import errno
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from .. import __version__
from . import bench, calibrate, clouds, completion, networks, scan, scores
from .arguments import missing_package, one_line, say

COMMANDS = {  # name: its arguments, what it does, help
    "upsample": (
        clouds.add_upsample,
        clouds.upsample,
        "upsample a cloud, or a folder of clouds",
    ),
    "scan": (scan.add_scan, scan.scan, "make the objects of LiDAR scans dense, as the node does"),
    "calibrate": (
        calibrate.add_calibrate,
        calibrate.calibrate,
        "estimate the range bias of each laser from scans, without labels",
    ),
    "mesh": (clouds.add_mesh, clouds.mesh, "upsample a cloud and reconstruct its surface"),
    "train": (networks.add_train, networks.train, "train a network"),
    "train-denoiser": (
        networks.add_train_denoiser,
        networks.train_denoiser,
        "train the denoiser of clouds without viewpoint",
    ),
    "finetune": (
        networks.add_finetune,
        networks.finetune,
        "continue training on your own unlabelled scans",
    ),
    "bench": (bench.add_bench, bench.bench, "measure how fast the networks are on this machine"),
    "evaluate": (scores.add_evaluate, None, "score a network beside the baselines"),
    "info": (networks.add_info, networks.info, "say what is in a weights file"),
    "simulate": (
        clouds.add_simulate,
        clouds.simulate,
        "write simulated LiDAR scans as a KITTI drive",
    ),
    "bag": (clouds.add_bag, clouds.bag, "convert a KITTI drive to a rosbag2"),
    "warm-up": (
        networks.add_warm_up,
        networks.warm_up,
        "compile now what the first scan or cloud would wait for",
    ),
    "export": (networks.add_export, networks.export, "export a network to ONNX"),
    "samples": (clouds.add_samples, clouds.samples, "write small clouds to try everything on"),
    "view": (clouds.add_view, clouds.view, "make a 3-D page of clouds, bags or folders"),
    "completion": (
        completion.add_completion,
        completion.completion,
        "print a script that completes commands in your shell",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 (failed, or a part of the input was skipped),
    2 (bad usage or input), 130 (Ctrl-C) or 143 (terminated)."""
    args = build_parser().parse_args(argv)
    skipped = []

    def show(message, *_, **__) -> None:
        say(f"warning: {message}")
        skipped.extend([message] if str(message).startswith("skipped ") else [])

    try:
        with warnings.catch_warnings(), _termination_raises():
            warnings.showwarning = show
            return args.run(args) or (1 if skipped else 0)
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except Terminated:
        say("terminated")
        return 143
    except BrokenPipeError:  # the reader of our output has gone, as in `apusmog ... | head`
        sys.stdout = None
        return 1
    except (ValueError, FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        say(f"error: {one_line(error)}")
        return 2
    except (OSError, ImportError) as error:
        say(f"error: {missing_package(error)}")
        return 2 if getattr(error, "errno", None) == errno.ENAMETOOLONG else 1
    except MemoryError:
        say("error: not enough memory")
        return 1


class Terminated(SystemExit):
    """SIGTERM, as an exception: what is half written is removed on the way out."""


@contextmanager
def _termination_raises() -> Iterator[None]:
    def stop(*_):
        raise Terminated(143)

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: whoever called has its own way
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, like every other error; `details` end the help."""

    details: Callable[[], str] | None = None  # only called for help, since it may load libraries

    def format_help(self) -> str:
        if self.details:
            self.epilog = self.details()
        return super().format_help()

    def error(self, message: str):
        say(f"error: {message} (see '{self.prog} --help')")
        raise SystemExit(2)


def build_parser() -> argparse.ArgumentParser:
    """All commands and their arguments; `args.run(args)` runs the one chosen."""
    parser = _Parser(
        prog="apusmog",
        description="Make sparse point clouds dense, by any real ratio, with APU-SMOG.",
        epilog="'apusmog COMMAND --help' explains a command; 'apusmog samples OUT' writes clouds "
        "to try them on.",
    )
    parser.add_argument("--version", action="version", version=f"apusmog {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (add_arguments, run, help) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=help,
            description=help,
            formatter_class=argparse.RawDescriptionHelpFormatter,  # lists stay lists
        )
        command.set_defaults(run=run)
        add_arguments(command)
    return parser
