# SPDX-License-Identifier: Apache-2.0
"""What is shown while one waits: bars for many things, one line for a single long one."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

PATIENCE = 2.0  # seconds that need no explanation


def progress(items: Iterable, unit: str, total: int | None = None):
    """The items, with a bar on a terminal once it has taken two seconds."""
    from tqdm import tqdm

    return tqdm(items, unit=unit, total=total, delay=PATIENCE, leave=False, disable=None)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Say what takes so long once it has taken two seconds; on a terminal, count them."""
    done = threading.Event()

    def count() -> None:
        started, on_terminal = time.monotonic(), sys.stderr.isatty()
        pause = PATIENCE
        while not done.wait(pause):
            passed = f" {time.monotonic() - started:.0f} s" if on_terminal else ""
            ends = "\r" if on_terminal else "\n"
            print(f"apusmog: {text} ...{passed}", end=ends, file=sys.stderr, flush=True)
            pause = 1.0 if on_terminal else None
        if on_terminal and pause != PATIENCE:
            print("\033[K", end="", file=sys.stderr, flush=True)  # the line has served

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
