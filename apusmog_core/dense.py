# SPDX-License-Identifier: Apache-2.0
"""What an upsampler gives for one cloud."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Dense:
    """Points, and how sure the network is that each lies on the object."""

    points: np.ndarray  # (m, 3)
    confidence: np.ndarray  # (m,) float32, 1 for measured points

    @classmethod
    def measured(cls, points: np.ndarray) -> Dense:
        return cls(points, np.ones(len(points), np.float32))

    @classmethod
    def concatenate(cls, parts: Sequence[Dense]) -> Dense:
        if not parts:
            return cls.measured(np.zeros((0, 3), np.float32))
        return cls(
            np.concatenate([part.points for part in parts]),
            np.concatenate([part.confidence for part in parts]),
        )
