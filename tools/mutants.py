# SPDX-License-Identifier: Apache-2.0
"""Deliberate mistakes, one at a time, in a copy of the code: which of them do the tests not notice?

python -m tools.mutants                 # all of them
python -m tools.mutants prior weights   # those with one of these words in their name
python -m tools.mutants --list
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIME = 600  # seconds for the tests of one mistake
COPIED = ("apusmog_core", "apusmog_ros", "config", "launch", "test", "tools", "pyproject.toml")


@dataclass(frozen=True)
class Mutant:
    """A mistake: text of a file that is there once, what replaces it, tests that must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str  # "file::words" or several, with words for pytest's -k; file without test_ and .py

    def apply(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text()
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(
                f"{self.name}: {self.file} has {text.count(self.old)} places like {self.old!r}; "
                "say in tools/mutants.py where it is now"
            )
        path.write_text(text.replace(self.old, self.new))

    def arguments(self) -> list[str]:
        """Of pytest."""
        file, _, words = self.tests.partition("::")
        return [f"test/test_{file}.py", *(["-k", words] if words else [])]


def survives(mutant: Mutant, root: Path) -> bool:
    """Whether the tests pass with the mistake in `root`, which is as it was afterwards."""
    path = root / mutant.file
    before = path.read_text()
    mutant.apply(root)
    try:
        return run_tests(mutant, root).returncode == 0
    except subprocess.TimeoutExpired:
        return False  # a mistake that hangs is noticed
    finally:
        path.write_text(before)


def run_tests(mutant: Mutant, root: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [*command, *mutant.arguments()],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIME,
    )
    if done.returncode not in (0, 1):  # 5: no test of this name
        raise RuntimeError(f"{mutant.name}: {' '.join(mutant.arguments())}: {done.stdout[-500:]}")
    return done


def copy_of_the_code(folder: Path) -> Path:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    return folder


def judge(mutants: list[Mutant], jobs: int) -> list[str]:
    """Names of the survivors; prints one line for each mistake."""
    with tempfile.TemporaryDirectory() as place:
        roots = [copy_of_the_code(Path(place) / str(job)) for job in range(jobs)]

        def work(share: int) -> list[str]:
            lived = []
            for mutant in mutants[share::jobs]:
                start = time.monotonic()
                alive = survives(mutant, roots[share])
                verdict = "SURVIVES" if alive else "noticed"
                print(f"{verdict:8}  {time.monotonic() - start:4.0f} s  {mutant.name}", flush=True)
                lived += [mutant.name] if alive else []
            return lived

        with ThreadPoolExecutor(jobs) as pool:
            return [name for names in pool.map(work, range(jobs)) for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mistakes with one of these in their name")
    parser.add_argument("--list", action="store_true", help="only print them")
    parser.add_argument("--jobs", type=int, default=1, help="mistakes tried at once")
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if not given.words or any(word in m.name for word in given.words)]
    if given.list:
        print("\n".join(f"{m.name}: {m.file}; {' '.join(m.arguments())}" for m in chosen))
        return 0
    survivors = judge(chosen, max(1, given.jobs))
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} noticed", *survivors, sep="\n")
    return len(survivors)


MODEL, SENSOR = "apusmog_core/model", "apusmog_core/sensor"
TRAIN, SEGMENT = "apusmog_core/training", "apusmog_core/segment"

