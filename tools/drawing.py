# SPDX-License-Identifier: Apache-2.0
"""What the pictures of the documentation share: colours, panels, dots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from apusmog_core.show.picture import Camera

PAPER, INK, PALE = "#ffffff", "#17202b", "#98a2ae"
GOOD, FAIR, BAD = "#1f83e0", "#f2a01f", "#df2b2b"
MARGINS = dict(left=0.015, right=0.985, top=0.94, bottom=0.045)
HEAD = dict(color=INK, fontsize=12, fontweight="bold", ha="center")
TEXT = dict(color=INK, fontsize=10.5)
NOTE = dict(pad=3, **TEXT)


def new_figure(width: float, height: float):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure, out: Path) -> Path:
    figure.savefig(out, facecolor=PAPER)
    return out


def add_panel(figure, cell):
    axes = figure.add_subplot(cell, facecolor=PAPER)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    return axes


def add_heads(panels: Sequence, names: Sequence[str]) -> None:
    """Names of columns, above the titles of the first row."""
    for axes, name in zip(panels, names, strict=True):
        place = dict(xy=(0.5, 1), xytext=(0, 20), textcoords="offset points")
        axes.annotate(name, xycoords="axes fraction", **place, **HEAD)


def draw_dots(axes, camera: Camera, points: np.ndarray, colour, size: float) -> None:
    """Points from far to near; strays are drawn over the edge of the panel, not left out."""
    flat, depth = camera.project(points)
    order = np.argsort(-depth)
    colour = colour if isinstance(colour, str) else np.asarray(colour)[order]
    axes.scatter(*flat[order].T, c=colour, s=size, linewidths=0, clip_on=False)


def colours_by_depth(camera: Camera, points: np.ndarray) -> np.ndarray:
    """Colours (n, 3) that fade with the distance from the camera."""
    depth = camera.project(points)[1]
    far = ((depth - depth.min()) / max(np.ptp(depth), 1e-9))[:, None]
    near, away = np.array([0.20, 0.27, 0.36]), np.array([0.80, 0.84, 0.88])
    return near + (away - near) * far


def colours_by_place(flat: np.ndarray) -> np.ndarray:
    """Colours (n, 3) of places (n, 2) in a plane: the direction is the hue."""
    from matplotlib.colors import hsv_to_rgb

    reach = np.linalg.norm(flat, axis=1)
    hue = (np.arctan2(flat[:, 1], flat[:, 0]) / (2 * np.pi)) % 1
    full = np.clip(reach / reach.max(), 0.15, 1)
    return hsv_to_rgb(np.stack((hue, full, np.full(len(flat), 0.85)), axis=1))
