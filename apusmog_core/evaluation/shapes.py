# SPDX-License-Identifier: Apache-2.0
"""Scores on shapes: the PU-GAN and PU1K test sets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from . import baselines, metrics
from .tables import Row, means

if TYPE_CHECKING:
    from ..data.pugan import Shape


# --- shapes --------------------------------------------------------------------------------------

ShapeMethod = Callable[[np.ndarray, float], np.ndarray]  # points (n, 3), ratio -> (m, 3)

SHAPE_BASELINES: dict[str, ShapeMethod] = {
    "nothing": lambda points, ratio: baselines.nothing(points),
    "midpoint": lambda points, ratio: baselines.midpoint(points, round(ratio * len(points))),
}


def evaluate_shapes(
    shapes: Iterable[Shape],
    methods: dict[str, ShapeMethod],
    ratio: float = 4.0,
    noise: float = 0.0,
    seed: int = 0,
) -> list[Row]:
    """One row for each shape and method, then the means: scores as in `metrics.shape_scores`.

    `noise` is the standard deviation added to the input, in radii of the shape. Shapes without
    ground truth at this ratio (not published and no mesh to sample) are left out.
    """
    rows = []
    for shape in shapes:
        truth = shape.truth(round(ratio * len(shape.points)))
        if truth is None:
            continue
        surface = metrics.mesh_surface(shape.mesh) if shape.mesh else None
        points = add_noise(shape.points, noise, seed)
        setting = {"shape": shape.name, "size": len(points), "ratio": ratio, "noise": noise}
        for name, method in methods.items():
            start = time.perf_counter()
            dense = method(points, ratio)
            seconds = time.perf_counter() - start
            scores = metrics.shape_scores(dense, truth, surface)
            rows.append({"method": name, **setting, **scores, "seconds": seconds})
    return rows + [_mean_shape(rows, name) for name in methods if rows]


def add_noise(points: np.ndarray, noise: float, seed: int = 0) -> np.ndarray:
    """Gaussian noise, its deviation given in units of the cloud's radius."""
    if noise == 0:
        return points
    radius = np.linalg.norm(points - points.mean(axis=0), axis=1).max()
    jitter = np.random.default_rng(seed).normal(0, noise * radius, points.shape)
    return (points + jitter).astype(points.dtype)


def _mean_shape(rows: list[Row], method: str) -> Row:
    mine = [row for row in rows if row["method"] == method]
    scores = [{k: v for k, v in row.items() if k not in SHAPE_SETTING} for row in mine]
    setting = {k: mine[0][k] for k in SHAPE_SETTING}
    return {**setting, "shape": f"mean of {len(mine)}", **means(scores)}


SHAPE_SETTING = ("method", "shape", "size", "ratio", "noise")
