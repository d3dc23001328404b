# SPDX-License-Identifier: Apache-2.0
"""Scores of the shipped weights on clouds of our own making, small enough for every test run.

python -m tools.shipped          # score, and write what test/test_shipped.py expects
python -m tools.shipped --shapes # sample the shapes again first
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from apusmog_core.data import Scan
from apusmog_core.evaluation import metrics, rings
from apusmog_core.evaluation.tables import means
from apusmog_core.sample_clouds import STORED, unpack
from apusmog_core.segment import Segmenter
from apusmog_core.upsampler import Upsampler

TESTS = Path(__file__).parents[1] / "test"
SHAPES, EXPECTED = TESTS / "shapes.npz", TESTS / "shipped_scores.json"
POINTS, RATIO = 512, 4
STRIDES = (2, 4)  # every second, every fourth ring of the simulated street is given
RINGS = ("completeness", "hallucination", "f_10")


def score_shapes(weights: str = "shape") -> dict[str, dict[str, float]]:
    """CD, HD and HD-sum in thousandths for each of our shapes."""
    up = Upsampler.load(weights, "cpu")
    scores = {}
    with np.load(SHAPES) as stored:
        for name in (n for n in stored if not n.endswith("_truth")):
            points, truth = (stored[n].astype(np.float32) for n in (name, f"{name}_truth"))
            found = metrics.shape_scores(up.upsample(points, RATIO), truth)
            scores[name] = {k: 1e3 * found[k] for k in ("cd", "hd", "hd_sum")}
    return scores


def score_street(weights: str = "lidar") -> dict[str, dict[str, float]]:
    """Ring hold-out on the simulated street that ships as a sample, objects as they are found."""
    with np.load(STORED) as stored:
        turn = unpack(stored["street_hdl64e"])
    scan = Scan(turn["points"], ring=turn["ring"].astype(np.int32), name="street")
    up = Upsampler.load(weights, "cpu")
    scores = {}
    for stride in STRIDES:
        cases = rings.cases_of(scan, Segmenter(), stride=stride)
        outputs = rings.upsample_rings(up, cases)
        found = [rings.score_ring(c, out) for c, out in zip(cases, outputs, strict=True)]
        mean = means([{k: score[k] for k in RINGS} for score in found])
        scores[f"one ring of {stride}"] = {"objects": len(cases), **mean}
    return scores


def score_all() -> dict[str, dict[str, dict[str, float]]]:
    return {"shape": score_shapes(), "lidar": score_street()}


def make_shapes(seed: int = 0) -> dict[str, np.ndarray]:
    """Points (512, 3) of three built-in shapes and their truth (2048, 3)."""
    from apusmog_core.simulate.objects import BUILDERS

    from .ratios import knot, sample_mesh, to_open3d

    rng = np.random.default_rng(seed)
    bodies = {name: BUILDERS[name](rng) for name in ("car", "person")}
    shapes = {"knot": knot()} | {n: to_open3d(b.vertices, b.triangles) for n, b in bodies.items()}
    stored = {}
    for number, (name, mesh) in enumerate(shapes.items()):
        stored[name] = sample_mesh(mesh, POINTS, seed + 2 * number)
        stored[f"{name}_truth"] = sample_mesh(mesh, POINTS * RATIO, seed + 2 * number + 1)
    return {name: points.astype(np.float16) for name, points in stored.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", action="store_true", help="sample the shapes again first")
    if parser.parse_args().shapes:
        np.savez_compressed(SHAPES, **make_shapes())
    EXPECTED.write_text(json.dumps(score_all(), indent=1) + "\n")
    print(EXPECTED.read_text())


if __name__ == "__main__":
    main()
