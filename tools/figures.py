# SPDX-License-Identifier: Apache-2.0
"""The pictures of the documentation: objects made dense, ratios of one shape, the mixture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from apusmog_core.cli.arguments import missing_package
from apusmog_core.evaluation.metrics import distances as distance_to
from apusmog_core.geometry import farthest
from apusmog_core.show.picture import aim, beside
from apusmog_core.surface.mesh import read_mesh
from apusmog_core.upsampler import Upsampler

from .drawing import (
    BAD,
    FAIR,
    GOOD,
    INK,
    MARGINS,
    NOTE,
    PALE,
    add_heads,
    add_panel,
    colours_by_depth,
    draw_dots,
    new_figure,
    save_figure,
)
from .mixture import mixture
from .ratios import knot, ratios
from .seen import Seen, see

RANGES = (10.0, 20.0, 35.0)  # metres
RATIO = 4.0
LIMITS = (0.05, 0.20)  # metres from the true surface where GOOD becomes FAIR, and FAIR BAD


def figures(
    out: str | Path,
    weights: str | Path = "lidar",
    surface_weights: str | Path = "shape",
    mesh: str | Path | None = None,
    device: str = "auto",
    seed: int = 0,
) -> list[Path]:
    """Write all pictures into a folder; `mesh` is the shape of the ratios, else a knot."""
    lidar = _load(weights, "sensor", device, seed)
    surface = _load(surface_weights, "canonical", device, seed)
    shape = knot() if mesh is None else read_mesh(mesh)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    return [
        before_after(lidar, out / "before_after.png", seed),
        ratios(surface, out / "ratios.png", shape, seed),
        mixture(lidar, surface, out / "mixture.png", seed),
    ]


def _load(weights: str | Path, domain: str, device: str, seed: int) -> Upsampler:
    up = Upsampler.load(weights, device, seed)
    if up.config.domain != domain:
        better = "lidar" if domain == "sensor" else "shape"
        raise ValueError(f"{weights}: the mixture's domain is not {domain!r}; try {better!r}")
    return up


# --- before and after ----------------------------------------------------------------------------


def before_after(up: Upsampler, out: Path, seed: int = 0) -> Path:
    """Objects at three ranges: measured, dense, and the true visible surface."""
    figure = new_figure(12, 12.4)
    bands = figure.add_gridspec(2, 1, height_ratios=(1, 1.35), hspace=0.1, **MARGINS)
    halves = bands[1].subgridspec(1, 2, width_ratios=(1.2, 1), wspace=0.08)
    cells = {"car": bands[0], "cyclist": halves[0], "person": halves[1]}
    for kind, cell in cells.items():
        grid = cell.subgridspec(len(RANGES), 3, hspace=0.16, wspace=0.02)
        panels = [[add_panel(figure, grid[row, column]) for column in range(3)] for row in range(3)]
        add_heads(panels[0], (f"{kind}, measured", f"dense, × {RATIO:g}", "truth"))
        seen = [see(kind, distance, seed) for distance in RANGES]
        for row, distance in enumerate(RANGES):
            count = round(RATIO * len(seen[row].points))
            dense = up.upsample_scan(seen[row].scan, [count])
            _compare(panels[row], seen[row], dense.points[len(seen[row].points) :])
            panels[row][0].set_title(f"{distance:g} m: {len(seen[row].points):,} points", **NOTE)
    _legend(figure)
    return save_figure(figure, out)


def _compare(panels: Sequence, seen: Seen, new: np.ndarray) -> None:
    """Three views of one object from the same place."""
    camera = beside(seen.truth)
    flat = camera.project(seen.truth)[0]
    total = len(seen.points) + len(new)
    size = 110 / np.sqrt(total)
    away = distance_to(new, seen.truth)
    even = seen.truth[farthest(seen.truth, 4000)]
    draw_dots(panels[0], camera, seen.points, INK, 1.6 * size)
    draw_dots(panels[1], camera, new, grade(away), size)
    draw_dots(panels[1], camera, seen.points, INK, size)
    draw_dots(panels[2], camera, even, colours_by_depth(camera, even), 1.6)
    panels[1].set_title(f"{total:,} points, {100 * away.mean():.1f} cm off", **NOTE)
    for axes in panels:
        aim(axes, flat.min(axis=0), flat.max(axis=0))


def grade(away: np.ndarray) -> np.ndarray:
    """The colour of each distance (n,) from the true surface."""
    return np.array([GOOD, FAIR, BAD])[np.searchsorted(LIMITS, away)]


def _legend(figure) -> None:
    from matplotlib.lines import Line2D

    near, far = (f"{100 * limit:g} cm" for limit in LIMITS)
    labels = {
        "measured": INK,
        f"new, at most {near} off the true surface": GOOD,
        f"{near} to {far}": FAIR,
        f"beyond {far}": BAD,
        "what the sensor can see": PALE,
    }
    dots = [Line2D([], [], ls="", marker="o", ms=6, mew=0, color=c) for c in labels.values()]
    figure.legend(
        dots, labels, ncols=len(labels), loc="lower center", frameon=False, fontsize=10.5,
        labelcolor=INK, handletextpad=0.1, columnspacing=1.6,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw the pictures of the documentation.")
    parser.add_argument("output", type=Path, metavar="OUT", help="the folder to write")
    parser.add_argument("--weights", default="lidar", help="for LiDAR (%(default)s)")
    parser.add_argument("--surface-weights", default="shape", help="for shapes (%(default)s)")
    parser.add_argument("--mesh", type=Path, help="shape of the ratios, instead of a knot")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    args = parser.parse_args(argv)
    options = (args.weights, args.surface_weights, args.mesh, args.device, args.seed)
    try:
        for path in figures(args.output, *options):
            print(path)
    except ValueError as error:
        print(f"figures: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"figures: {missing_package(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
