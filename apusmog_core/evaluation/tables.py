# SPDX-License-Identifier: Apache-2.0
"""Rows of scores: means, aligned text, CSV and JSON."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from ..files import written_whole

Scores = dict[str, dict[str, float]]  # {group of cases: {score: mean over the cases}}
Row = dict[str, Any]  # one line of a table


def means(rows: list[dict[str, float]]) -> dict[str, float]:
    """Mean of each score over the rows that have it; NaN rows do not count."""
    return {
        key: float(np.nanmean([row[key] for row in rows]))
        if not all(np.isnan(row[key]) for row in rows)
        else float("nan")
        for key in rows[0]
    }


# --- tables --------------------------------------------------------------------------------------

LABELS = {
    "cd": "CD e-3", "hd": "HD e-3", "hd_sum": "HD-sum e-3", "p2f": "P2F e-3",
    "p2f_std": "P2F dev e-3", "seconds": "s", "completeness": "complete", "hallucination": "halluc",
    "f_5": "F@5cm", "f_10": "F@10cm", "f_20": "F@20cm", "free_space": "free", "thickness": "thick",
    "surface_error": "to surface",
}  # fmt: skip

MEANINGS = {
    "cd": "Chamfer distance in thousandths, of shapes scaled to a unit sphere: less is better",
    "hd": "Hausdorff distance in thousandths, the larger of both directions: less is better",
    "hd_sum": "the same, the sum of both directions",
    "p2f": "mean distance of the output from the mesh, in thousandths: less is better",
    "p2f_std": "deviation of that distance",
    "seconds": "seconds a cloud",
    "clusters": "objects scored",
    "completeness": "metres from a point that was held out to the output, mean: less is better",
    "hallucination": "metres from an output point to what the sensor saw, mean: less is better",
    "f_5": "F-score at 5 cm: share of held-out points met, and of the output that is right; "
    "1 is best; likewise at 10 and 20 cm",
    "thickness": "metres that the surface is thick: less is better",
    "free_space": "share of new points where a ray has passed, so that nothing is there",
    "surface_error": "metres from an output point to the true surface, mean: less is better",
}


def explain_columns(rows: list[Row]) -> str:
    """A line for each column of a table that needs one."""
    meanings = [(LABELS.get(name, name), MEANINGS[name]) for name in rows[0] if name in MEANINGS]
    width = max((len(label) for label, _ in meanings), default=0)
    return "\n".join(f"  {label:{width}}  {meaning}" for label, meaning in meanings)


def format_table(rows: list[Row]) -> str:
    """Rows as aligned text; shape scores are printed in thousandths."""
    if not rows:
        return "nothing to score"
    names = list(rows[0])
    cells = [[LABELS.get(name, name) for name in names]]
    cells += [[_cell(name, row.get(name, float("nan"))) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    left = [isinstance(rows[0][name], str) for name in names]
    return "\n".join(
        "  ".join(
            c.ljust(w) if a else c.rjust(w) for c, w, a in zip(line, widths, left, strict=True)
        )
        for line in cells
    )


def _cell(name: str, value: Any) -> str:
    if isinstance(value, float):
        if np.isnan(value):
            return "-"
        if LABELS.get(name, "").endswith("e-3"):
            return f"{1e3 * value:.3f}"
        return f"{value:.3f}" if name in LABELS else f"{value:g}"
    return str(value)


def write_rows(path: str | Path, rows: list[Row]) -> None:
    """Unscaled rows as .csv or .json, by the suffix."""
    path = Path(path)
    if path.suffix == ".json":
        clean = [{k: None if v != v else v for k, v in row.items()} for row in rows]  # NaN
        with written_whole(path) as place:
            place.write_text(json.dumps(clean, indent=1) + "\n")
    elif path.suffix == ".csv":
        with written_whole(path) as place, place.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]) if rows else [])
            writer.writeheader()
            writer.writerows(rows)
    else:
        raise ValueError(f"{path}: results are written as .csv or .json")
