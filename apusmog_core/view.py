# SPDX-License-Identifier: Apache-2.0
"""Looking at clouds: one self-contained 3-D page (view.html), and a before/after picture."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .files import check_output, written_whole

TEMPLATE = Path(__file__).with_name("view.html")
STEPS = 32767  # int16 steps on each side of a frame's centre: 2 mm for a 120 m scan


@dataclass(frozen=True)
class Dense:
    """Dense objects as the page draws them; a pipeline's `DenseScan` has the same fields."""

    points: np.ndarray  # (m, 3)
    instance: np.ndarray  # (m,) from 1
    generated: np.ndarray  # (m,) bool


@dataclass(frozen=True)
class Frame:
    """One moment: the scan, and its dense objects at every ratio recorded."""

    name: str
    scan: np.ndarray  # (n, 3)
    dense: dict[float, Dense] = field(default_factory=dict)


# --- the page ------------------------------------------------------------------------------------


def view(
    paths: Iterable[str | Path],
    out: str | Path = "view.html",
    ratios: Sequence[float] = (),
    config=None,
    max_frames: int = 20,
) -> Path:
    """A page of any clouds, bags or folders; with ratios, their objects upsampled by each."""
    from apusmog_core.data import open_scans

    paths = list(paths)
    check_output(out, *paths)
    frames, pipeline = [], None
    if ratios:
        from apusmog_core.config import PipelineConfig
        from apusmog_core.pipeline import ScanPipeline

        pipeline = ScanPipeline(config or PipelineConfig())
    for path in paths:
        for scan in _spread(open_scans(path), max_frames):
            dense = {r: pipeline.process(scan.points, scan.intensity, ratio=r) for r in ratios}
            frames.append(Frame(scan.name or Path(path).name, scan.points, dense))
    return write_page(frames, out)


def write_page(
    frames: Sequence[Frame],
    out: str | Path,
    title: str = "APU-SMOG",
    scan_points: int = 1_000_000,
) -> Path:
    """One HTML file that needs no network; scans share `scan_points` and are thinned to fit."""
    frames = [frame for frame in frames if len(frame.scan)]
    if not frames:
        raise ValueError(f"{out}: there is no point to show")
    share = scan_points // len(frames)
    page = dict(title=title, **_home(frames), frames=[_pack_frame(f, share) for f in frames])
    # no name may end the script or begin a comment in it, and JSON knows no NaN
    data = json.dumps(page, allow_nan=False).replace("<", "\\u003c")
    with written_whole(out) as place:
        place.write_text(TEMPLATE.read_text("utf-8").replace("/*DATA*/", data), "utf-8")
    return Path(out)


def _spread(scans, count: int):
    """At most `count` scans, evenly spaced over all of them."""
    keep = set(np.linspace(0, len(scans) - 1, min(count, len(scans))).round().astype(int).tolist())
    return (scan for index, scan in enumerate(scans) if index in keep)


def _home(frames: Sequence[Frame]) -> dict:
    """Where the camera starts: at the objects of the first frame, or at the whole cloud."""
    first = frames[0]
    dense = [d.points for d in first.dense.values() if len(d.points)]
    focus = np.asarray(dense[0] if dense else first.scan, np.float64)  # float32 may overflow
    target = np.median(focus, axis=0)
    radius = np.quantile(np.linalg.norm(focus - target, axis=1), 0.65)
    low, high = np.quantile(first.scan[:, 2], (0.02, 0.995))
    extent = max(np.ptp(frame.scan.astype(np.float64), axis=0).max() for frame in frames)
    return dict(
        target=target.tolist(),
        radius=max(float(radius), 1e-3),
        extent=max(float(extent), 1e-3),
        heights=[float(low), float(max(high, low + 1e-3))],
    )


def _pack_frame(frame: Frame, scan_points: int) -> dict:
    everything = np.vstack([frame.scan, *(d.points for d in frame.dense.values())])
    everything = everything.astype(np.float64)
    low, high = everything.min(axis=0), everything.max(axis=0)
    centre, extent = (low + high) / 2, max(float((high - low).max()) / 2, 1e-6)

    def pack(points: np.ndarray, tag: np.ndarray) -> dict:
        grid = np.rint((points - centre) / extent * STEPS).astype("<i2")
        columns = grid.T.tobytes() + tag.astype("<u2").tobytes()
        data = base64.b64encode(zlib.compress(columns, 9)).decode()
        return dict(count=len(points), data=data)

    def pack_dense(ratio: float, dense: Dense) -> dict:
        # 15 bits hold the instance; beyond them colours repeat, 0 stays the scan's
        instance = (dense.instance.astype(np.int64) - 1) % 32767 + 1
        return dict(
            ratio=ratio,
            measured=int(np.count_nonzero(~dense.generated.astype(bool))),
            instances=len(np.unique(dense.instance)),
            **pack(dense.points, 2 * instance + dense.generated.astype(bool)),
        )

    step = max(1, -(-len(frame.scan) // scan_points))
    scan = frame.scan[::step]
    return dict(
        name=frame.name,
        centre=centre.tolist(),
        extent=extent,
        total=len(frame.scan),
        scan=pack(scan, np.zeros(len(scan))),
        dense=[pack_dense(float(r), d) for r, d in sorted(frame.dense.items())],
    )


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
