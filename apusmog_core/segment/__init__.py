# SPDX-License-Identifier: Apache-2.0
"""From one scan to its objects: ground away, then clusters."""

from __future__ import annotations

import numpy as np

from ..config import ClusterConfig, GroundConfig
from .cluster import find_instances, ranges, rows_by_label
from .ground import Ground, level

__all__ = ["Segmenter", "Ground", "level", "find_instances", "ranges", "rows_by_label"]


class Segmenter:
    """Ground and instances of one stream of scans; Patchwork++ learns the terrain as it goes."""

    def __init__(self, ground: GroundConfig | None = None, clusters: ClusterConfig | None = None):
        self.ground = Ground(ground or GroundConfig())
        self.clusters = clusters or ClusterConfig()

    def __call__(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which points (n, 3) are ground (n,) bool, and instances (n,) int32: 1.., 0 for none."""
        upright = level(points, self.ground.config)
        ground = self.ground(upright)
        labels, rest = np.zeros(len(points), np.int32), np.flatnonzero(~ground)
        labels[rest] = find_instances(upright[rest], self.clusters)
        return ground, labels
