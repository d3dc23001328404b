# SPDX-License-Identifier: Apache-2.0
"""The moving picture of the documentation: a simulated scan becomes dense as the ratio grows.

python -m tools.motion docs/dense.gif
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from apusmog_core.cli.arguments import missing_package
from apusmog_core.config import ClusterConfig, PipelineConfig
from apusmog_core.pipeline import DenseScan, ScanPipeline
from apusmog_core.show.picture import (
    GREY,
    INK,
    NIGHT,
    aim,
    beside,
    draw_points,
    look_at,
    object_colours,
)
from apusmog_core.simulate.objects import BUILDERS
from apusmog_core.simulate.sensor import Placed, Scene, Sensor, SimulatedScan, scan

# kind, x, y, heading, seed of its shape: a street corner, the sensor at the origin looks along x
PLACES = (
    ("car", 15.5, 4.8, 0.7, 1), ("van", 24.0, 5.6, 0.0, 3), ("car", 33.0, 5.6, 0.0, 2),
    ("car", 20.0, -4.2, 3.0, 4), ("truck", 31.0, -5.6, 3.14, 5), ("cyclist", 16.5, 0.9, 2.2, 6),
    ("person", 13.5, -3.4, 1.9, 7), ("person", 17.0, -2.0, 0.6, 8), ("person", 20.0, 1.9, 3.0, 9),
    ("tree", 18.0, -9.0, 0.0, 10), ("pole", 15.0, 9.2, 0.0, 11), ("bush", 14.0, -7.0, 0.0, 12),
)  # fmt: skip
CLOSE = {"car": 1, "cyclist": 6, "person": 8}  # shown close up: the place in PLACES, from 1
LARGEST, STEPS, HOLD = 8.0, 22, 9  # ratio, pictures on the way there, pictures that it stays
PICTURE_MS = 90
WIDTH, HEIGHT = 960, 600
COLOURS = 96  # of the file's palette


def corner(sensor: str, seed: int = 0) -> SimulatedScan:
    """One scan of the street corner."""
    things = [
        Placed(BUILDERS[kind](np.random.default_rng(own)), kind, x, y, heading)
        for kind, x, y, heading, own in PLACES
    ]
    return scan(Scene(things), Sensor.named(sensor).jittered(seed), seed)


def motion(out: Path, weights: str, sensor: str) -> Path:
    """Write the moving picture; each one in it is what the pipeline gives for its ratio."""
    from PIL import Image

    turn = corner(sensor)
    pipeline = ScanPipeline(PipelineConfig(weights=weights, cluster=ClusterConfig(min_points=8)))
    segments = pipeline.segment(turn.points, turn.intensity, turn.ring)
    ratios = [1.0] * (HOLD - 3) + np.geomspace(1, LARGEST, STEPS).tolist() + [LARGEST] * HOLD
    drawn: dict[float, Image.Image] = {}
    for ratio in ratios:
        if ratio not in drawn:
            dense = pipeline.densify(segments, ratio)
            drawn[ratio] = _drawn(turn, dense, ratio, sensor)
    palette = drawn[LARGEST].quantize(COLOURS)  # it has every colour
    pictures = [
        drawn[ratio].quantize(palette=palette, dither=Image.Dither.NONE) for ratio in ratios
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    pictures[0].save(
        out, save_all=True, append_images=pictures[1:], duration=PICTURE_MS, loop=0, optimize=True
    )
    return out


def _drawn(turn: SimulatedScan, dense: DenseScan, ratio: float, sensor: str):
    """One picture: the scene above, three objects below, the ratio as a number and a bar."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=100, facecolor=NIGHT)
    canvas = FigureCanvasAgg(figure)
    rest = dense.segments.instance == 0
    axes = _panel(figure, (0.0, 0.37, 1.0, 0.54))
    camera = look_at(np.array([1.5, 0.0, 2.6]), np.array([18.0, 0.0, -1.0]))
    draw_points(axes, dense.segments.points[rest], GREY, camera, 1.2)
    everything = np.ones(len(dense.points), bool)
    draw_points(axes, dense.points, object_colours(dense, everything), camera, 1.7)
    aim(axes, low=(-0.52, -0.15), high=(0.52, 0.14))
    for column, (kind, place) in enumerate(CLOSE.items()):
        _close_up(figure, column, kind, turn, dense, place)
    measured = int(np.count_nonzero(dense.segments.instance))
    about = f"{sensor}, objects of {measured:,} points (pale)"
    figure.text(0.02, 0.93, about, color=INK, fontsize=14)
    figure.text(0.5, 0.93, f"× {ratio:.2f}", color=INK, fontsize=18, fontweight="bold", ha="center")
    figure.text(
        0.98, 0.93, f"{len(dense.points):,} points, exactly", color=INK, fontsize=14, ha="right"
    )
    bar = figure.add_axes((0.0, 0.985, np.log(ratio) / np.log(LARGEST), 0.015), facecolor="#5ec8ff")
    bar.set(xticks=[], yticks=[])
    bar.spines[:].set_visible(False)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())


def _close_up(figure, column: int, kind: str, turn: SimulatedScan, dense: DenseScan, place: int):
    """The object that holds most points of a place, from its side, and how many it has."""
    found = dense.segments.instance[turn.instance[dense.segments.rows] == place]
    own = dense.instance == np.bincount(found).argmax()
    seen = turn.points[turn.instance == place]
    camera = beside(seen)
    axes = _panel(figure, (column / 3 + 0.02, 0.02, 1 / 3 - 0.04, 0.29))
    draw_points(axes, dense.points[own], object_colours(dense, own), camera, 5.0)
    flat = camera.project(seen)[0]
    aim(axes, flat.min(axis=0) - 0.005, flat.max(axis=0) + 0.005)
    distance = float(np.hypot(*np.median(seen[:, :2], axis=0)))
    measured = np.count_nonzero(~dense.generated & own)
    text = f"{kind} at {distance:.0f} m: {measured} → {own.sum():,} points"
    figure.text(column / 3 + 1 / 6, 0.335, text, color=INK, fontsize=12, ha="center")


def _panel(figure, place: tuple[float, float, float, float]):
    axes = figure.add_axes(place, facecolor=NIGHT)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    return axes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the moving picture of the documentation.")
    parser.add_argument("output", type=Path, metavar="OUT", help="the file to write (.gif)")
    parser.add_argument("--weights", default="lidar", help="a shipped name or a file (%(default)s)")
    parser.add_argument("--sensor", default="HDL-64E", help="a sensor's name (%(default)s)")
    args = parser.parse_args(argv)
    try:
        path = motion(args.output, args.weights, args.sensor)
    except ValueError as error:
        print(f"motion: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"motion: {missing_package(error)}", file=sys.stderr)
        return 1
    print(f"{path}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
