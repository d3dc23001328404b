# SPDX-License-Identifier: Apache-2.0
"""Trains the cleaner of noise.py on points of meshes, moved by known noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from .data.meshes import SPARSE, find_meshes, sampled
from .metrics import mesh_surface
from .noise import FLOOR, Cleaner, fit, quantiles, typical_spacing

DRAWS = 2  # noisy versions of each sampling
NO_NOISE = 0.15  # share of clouds without any
LARGEST_NOISE = 0.55  # spacings
PICKED = 512  # points of each cloud
LARGEST_HEIGHT = 1.5  # spacings: farther is another part of the object
EVEN_NOISE = 0.3  # spacings: errors count relative to the noise and this
BATCH = 2048
LEVEL_STEPS, TRUST_STEPS = 3000, 16_000
RATE = 3e-3
HELD_BACK = 10  # every tenth mesh is for the printed scores


def train_cleaner(meshes: str, cache: str, seed: int = 0) -> Cleaner:
    """A cleaner for clouds like those of the meshes in a folder."""
    torch.manual_seed(seed)
    data = examples(meshes, cache, seed)
    _, points, signed = data["signed"].shape
    cleaner = Cleaner(signed, data["unsigned"].shape[2], data["told"].shape[1])
    train = data["mesh"] % HELD_BACK != 0

    target = (data["noise"] + FLOOR).log()
    _scale(cleaner, "told", data["told"][train])
    told = data["told"]
    _descend(
        cleaner.level,
        lambda i: (cleaner.log_noise(told[i]) - target[i]).square().mean(),
        torch.nonzero(train)[:, 0],
        LEVEL_STEPS,
        "noise of clouds",
    )
    with torch.no_grad():  # what is known of a cloud's noise in use, too, relative to each spacing
        guess = cleaner.log_noise(told).exp().sub(FLOOR).clamp_min(0)
        relative = (guess[:, None] * data["typical"] + FLOOR).log().flatten()
    signed, unsigned, height = (data[n].flatten(0, 1) for n in ("signed", "unsigned", "height"))
    height = height.clamp(-LARGEST_HEIGHT, LARGEST_HEIGHT)
    scale = (data["noise"][:, None] * data["typical"]).flatten() + EVEN_NOISE
    train = train.repeat_interleave(points)
    _scale(cleaner, "unsigned", torch.cat((unsigned, relative[:, None]), dim=1)[train])
    _scale(cleaner, "signed", signed[train])

    def error(i: Tensor) -> Tensor:
        return (cleaner.height(signed[i], unsigned[i], relative[i]) - height[i]) / scale[i]

    rows = torch.nonzero(train)[:, 0]
    _descend(cleaner.trust, lambda i: error(i).square().mean(), rows, TRUST_STEPS, "heights")
    with torch.no_grad():
        off = error(~train) * scale[~train]
    before = height[~train].square().mean().sqrt()
    print(f"held back: {before:.3f} spacings off before, {off.square().mean().sqrt():.3f} after")
    return cleaner


def examples(meshes: str, cache: str, seed: int) -> dict[str, Tensor]:
    """Noisy clouds: fits of some of their points, noise in typical spacings, and true heights."""
    from tqdm import tqdm

    rows = []
    for number, path in enumerate(tqdm(find_meshes(meshes), desc="noisy clouds", unit="mesh")):
        scene = mesh_surface(path)
        rng = np.random.default_rng((seed, number))
        surface = sampled(path, seed, Path(cache))
        for sparse in surface.sparse:
            rows += [_example(sparse.astype(float), scene, number, rng) for _ in range(DRAWS)]
    return {name: torch.from_numpy(np.stack([r[name] for r in rows])) for name in rows[0]}


def _example(points: np.ndarray, scene, number: int, rng: np.random.Generator) -> dict:
    noise = rng.uniform(0, LARGEST_NOISE) * (rng.random() >= NO_NOISE)
    noise *= typical_spacing(points)
    noisy = points + noise * rng.standard_normal(points.shape)
    fits = fit(cKDTree(noisy), np.arange(len(noisy)))
    true = scene.compute_closest_points(noisy.astype(np.float32))["points"].numpy()
    height = ((true - noisy) * fits.normal).sum(axis=1) / fits.spacing
    some = rng.permutation(len(noisy))[: min(PICKED, min(SPARSE))]
    # relative to what the noisy cloud shows: the spacing of the clean one is not known in use
    shown = np.median(fits.spacing)
    return {
        "signed": fits.signed[some],
        "unsigned": fits.unsigned[some],
        "told": quantiles(fits),
        "noise": np.float32(noise / shown),
        "typical": (shown / fits.spacing[some]).astype(np.float32),
        "height": height[some].astype(np.float32),
        "mesh": np.int64(number),
    }


def _scale(cleaner: Cleaner, name: str, values: Tensor) -> None:
    getattr(cleaner, f"{name}_mean").copy_(values.mean(dim=0))
    getattr(cleaner, f"{name}_scale").copy_(values.std(dim=0) + 1e-3)


def _descend(network, loss, rows: Tensor, steps: int, name: str) -> None:
    from tqdm import tqdm

    optimiser = torch.optim.AdamW(network.parameters(), RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps)
    for _ in tqdm(range(steps), desc=name, unit="step", mininterval=2):
        value = loss(rows[torch.randint(len(rows), (BATCH,))])
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        schedule.step()
