# SPDX-License-Identifier: Apache-2.0
"""Compressed bags expand to a bounded size, in memory and on disk; rosbags has no bound."""

from __future__ import annotations

import bz2
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import BinaryIO

MOST_EXPANSION = 100  # times the compressed size; scans shrink to a half or a tenth
ALWAYS_FINE = 1 << 20  # bytes


def bounded(decompressor: Callable) -> Callable[[bytes], bytes]:
    """A function that decompresses, and raises ValueError before too much memory is taken."""

    def decompress(data: bytes) -> bytes:
        most = _most(len(data))
        stream = decompressor()
        out = stream.decompress(bytes(data), max_length=most)
        if not stream.eof:
            raise ValueError(f"a chunk of {len(data)} bytes is damaged, or expands beyond {most}")
        return out

    return decompress


def bounded_open(opened: Callable) -> Callable:
    """A function that opens a compressed file to read; reading raises ValueError at the bound."""

    @contextmanager
    def open_to_read(file: BinaryIO, mode: str) -> Iterator[SimpleNamespace]:
        size = os.fstat(file.fileno()).st_size
        left = most = _most(size)

        def read(count: int) -> bytes:
            nonlocal left
            data = stream.read(count)
            left -= len(data)
            if left < 0:
                raise ValueError(f"a file of {size} bytes expands beyond {most}")
            return data

        with opened(file, mode) as stream:
            yield SimpleNamespace(read=read)

    return open_to_read


def _most(size: int) -> int:
    return max(MOST_EXPANSION * size, ALWAYS_FINE)


@cache
def bound_rosbags() -> None:
    """Replace the decompressors that rosbags uses, for this process."""
    from lz4.frame import LZ4FrameDecompressor
    from rosbags.rosbag1 import reader as rosbag1
    from rosbags.rosbag2 import reader as rosbag2
    from rosbags.rosbag2 import storage_mcap as mcap

    lz4 = bounded(LZ4FrameDecompressor)
    mcap.lz4_decompress = lz4
    for name, decompress in (("bz2", bounded(bz2.BZ2Decompressor)), ("lz4", lz4)):
        rosbag1.decompressors[name] = decompress
    for module in (mcap, rosbag2):
        zstd = module.zstd
        known = {name: getattr(zstd, name) for name in dir(zstd) if not name.startswith("_")}
        safe = dict(decompress=bounded(zstd.ZstdDecompressor), open=bounded_open(zstd.open))
        module.zstd = SimpleNamespace(**{**known, **safe})
