# SPDX-License-Identifier: Apache-2.0
"""Files and folders that are written whole or not at all; what writes clouds is in `data/`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """Where to write a file or folder that becomes `path` when the block ends.

    Until then `path` is what it was; if the block fails, by any exception, nothing is left behind.
    The place has the same name, in a folder beside: suffixes choose formats, and bags name their
    files after their folder.
    """
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        yield path  # a device or pipe: a new file must not take its place
        return
    path = path.resolve()  # a link stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=".partial-", dir=path.parent))
    try:
        yield beside / path.name
        if path.is_file():
            shutil.copymode(path, beside / path.name)
        os.replace(beside / path.name, path)
    except OSError as error:
        if error.errno:  # a full disk names no file, or the one beside
            error.filename = str(path)
        raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def check_new_folder(path: str | Path) -> None:
    """ValueError unless `path` is free to become a folder: no file, nothing in it."""
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path}: exists already; name a new folder")


def check_output(path: str | Path, *inputs: str | Path) -> None:
    """ValueError if `path` is a folder, or one of the files that are read."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path}: a folder; name a file to write")
    for source in map(Path, inputs):
        if path.exists() and source.exists() and path.samefile(source):
            raise ValueError(f"{path}: the output must not be the input {source}")
