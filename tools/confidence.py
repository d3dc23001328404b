# SPDX-License-Identifier: Apache-2.0
"""How right the confidence is: new points by what it says, and the share of them within 10 cm of
the true surface, on simulated streets.

python -m tools.confidence ROAD_MESHES --sensors VLP-16 OS1-32 --strides 1 2 --seeds 7000 7500
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from tqdm import tqdm

from apusmog_core.evaluation import rings
from apusmog_core.sensor.lattice import LATTICE
from apusmog_core.upsampler import Upsampler

SENSORS = ("VLP-16", "OS1-32", "XT32", "VLP-32C", "Pandar64", "HDL-64E")
EDGES = (0.65, 0.75, 0.85, 0.95, 1.01)  # of the confidence
RATIO = 4.0
BIAS = 0.02  # metres, of each laser
FEWEST = 100  # new points that a share is worth printing of


def confidence_and_truth(
    up: Upsampler, cases: list[rings.RingCase]
) -> tuple[np.ndarray, np.ndarray]:
    """Confidence (m,) of the new points of all surfaces, and whether (m,) each is right."""
    sure, right = [np.zeros(0)], [np.zeros(0, bool)]
    surfaces = [case for case in cases if case.surface]
    for case, dense in zip(surfaces, rings.dense_rings(up, surfaces, RATIO), strict=True):
        new = dense.take(np.flatnonzero(dense.generated & ~dense.filler))
        if len(new.points):
            sure.append(new.confidence)
            right.append(case.truth(new.points) <= LATTICE.tolerance)
    return np.concatenate(sure), np.concatenate(right)


def shares(sure: np.ndarray, right: np.ndarray) -> list[str]:
    """Share of right points and how many there are, for each range of the confidence."""
    cells = []
    for low, high in zip(EDGES[:-1], EDGES[1:], strict=True):
        mine = right[(sure >= low) & (sure < high)]
        cells.append(f"{mine.mean():.2f} ({len(mine)})" if len(mine) >= FEWEST else "-")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("meshes", type=Path, nargs="?", help="road meshes, beside the built-in")
    parser.add_argument("--sensors", nargs="+", default=SENSORS, help="(all)")
    parser.add_argument("--strides", type=int, nargs="+", default=(1, 2, 4), help="(1 2 4)")
    parser.add_argument("--seeds", type=int, nargs="+", default=(7000, 7500), help="(7000 7500)")
    parser.add_argument("--streets", type=int, default=24, help="for each (%(default)s)")
    parser.add_argument("--weights", default="lidar", help="(%(default)s)")
    args = parser.parse_args()
    up = Upsampler.load(args.weights, "cpu")
    header = [f"{low:.2f}-{min(high, 1):.2f}" for low, high in zip(EDGES, EDGES[1:], strict=False)]
    print("| sensor | one ring of | seed |", " | ".join(header), "|")
    print("|---" * (3 + len(header)) + "|")
    rows = [(s, n, seed) for s in args.sensors for n in args.strides for seed in args.seeds]
    for sensor, stride, seed in tqdm(rows, unit="row", disable=None):
        cases = rings.simulated_cases(
            args.streets, seed, sensor, args.meshes, stride=stride, bias=BIAS
        )
        cells = shares(*confidence_and_truth(up, cases))
        tqdm.write(f"| {sensor} | {stride} | {seed} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
