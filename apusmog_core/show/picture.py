# SPDX-License-Identifier: Apache-2.0
"""A before/after picture of a scan, and the cameras that the documentation's pictures share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..files import written_whole
from .page import DrawnObjects

# what a person recognises, by length and height in metres, in the order of choice
KINDS = {
    "car": ((2.5, 5.5), (1.1, 2.1)),
    "cyclist": ((1.2, 2.2), (1.3, 2.1)),
    "person": ((0.25, 1.2), (1.3, 2.1)),
}
TELLING = 250  # measured points: sparse, and still recognisable


def picture(
    before: np.ndarray,
    after: DrawnObjects,
    out: str | Path,
    ratio: float,
    names: dict[int, str] | None = None,
    closeups: int = 3,
) -> Path:
    """A PNG: the scan left, the same with dense objects right, and objects close up below.

    `names` are classes of instances where these are known; else size tells what one may be.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 10), dpi=100, facecolor=NIGHT)
    FigureCanvasAgg(figure)
    measured = ~after.generated.astype(bool)
    halves = (("measured", measured), (f"dense, × {ratio:g}", np.ones_like(measured)))
    rows = figure.add_gridspec(2, 1, height_ratios=(1.7, 1), hspace=0.16, **MARGINS)
    scene = rows[0].subgridspec(1, 2, wspace=0.02)
    ahead = _behind_sensor(before)
    objects = len(np.unique(after.instance))
    for column, (label, shown) in enumerate(halves):
        axes = _panel(
            figure, scene[column], f"{label}: {shown.sum():,} points on {objects} objects"
        )
        draw_points(axes, before, GREY, ahead, size=0.4)
        draw_points(axes, after.points[shown], object_colours(after, shown), ahead, size=0.9)
        aim(axes, low=(-0.62, -0.4), high=(0.62, 0.34))
    chosen = choose_objects(after, names or {}, closeups)
    cells = rows[1].subgridspec(1, 2 * max(len(chosen), 1), wspace=0.06)
    for index, instance in enumerate(chosen):
        own = after.instance == instance
        camera = beside(after.points[own])
        flat, _ = camera.project(after.points[own])
        about = _describe(after.points[own], (names or {}).get(instance))
        titles = (f"{about}\n{{:,}} points measured", "\n{:,} points dense")
        for half, (_, shown) in enumerate(halves):
            shown = shown & own
            axes = _panel(figure, cells[2 * index + half], titles[half].format(shown.sum()))
            size = np.clip(2000 / max(own.sum(), 1), 2.0, 12.0)
            draw_points(
                axes, after.points[shown], object_colours(after, shown), camera, (2 - half) * size
            )
            aim(axes, flat.min(axis=0), flat.max(axis=0))
    figure.text(0.01, 0.012, KEY, color=INK, fontsize=13)
    with written_whole(out) as place:
        figure.savefig(place, facecolor=NIGHT)
    return Path(out)


KEY = "pale: measured      full colour: new      grey: the rest of the scan, passed as measured"
NIGHT, INK, GREY = "#0b0f16", "#dfe6ee", (0.36, 0.40, 0.47)
PLUS_MINUS = np.array([-1.0, 1.0])
MARGINS = dict(left=0.01, right=0.99, top=0.955, bottom=0.04)


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


def choose_objects(dense: DrawnObjects, names: dict[int, str], count: int) -> list[int]:
    """Instances that one recognises: a car, a cyclist and a person first, then what gained most."""
    sizes = {i: _length_and_height(dense.points[dense.instance == i]) for i in _numbers(dense)}
    measured = np.bincount(dense.instance[~dense.generated.astype(bool)], minlength=max(sizes) + 1)
    gained = np.bincount(dense.instance, minlength=max(sizes) + 1) - measured

    def fits(instance: int, kind: str) -> bool:
        return names.get(instance, kind) == kind and _has_size_of(kind, *sizes[instance])

    chosen: list[int] = []
    for kind in KINDS:
        of_kind = [i for i in sizes if i not in chosen and measured[i] and fits(i, kind)]
        telling = sorted(of_kind, key=lambda i: abs(np.log(measured[i] / TELLING)))
        chosen += telling[:1]
    rest = sorted(set(sizes) - set(chosen), key=lambda i: gained[i], reverse=True)
    return (chosen + rest)[:count]


def _numbers(dense: DrawnObjects) -> list[int]:
    return np.unique(dense.instance).tolist() or [0]


def _length_and_height(points: np.ndarray) -> tuple[float, float]:
    """Extent along the longest horizontal axis, and upwards."""
    if len(points) < 2:
        return 0.0, 0.0
    flat = points[:, :2] - points[:, :2].mean(axis=0)
    longest = np.linalg.eigh(flat.T @ flat)[1][:, 1]
    return float(np.ptp(flat @ longest)), float(np.ptp(points[:, 2]))


def _has_size_of(kind: str, length: float, height: float) -> bool:
    (short, long), (low, high) = KINDS[kind]
    return short <= length <= long and low <= height <= high


def _describe(points: np.ndarray, name: str | None) -> str:
    """What it is, or what has its size, and how far away."""
    length, height = _length_and_height(points)
    distance = float(np.hypot(*np.median(points[:, :2], axis=0)))
    alike = next((f"of a {k}'s size" for k in KINDS if _has_size_of(k, length, height)), None)
    return f"{name or 'object ' + (alike or f'{length:.1f} m long')} at {distance:.0f} m"


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


def draw_points(axes, points: np.ndarray, colours, camera: Camera, size: float) -> None:
    """Points in one colour, or in one each (n, 3)."""
    flat, depth = camera.project(points)
    front = np.flatnonzero(depth > 0.5)
    order = front[np.argsort(-depth[front])]  # far first, so that near points cover them
    kind = dict(c=colours[order]) if np.ndim(colours) == 2 else dict(color=colours)
    axes.scatter(*flat[order].T, s=size, linewidths=0, rasterized=True, **kind)


def object_colours(dense: DrawnObjects, shown: np.ndarray) -> np.ndarray:
    """The page's colours (n, 3): hues by the golden ratio, pale for measured points."""
    instance, generated = dense.instance[shown], dense.generated[shown].astype(bool)
    hue = (instance[:, None] * 0.618034 + np.array([0, 2 / 3, 1 / 3])) % 1.0
    strength = np.where(generated, 0.75, 0.3)[:, None]
    return 1 - strength * (1 - np.clip(np.abs(hue * 6 - 3) - 1, 0, 1))
