# SPDX-License-Identifier: Apache-2.0
"""`apusmog calibrate`: where each laser of a sensor looks, and how far off its ranges are."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import plural, say
from .progress import progress

DIGITS = {"elevation": 3, "height": 3, "bias": 3, "spread": 3}  # degrees and metres


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "scans",
        type=Path,
        metavar="SCANS",
        help="a KITTI drive, a bag or a folder of scans with rings; twenty of a drive are enough",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="also draw a picture")
    parser.add_argument(
        "--topic", default="", help="topic of a bag to read (the one with most clouds)"
    )


def calibrate(args: argparse.Namespace) -> int:
    from apusmog_core.data import open_scans
    from apusmog_core.evaluation.tables import format_table
    from apusmog_core.segment.rings import require_rings
    from apusmog_core.sensor.calibrate import ALL_SCANS, Calibration

    if args.out and args.out.suffix != ".png":
        raise ValueError(f"{args.out}: the picture is written as .png")
    calibration, settled = Calibration(ALL_SCANS), False
    for scan in progress(open_scans(args.scans, args.topic), "scan"):
        calibration.update(scan.points, *require_rings(scan, args.scans))
        settled = calibration.converged and (settled or calibration.scans)
    rows = calibration.table()
    print(format_table([_printed(row) for row in rows]))
    if args.out:
        draw(rows, args.out)
        print(f"{args.out}: written")
    if calibration.left_out:
        say(f"{plural(calibration.left_out, 'scan')} left out: their rings look elsewhere")
    if not settled:
        say(f"not converged after {calibration.scans} scans: too few show walls or vehicles")
        return 1
    print(f"converged after {settled} of {calibration.scans} scans")
    return 0


def _printed(row: dict[str, float]) -> dict[str, float | int]:
    """Metres and degrees with as many digits as mean something."""
    counts = {"ring": int(row["ring"]), "residuals": int(row["residuals"])}
    rounded = {name: round(row[name], digits) for name, digits in DIGITS.items()}
    return {"ring": counts.pop("ring")} | rounded | counts


def draw(rows: list[dict[str, float]], out: Path) -> None:
    """A picture of bias and origin of each laser, over the elevation it looks at."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from apusmog_core.files import written_whole

    figure = Figure(figsize=(11, 6.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    bias, height = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    ring, at = np.array([row["ring"] for row in rows]), [row["elevation"] for row in rows]
    value = 100 * np.array([row["bias"] for row in rows])
    error = [100 * row["spread"] / max(row["residuals"], 1) ** 0.5 for row in rows]
    bias.axhline(0, color="0.7", linewidth=0.8)
    bias.plot(at, value, color="0.8", linewidth=0.8, zorder=1)
    for odd, colour, name in ((0, "tab:blue", "even rings"), (1, "tab:orange", "odd rings")):
        mine = np.flatnonzero(ring % 2 == odd)
        if len(mine):
            where = (np.take(at, mine), value[mine], np.nan_to_num(np.take(error, mine)))
            bias.errorbar(*where, fmt="o", markersize=4, color=colour, label=name)
    bias.set(ylabel="range bias, cm", title="What each laser adds to its ranges")
    bias.legend(frameon=False)
    height.plot(at, [100 * row["height"] for row in rows], ".", color="0.3")
    height.set(xlabel="elevation, degrees", ylabel="origin of the laser, cm")
    with written_whole(out) as place:
        figure.savefig(place)
