# SPDX-License-Identifier: Apache-2.0
"""LZF, the compression of PCD files."""

from __future__ import annotations

import numpy as np

from ..compute import machine_code

MOST_EXPANSION = 88  # three bytes stand for at most 264


def decompress(data: bytes, size: int) -> np.ndarray:
    """The `size` bytes (uint8) that were compressed; ValueError if they are others."""
    out = np.empty(size, np.uint8)
    if _decompress(np.frombuffer(data, np.uint8), out) != size:
        raise ValueError("the compressed points are damaged")
    return out


@machine_code
def _decompress(data, out):
    """Number of bytes written, or -1 where a step would leave one of the arrays."""
    read, written = 0, 0
    while read < len(data):
        control = np.int64(data[read])
        read += 1
        if control < 32:  # so many bytes as they are, and one
            length = control + 1
            if read + length > len(data) or written + length > len(out):
                return -1
            out[written : written + length] = data[read : read + length]
            read += length
        else:  # a run that was there before
            length = (control >> 5) + 2
            if length == 9:
                if read >= len(data):
                    return -1
                length += np.int64(data[read])
                read += 1
            if read >= len(data):
                return -1
            start = written - ((control & 31) << 8) - np.int64(data[read]) - 1
            read += 1
            if start < 0 or written + length > len(out):
                return -1
            for i in range(length):  # byte by byte: the run may overlap what it makes
                out[written + i] = out[start + i]
        written += length
    return written
