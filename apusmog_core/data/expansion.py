# SPDX-License-Identifier: Apache-2.0
"""Compressed chunks of bags expand to a bounded size; rosbags itself expands without end."""

from __future__ import annotations

import bz2
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

MOST_EXPANSION = 100  # times the compressed size; scans shrink to a half or a tenth
ALWAYS_FINE = 1 << 20  # bytes


def bounded(decompressor: Callable) -> Callable[[bytes], bytes]:
    """A function that decompresses, and raises ValueError before too much memory is taken."""

    def decompress(data: bytes) -> bytes:
        most = max(MOST_EXPANSION * len(data), ALWAYS_FINE)
        stream = decompressor()
        out = stream.decompress(bytes(data), max_length=most)
        if not stream.eof:
            raise ValueError(f"a chunk of {len(data)} bytes is damaged, or expands beyond {most}")
        return out

    return decompress


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
        safe = bounded(zstd.ZstdDecompressor)
        module.zstd = SimpleNamespace(**{**known, "decompress": safe})
