# SPDX-License-Identifier: Apache-2.0
"""What the choice of rays and the mixture are worth: F and hallucination by `likely`, and without
what the mixture has learned.

python -m tools.choice KITTI_DRIVE HOLDOUT --stride 4
python -m tools.choice --simulate 4 --sensor VLP-32C --seed 8000 --meshes ROAD_MESHES --stride 4
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from apusmog_core.cli.arguments import stride
from apusmog_core.evaluation import metrics, rings
from apusmog_core.evaluation.tables import means
from apusmog_core.sensor import grow
from apusmog_core.sensor.compiled import CompiledRayNetwork, CompiledRays
from apusmog_core.upsampler import Upsampler

SWEPT = (0.5, 0.6, 0.7, 0.8, 0.86)
RAISED = (0.84, 0.88, 0.91, 0.93, 0.95)  # for mixtures that know nothing of the object
LEAST_POINTS = 24  # of a simulated object

Score = tuple[float, float]  # F at 10 cm, hallucination in metres


class Unlearned(CompiledRayNetwork):
    """A network whose mixture knows nothing of the object: shuffled among points, or constant."""

    def __init__(self, network, mixture: str):
        super().__init__(network)
        self.mixture = mixture

    def encode(self, *graph: np.ndarray) -> CompiledRays:
        encoded = super().encode(*graph)
        own = encoded.components  # (N, 6)
        if self.mixture == "shuffled":
            other = own[np.random.default_rng(0).permutation(len(own))]
        else:
            other = np.repeat(np.median(own, axis=0, keepdims=True), len(own), axis=0)
        return encoded._replace(components=other)


def score(up: Upsampler, cases: list[rings.RingCase], likely: float) -> Score:
    """Means over the surfaces of the cases, with another threshold in the choice of rays."""
    shipped = grow.LATTICE
    try:
        grow.LATTICE = replace(shipped, likely=likely)
        outputs = rings.upsample_rings(up, cases)
    finally:
        grow.LATTICE = shipped
    return mean_score(cases, outputs)


def mean_score(cases: list[rings.RingCase], outputs: Iterable[np.ndarray]) -> Score:
    """Of the surfaces alone."""
    pairs = [(c, output) for c, output in zip(cases, outputs, strict=True) if c.surface]
    mean = means([metrics.ring_scores(output, case.held, case.full) for case, output in pairs])
    return mean["f_10"], mean["hallucination"]


def f_at(hallucination: float, scores: list[Score]) -> float:
    """F at a hallucination, on straight lines between scores; NaN where none is on one side."""
    f, h = np.array(sorted(scores, key=lambda score: score[1])).T
    return float(np.interp(hallucination, h, f, left=np.nan, right=np.nan))


def choice(cases: list[rings.RingCase], weights: str = "lidar") -> list[str]:
    """Lines of both tables."""
    up = Upsampler.load(weights, "cpu")
    interpolate = rings.RING_BASELINES["range-interpolation"]
    base = mean_score(cases, map(interpolate, cases))
    lines = [f"range interpolation    F {base[0]:.3f}   hallucination {base[1]:.3f} m"]
    for likely in tqdm(SWEPT, desc="likely", unit="table", disable=None):
        f, h = score(up, cases, likely)
        lines.append(
            f"likely {likely:.2f}            F {f:.3f}   {h:.3f} m, {h / base[1]:.2f} times"
        )
    present = grow.LATTICE.likely
    learned = score(up, cases, present)
    for mixture in ("shuffled", "constant"):
        up.way._rays = Unlearned(up.network, mixture)
        same = score(up, cases, present)
        equal = f_at(learned[1], [same, *(score(up, cases, likely) for likely in RAISED)])
        lines.append(
            f"mixture {mixture}, {present:.2f}   F {same[0]:.3f}   {same[1]:.3f} m; "
            f"at {learned[1]:.3f} m F {equal:.3f}, learned {learned[0]:.3f}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scans", type=Path, nargs="?", help="KITTI drive of the fixed clusters")
    parser.add_argument("holdout", type=Path, nargs="?", help="their folder")
    parser.add_argument("--simulate", type=int, metavar="N", help="streets, instead")
    parser.add_argument("--sensor", default="HDL-64E", help="(%(default)s)")
    parser.add_argument("--meshes", type=Path, help="road meshes, beside the built-in ones")
    parser.add_argument("--bias", type=float, default=0.0, help="metres, of each laser (0)")
    parser.add_argument("--seed", type=int, default=0, help="of the streets (%(default)s)")
    parser.add_argument(
        "--stride", type=stride, default=4, help="every how many rings are kept (4)"
    )
    parser.add_argument("--weights", default="lidar", help="(%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # else the objects are shared out, and shuffled within each share
    if args.simulate:
        some = dict(points=(LEAST_POINTS, 1_000_000), stride=args.stride, bias=args.bias)
        cases = rings.simulated_cases(args.simulate, args.seed, args.sensor, args.meshes, **some)
    elif args.scans and args.holdout:
        cases = rings.fixed_cases(args.scans, args.holdout, args.stride)
    else:
        parser.error("give KITTI_DRIVE and HOLDOUT, or --simulate N")
    print(*choice(cases, args.weights), sep="\n")


if __name__ == "__main__":
    main()
