# SPDX-License-Identifier: Apache-2.0
"""`apusmog completion`: completes commands, options and files in a shell."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "tcsh")


def add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help='bash: eval "$(apusmog completion bash)"')


def completion(args: argparse.Namespace) -> None:
    import shtab

    from . import build_parser

    parser = build_parser()
    _complete_files(parser, shtab.FILE)
    print(shtab.complete(parser, args.shell))


def _complete_files(parser: argparse.ArgumentParser, files: dict) -> None:
    """Every argument that is a path is completed by files."""
    from pathlib import Path

    for action in parser._actions:
        if action.type is Path or action.dest == "weights":
            action.complete = files
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command, files)
