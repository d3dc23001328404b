# SPDX-License-Identifier: Apache-2.0
"""From one scan to its objects: ground away, then instances of what stands on it."""

from .cluster import find_instances, ranges, rows_by_label
from .ground import Ground
from .mounting import Mounting
from .place import HERE, about_sensor, from_sensor
from .segmenter import Found, Segmenter, timed

__all__ = [
    "HERE",
    "Found",
    "Ground",
    "Mounting",
    "Segmenter",
    "about_sensor",
    "find_instances",
    "from_sensor",
    "ranges",
    "rows_by_label",
    "timed",
]
