# SPDX-License-Identifier: Apache-2.0
"""What an upsampler gives: points, where they come from, and how sure it is of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np


@dataclass(frozen=True, eq=False)
class Dense:
    """The points of one cloud, or of several one after the other."""

    points: np.ndarray  # (m, 3)
    confidence: np.ndarray  # (m,) float32, that it lies on the object; 1 for measured points
    source: np.ndarray  # (m,) int64, row of the input that it is, or is near to
    generated: np.ndarray  # (m,) bool
    filler: np.ndarray  # (m,) bool, between points of a ring, only to make the count exact

    @classmethod
    def measured(cls, points: np.ndarray, rows: np.ndarray) -> Dense:
        """Rows (m,) of the input's points (n, 3)."""
        ones, no = np.ones(len(rows), np.float32), np.zeros((2, len(rows)), bool)
        return cls(points.take(rows, axis=0), ones, rows, *no)

    @classmethod
    def new(
        cls,
        points: np.ndarray,
        confidence: np.ndarray,
        source: np.ndarray,
        filler: np.ndarray | None = None,
    ) -> Dense:
        """Points (m, 3) that were not measured."""
        yes = np.ones(len(points), bool)
        return cls(points, confidence, source, yes, ~yes if filler is None else filler)

    @classmethod
    def concatenate(cls, parts: Sequence[Dense]) -> Dense:
        """All of at least one part."""
        if len(parts) == 1:
            return parts[0]
        names = (field.name for field in fields(cls))
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def take(self, rows: np.ndarray) -> Dense:
        """Some of the points, or all in another order."""
        return Dense(*(getattr(self, field.name).take(rows, axis=0) for field in fields(self)))

    def moved(self, points: np.ndarray, measured: np.ndarray) -> Dense:
        """New points at other places (m, 3), and the `measured` ones (n, 3) bit by bit."""
        kept = measured.take(self.source, axis=0)
        return replace(self, points=np.where(self.generated[:, None], points, kept))

    def by_object(self, instance: np.ndarray) -> Dense:
        """One object after the other, by the instances (n,) of the input's points."""
        return self.take(np.argsort(instance[self.source], kind="stable"))

    def split(self, counts: Sequence[int]) -> list[Dense]:
        """Runs of counts[i] points."""
        edges = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        runs = [slice(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]
        return [Dense(*(getattr(self, field.name)[run] for field in fields(self))) for run in runs]


def check_ratio(ratio: float) -> float:
    """The ratio, or a ValueError where it is not a number above zero."""
    try:
        if np.isfinite(ratio) and ratio > 0:
            return float(ratio)
    except TypeError:  # not a number at all
        pass
    raise ValueError(f"ratio: {ratio!r} is not a number above zero")
