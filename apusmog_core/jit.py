# SPDX-License-Identifier: Apache-2.0
"""Loops over points as machine code, compiled when first called and kept for the next start."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from numba import config, njit

SUMS_IN_ANY_ORDER = {"reassoc", "contract", "nsz", "arcp"}  # nan and infinity stay what they are


def machine_code(function: Callable) -> Callable:
    """Compiles a function of arrays; other threads run meanwhile."""
    options = dict(nogil=True, fastmath=SUMS_IN_ANY_ORDER, error_model="numpy")
    before, config.CACHE_DIR = config.CACHE_DIR, FOLDER
    try:
        return njit(**options, cache=True)(function)
    except RuntimeError:  # no folder to keep it in: compiled again at each start
        return njit(**options)(function)
    finally:
        config.CACHE_DIR = before


def _folder() -> str:
    """Where machine code is kept, for exactly these sources: numba itself would not notice that a
    function in another file, which is compiled into this one, has changed."""
    sources = (path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py")))
    digest = hashlib.sha256(b"".join(s for s in sources if b"@machine_code" in s)).hexdigest()
    base = config.CACHE_DIR or os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return str(Path(base) / "apusmog" / digest[:16])


FOLDER = _folder()
