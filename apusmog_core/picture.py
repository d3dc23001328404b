# SPDX-License-Identifier: Apache-2.0
"""A before/after picture of a scan, and the cameras that the documentation's pictures share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .files import written_whole
from .view import Dense

# --- the picture ---------------------------------------------------------------------------------


def picture(before: np.ndarray, after: Dense, out: str | Path, closeups: int = 3) -> Path:
    """A PNG: the scan left, the same with dense objects right, and objects close up below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 10), dpi=100, facecolor=NIGHT)
    FigureCanvasAgg(figure)
    measured = ~after.generated.astype(bool)
    halves = (("measured", measured), ("dense", np.ones_like(measured)))
    rows = figure.add_gridspec(2, 1, height_ratios=(1.7, 1), hspace=0.1, **MARGINS)
    scene = rows[0].subgridspec(1, 2, wspace=0.02)
    ahead = _behind_sensor(before)
    for column, (label, shown) in enumerate(halves):
        axes = _panel(figure, scene[column], f"{label}: {shown.sum():,} points on objects")
        _draw(axes, before, None, ahead, size=0.4)
        _draw(axes, after.points[shown], after.instance[shown], ahead, size=0.9)
        aim(axes, low=(-0.62, -0.4), high=(0.62, 0.34))
    chosen = _worth_a_closeup(after, closeups)
    cells = rows[1].subgridspec(1, 2 * max(len(chosen), 1), wspace=0.06)
    for index, instance in enumerate(chosen):
        own = after.instance == instance
        camera = beside(after.points[own])
        flat, _ = camera.project(after.points[own])
        for half, (_, shown) in enumerate(halves):
            shown = shown & own
            axes = _panel(figure, cells[2 * index + half], f"{shown.sum():,} points")
            _draw(axes, after.points[shown], after.instance[shown], camera, size=2.5)
            aim(axes, flat.min(axis=0), flat.max(axis=0))
    with written_whole(out) as place:
        figure.savefig(place, facecolor=NIGHT)
    return Path(out)


NIGHT, INK, GREY = "#0b0f16", "#dfe6ee", (0.36, 0.40, 0.47)
PLUS_MINUS = np.array([-1.0, 1.0])
MARGINS = dict(left=0.01, right=0.99, top=0.955, bottom=0.01)


@dataclass(frozen=True)
class Camera:
    """A pinhole camera with focal length one."""

    eye: np.ndarray  # (3,)
    rotation: np.ndarray  # (3, 3) rows: right, up, back

    def project(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Picture coordinates (n, 2) and depth (n,), negative behind the camera."""
        local = (points - self.eye) @ self.rotation.T
        depth = -local[:, 2]
        return local[:, :2] / np.maximum(depth, 1e-3)[:, None], depth


def look_at(eye: np.ndarray, target: np.ndarray) -> Camera:
    """A camera at `eye`, upright, with `target` in the middle."""
    back = (eye - target) / np.linalg.norm(eye - target)
    right = np.cross((0.0, 0.0, 1.0), back)
    right /= np.linalg.norm(right)
    return Camera(eye, np.stack([right, np.cross(back, right), back]))


def _behind_sensor(scan: np.ndarray) -> Camera:
    """From above and behind the sensor, looking along x."""
    ground = float(np.quantile(scan[:, 2], 0.05))
    return look_at(np.array([-6.0, 0.0, ground + 8.0]), np.array([14.0, 0.0, ground]))


def beside(points: np.ndarray) -> Camera:
    """From the side of an object that the sensor sees, a little higher and turned."""
    middle = (points.min(axis=0) + points.max(axis=0)) / 2
    radius = max(float(np.linalg.norm(points - middle, axis=1).max()), 0.1)
    azimuth = np.arctan2(-middle[1], -middle[0]) + 0.45
    return look_at(middle + 5 * radius * np.array([np.cos(azimuth), np.sin(azimuth), 0.3]), middle)


def _worth_a_closeup(dense: Dense, count: int) -> list[int]:
    """Sparse instances ahead, of a car's or person's size, that gained most."""
    generated = dense.generated.astype(bool)

    def merit(instance: int) -> tuple[bool, int]:
        own = dense.instance == instance
        length, width, height = np.ptp(dense.points[own], axis=0)
        familiar = max(length, width) < 6 and 1.2 < height < 2.6
        sparse = np.count_nonzero(own & ~generated) <= 1000
        x, y, _ = np.median(dense.points[own], axis=0)
        ahead = x > 4 and abs(y) < x
        return bool(familiar and sparse and ahead), np.count_nonzero(own & generated)

    return sorted(np.unique(dense.instance).tolist(), key=merit, reverse=True)[:count]


def _panel(figure, cell, title: str):
    axes = figure.add_subplot(cell, facecolor=NIGHT)
    axes.set_title(title, color=INK, fontsize=13, loc="left")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    return axes


def aim(axes, low, high) -> None:
    """Show the rectangle from low to high, undistorted, whatever the shape of the panel."""
    low, high = np.asarray(low), np.asarray(high)
    box = axes.get_window_extent()
    scale = ((high - low) / (box.width, box.height)).max() * 1.05  # a little air around it
    reach = scale * np.array([box.width, box.height]) / 2
    middle = (low + high) / 2
    axes.set(xlim=middle[0] + reach[0] * PLUS_MINUS, ylim=middle[1] + reach[1] * PLUS_MINUS)


def _draw(axes, points: np.ndarray, instance: np.ndarray | None, camera: Camera, size: float):
    flat, depth = camera.project(points)
    front = np.flatnonzero(depth > 0.5)
    order = front[np.argsort(-depth[front])]  # far first, so that near points cover them
    colours = GREY if instance is None else _colours(instance)[order]
    kind = dict(color=colours) if instance is None else dict(c=colours)
    axes.scatter(*flat[order].T, s=size, linewidths=0, rasterized=True, **kind)


def _colours(instance: np.ndarray) -> np.ndarray:
    """The page's colours: hues by the golden ratio, so that neighbours in number differ. (n, 3)"""
    hue = (instance[:, None] * 0.618034 + np.array([0, 2 / 3, 1 / 3])) % 1.0
    return 1 - 0.68 * (1 - np.clip(np.abs(hue * 6 - 3) - 1, 0, 1))
