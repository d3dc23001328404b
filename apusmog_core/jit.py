# SPDX-License-Identifier: Apache-2.0
"""Loops over points as machine code, compiled when first called and kept for the next start."""

from __future__ import annotations

from collections.abc import Callable

from numba import njit

SUMS_IN_ANY_ORDER = {"reassoc", "contract", "nsz", "arcp"}  # nan and infinity stay what they are


def machine_code(function: Callable) -> Callable:
    """Compiles a function of arrays; other threads run meanwhile."""
    options = dict(nogil=True, fastmath=SUMS_IN_ANY_ORDER, error_model="numpy")
    try:
        return njit(**options, cache=True)(function)
    except RuntimeError:  # no folder to keep it in: compiled again at each start
        return njit(**options)(function)