MUTANTS = [
    # --- the network of the paper ---
    Mutant(
        "pointing prior ignored",
        f"{MODEL}/network.py",
        "self.head(x, tokens, self.prior_sharpness.abs() * nearness)",
        "self.head(x, tokens, 0 * nearness)",
        "model::before_training",
    ),
    Mutant(
        "encoder layers skipped",
        f"{MODEL}/network.py",
        "for layer in self.encoder:",
        "for layer in self.encoder[:0]:",
        "paper::every_layer",
    ),
    Mutant(
        "encoder layer without attention",
        f"{MODEL}/transformer.py",
        "x = x + self.attention(y, around)",
        "x = x + 0 * self.attention(y, around)",
        "paper::encoder_layer",
    ),
    Mutant(
        "position code missing from the values",
        f"{MODEL}/attention.py",
        "(weights * (delta + value))",
        "(weights * (0 * delta + value))",
        "paper::equation_1",
    ),
    Mutant(
        "position code missing from the weights",
        f"{MODEL}/attention.py",
        "self.gamma(delta + (self.beta(x)",
        "self.gamma(0 * delta + (self.beta(x)",
        "paper::equation_1",
    ),
    Mutant(
        "keys of swapped neighbours",
        f"{MODEL}/attention.py",
        "key, value = (gather(t, neighbours) for t in memory)",
        "key, value = gather(memory[0], neighbours.flip(-1)), gather(memory[1], neighbours)",
        "paper::equation_1",
    ),
    Mutant(
        "keys and values of the point itself",
        f"{MODEL}/network.py",
        "around = self.extract.project(x) if self.patch else None",
        "around = None",
        "paper::backbone_is",
    ),
    Mutant(
        "lengths of the patch not scaled",
        f"{MODEL}/network.py",
        "return self._radius(points).expand(-1, points.shape[1], -1)",
        "return torch.ones_like(points[..., :1])",
        "paper::backbone_is",
    ),
    Mutant(
        "queries without their code in self-attention",
        f"{MODEL}/transformer.py",
        "self.itself(flat + code, flat, code)",
        "self.itself(flat, flat)",
        "paper::decoder_layer",
    ),
    Mutant(
        "places missing from the keys",
        f"{MODEL}/transformer.py",
        "self.key(memory + places)",
        "self.key(memory)",
        "paper::decoder_layer",
    ),
    Mutant(
        "starting spread doubled",
        "apusmog_core/config.py",
        "spread=0.275",
        "spread=0.55",
        "paper::deviations_start",
    ),
    Mutant(
        "covariance not clamped",
        f"{MODEL}/smog.py",
        "bound = first * second - 1e-6",
        "bound = 100 * first * second",
        "paper::deviations_start",
    ),
    Mutant(
        "samples beyond two deviations",
        "apusmog_core/config.py",
        "sample_limit=2.0",
        "sample_limit=0.0",
        "paper::two_deviations",
    ),
    Mutant(
        "mixture weights do not place samples",
        f"{MODEL}/smog.py",
        "self.log_weight.detach().double().exp().cumsum(dim=-1)",
        "torch.full_like(self.log_weight, 1 / self.log_weight.shape[1]).double().cumsum(dim=-1)",
        "paper::weights",
    ),
    Mutant(
        "mixture weights learn nothing",
        f"{MODEL}/losses.py",
        "(weight - weight.detach()).exp()",
        "(weight - weight).detach().exp()",
        "paper::weights_learn",
    ),
    Mutant(
        "refinement on the encoder's features",
        f"{MODEL}/network.py",
        "gather(encoded.features.detach(), own)",
        "gather(encoded.memory.detach(), own)",
        "paper::refinement_sees",
    ),
    Mutant(
        "refinement at the second nearest input point",
        f"{MODEL}/network.py",
        "nearest_between(coarse, encoded.points, 1)[:, :, 0]",
        "nearest_between(coarse, encoded.points, 2)[:, :, 1]",
        "paper::refinement_sees",
    ),
    Mutant(
        "paper with half the neighbours",
        "apusmog_core/config.py",
        "neighbours=32,",
        "neighbours=16,",
        "paper::sizes",
    ),
    Mutant(
        "paper with a wider encoder",
        "apusmog_core/config.py",
        'encoder_hidden: int = setting(64, "hidden size of the encoder',
        'encoder_hidden: int = setting(128, "hidden size of the encoder',
        "paper::sizes",
    ),
    Mutant(
        "paper with another schedule",
        "config/train/paper.yaml",
        "rate_end: 1.0e-6",
        "rate_end: 1.0e-5",
        "paper::sizes",
    ),
    Mutant(
        "measured points among the paper's candidates",
        "apusmog_core/surface/grow.py",
        "elif self.plain:",
        "elif not self.config:",
        "paper::papers_way",
    ),
    Mutant(
        "the paper's outputs relaxed",
        "apusmog_core/surface/grow.py",
        "made = chosen if self.plain else relax(chosen, found, fixed)",
        "made = relax(chosen, found, fixed)",
        "paper::papers_way",
    ),
    # --- losses and training ---
    Mutant(
        "reconstruction against the target",
        f"{MODEL}/losses.py",
        "augmented_chamfer(means, points)",
        "augmented_chamfer(means, target)",
        "paper::total_loss",
    ),
    Mutant(
        "reconstruction from noisy samples",
        f"{MODEL}/losses.py",
        "network.decode(encoded, mixture.mean, refine=False)",
        "network.decode(encoded, samples, counts, refine=False)",
        "paper::total_loss",
    ),
    Mutant(
        "reconstruction with weight zero",
        f"{MODEL}/losses.py",
        "augmented_chamfer(means, points) * config.lambda_reconstruction",
        "augmented_chamfer(means, points) * 0.0",
        "paper::total_loss",
    ),
    Mutant(
        "refined loss on coarse points",
        f"{MODEL}/losses.py",
        "loss(out.fine, target",
        "loss(out.coarse, target",
        "paper::total_loss",
    ),
    Mutant(
        "projection loss one way",
        f"{MODEL}/losses.py",
        "        z, x, alpha, neighbours, back\n",
        "        x, z, alpha, neighbours, there\n",
        "losses::projection_loss",
    ),
    Mutant(
        "the better direction of the augmented Chamfer distance",
        f"{MODEL}/losses.py",
        "torch.maximum(one_way(x, z), one_way(z, x))",
        "torch.minimum(one_way(x, z), one_way(z, x))",
        "losses::augmented",
    ),
    Mutant(
        "interior loss at the border",
        f"{MODEL}/losses.py",
        "counted = inside.float()",
        "counted = torch.ones_like(inside).float()",
        "losses::interior",
    ),
    Mutant(
        "saved weights not the average",
        f"{TRAIN}/loop.py",
        "weights.save(self.average, path",
        "weights.save(self.network, path",
        "train::saved_is_the_average",
    ),
    Mutant(
        "average that stays at the start",
        f"{TRAIN}/loop.py",
        "torch._foreach_lerp_(average, mine, 1 - decay)",
        "torch._foreach_lerp_(average, mine, 0.0)",
        "train::average_follows",
    ),
    Mutant(
        "no clipping",
        f"{TRAIN}/loop.py",
        "config.clip or math.inf",
        "math.inf",
        "train::clipped",
    ),
    Mutant(
        "no weight decay",
        f"{TRAIN}/loop.py",
        '{"params": matrices, "weight_decay": decay}',
        '{"params": matrices, "weight_decay": 0.0}',
        "train::decay",
    ),
    Mutant(
        "statistics of batch norms not saved",
        f"{TRAIN}/loop.py",
        "theirs.copy_(own)",
        "pass",
        "train::published",
    ),
    Mutant(
        "a checkpoint without the optimiser",
        f"{TRAIN}/loop.py",
        'for name in ("network", "average", "optimiser", "scaler"):',
        'for name in ("network", "average", "scaler"):',
        "train::twenty",
    ),
    # --- the sensor ---
    Mutant(
        "pointing prior of the rays ignored",
        f"{SENSOR}/network.py",
        "self.head(x, tokens, nearness[None])",
        "self.head(x, tokens, 0 * nearness[None])",
        "sensor_network::before_training",
    ),
    Mutant(
        "ring gap wrong by ten",
        f"{SENSOR}/view.py",
        "row[0] = polar[i, 2] + np.log(steps[a, 0])",
        "row[0] = polar[i, 2] + np.log(10 * steps[a, 0])",
        "shipped::lidar",
    ),
    Mutant(
        "steps up and down swapped",
        f"{SENSOR}/view.py",
        "steps[a, 0], steps[a, 1] = up, down",
        "steps[a, 0], steps[a, 1] = down, up",
        "sensor_view",
    ),
    Mutant(
        "hit labels inverted",
        f"{TRAIN}/ray_samples.py",
        "return ray_sample(graph, rows, np.stack(rays, axis=-1), hit)",
        "return ray_sample(graph, rows, np.stack(rays, axis=-1), ~hit)",
        "train::probes_say",
    ),
    Mutant(
        "sign of the depth target flipped",
        f"{TRAIN}/ray_samples.py",
        "(np.log(reach) - depth) / up",
        "(depth - np.log(reach)) / up",
        "train::probes_say",
    ),
    Mutant(
        "depth compared with the wrong sign",
        f"{SENSOR}/losses.py",
        "answers.depth - probes[..., 2]",
        "answers.depth + probes[..., 2]",
        "sensor_network::loss_of_a_batch",
    ),
    Mutant(
        "hits and misses exchanged in the outline",
        f"{SENSOR}/losses.py",
        "torch.where(hit, -met, intensity)",
        "torch.where(hit, intensity, -met)",
        "sensor_network::outline",
    ),
    Mutant(
        "means of the ray mixture ignored",
        f"{SENSOR}/network.py",
        "centre = offsets[..., :2] + component[..., :2]",
        "centre = offsets[..., :2]",
        "sensor_network::intensity_is",
    ),
    Mutant(
        "mirrored patches with unmirrored probes",
        f"{TRAIN}/ray_samples.py",
        'out["probes"][mirror, :, 0] *= -1',
        'out["probes"][mirror, :, 0] *= 1',
        "sensor_network::mirrored",
    ),
    Mutant(
        "range bias added instead of subtracted",
        f"{SENSOR}/view.py",
        "np.exp(polar[:, 2]) - scan.bias",
        "np.exp(polar[:, 2]) + scan.bias",
        "calibrate",
    ),
    Mutant(
        "confidence without the expected error",
        f"{SENSOR}/lattice.py",
        "along = met * (1 - np.exp(-tolerance / (np.exp(log_scale) * metres)))",
        "along = met",
        "sensor_lattice",
    ),
    # --- segmentation and pipeline ---
    Mutant(
        "rings from the top down",
        f"{SEGMENT}/rings.py",
        'by_height = seen[np.argsort(middle[seen], kind="stable")]',
        'by_height = seen[np.argsort(-middle[seen], kind="stable")]',
        "rings",
    ),
    Mutant(
        "ground of no thickness",
        f"{SEGMENT}/ground.py",
        "height < self.config.thickness, height",
        "height < -1.0, height",
        "segment",
    ),
    Mutant(
        "instances from far to near",
        f"{SEGMENT}/cluster.py",
        'rank[np.argsort(nearest, kind="stable")]',
        'rank[np.argsort(-nearest, kind="stable")]',
        "segment",
    ),
    Mutant(
        "objects of any few points",
        f"{SEGMENT}/cluster.py",
        "(count >= config.min_points) & ",
        "",
        "segment",
    ),
    Mutant(
        "boxes turned to their shorter side",
        f"{SEGMENT}/boxes.py",
        "np.where(longer, ANGLES[best], ANGLES[best] + np.pi / 2)",
        "np.where(longer, ANGLES[best] + np.pi / 2, ANGLES[best])",
        "boxes",
    ),
    Mutant(
        "counts that do not add up",
        "apusmog_core/pipeline.py",
        'counts[np.argsort(counts - wanted, kind="stable")[:missing]] += 1',
        "pass",
        "pipeline::exact or shares",
    ),
    Mutant(
        "measured points held to a confidence",
        "apusmog_core/pipeline.py",
        "sure = ~dense.generated | (dense.confidence >= self.config.min_confidence)",
        "sure = dense.confidence > 1 + 0 * self.config.min_confidence",
        "pipeline::unsure",
    ),
    Mutant(
        "intensity of the wrong points",
        "apusmog_core/pipeline.py",
        "segments.intensity.take(dense.source)",
        "segments.intensity.take(dense.source[::-1])",
        "pipeline",
    ),
    Mutant(
        "largest objects first in a budget",
        "apusmog_core/pipeline.py",
        'order = np.argsort(sizes, kind="stable")',
        'order = np.argsort(-sizes, kind="stable")',
        "pipeline::budget",
    ),
    # --- ROS ---
    Mutant(
        "age that ignores nanoseconds",
        "apusmog_ros/upsample_node.py",
        "(stamp.sec * 1e3 + stamp.nanosec / 1e6)",
        "(stamp.sec * 1e3)",
        "stages::nanoseconds",
    ),
    Mutant(
        "answers in the order they are ready",
        "apusmog_ros/stages.py",
        "self._results[number] = result",
        "self._results[self._answered + len(self._results)] = result",
        "stages::longer",
    ),
    Mutant(
        "measured points written again",
        "apusmog_ros/cloud.py",
        "axis[generated] = points[generated, at]",
        "axis[:] = points[:, at] + 1e-3",
        "fields",
    ),
    Mutant(
        "appended fields left at zero",
        "apusmog_ros/cloud.py",
        "extra[name] = values[name]",
        "extra[name] = 0",
        "fields",
    ),
    Mutant(
        "byte order of the input forgotten",
        "apusmog_ros/cloud.py",
        "msg.is_bigendian = source.is_bigendian",
        "msg.is_bigendian = False",
        "fields",
    ),
    Mutant(
        "row step of one point",
        "apusmog_ros/cloud.py",
        "msg.point_step, msg.row_step = step, step * count",
        "msg.point_step, msg.row_step = step, step * max(count, 1)",
        "cloud",
    ),
    Mutant(
        "Hausdorff distances of both definitions exchanged",
        "apusmog_core/evaluation/metrics.py",
        '"hd": float(max(there.max(), back.max()))',
        '"hd": float(there.max() + back.max())',
        "metrics",
    ),
]


if __name__ == "__main__":
    sys.exit(main())
