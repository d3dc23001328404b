# SPDX-License-Identifier: Apache-2.0
"""Disjoint sets as an array of parents: what joins is one component."""

from __future__ import annotations

import numpy as np

from ..compute import machine_code


@machine_code
def find_root(parent, i):
    """The representative of i's set; the way to it becomes shorter."""
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i


@machine_code
def number_sets(parent):
    """Number (n,) of each member's set, as they appear."""
    component, number, count = np.empty_like(parent), np.full(len(parent), -1), 0
    for i in range(len(parent)):
        root = find_root(parent, i)
        if number[root] < 0:
            number[root], count = count, count + 1
        component[i] = number[root]
    return component
