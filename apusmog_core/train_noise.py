# SPDX-License-Identifier: Apache-2.0
"""Trains the cleaner of noise.py on points of meshes, moved by known noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from .data.meshes import find_meshes, sampled
from .mesh import COPY
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
HELD = 10  # every tenth object is for the printed scores


def train_cleaner(meshes: Path, cache: Path, seed: int = 0) -> Cleaner:
    """A cleaner for clouds like those of the meshes in a folder."""
    paths = find_meshes(meshes)
    objects = sorted({_object(path) for path in paths})
    if len(objects) < 2:
        raise ValueError(f"{meshes}: two objects at least, as one is held back to score")
    torch.manual_seed(seed)
    data = examples(paths, cache, seed)
    held = {number for number, path in enumerate(paths) if objects.index(_object(path)) % HELD == 0}
    train = torch.tensor([int(number) not in held for number in data["mesh"]])
    sizes = [data[name].shape[-1] for name in ("signed", "unsigned", "told")]
    cleaner = Cleaner(*sizes)
    relative = _train_level(cleaner, data, train)
    _train_trust(cleaner, data, train, relative)
    return cleaner


def _object(path: Path) -> str:
    """A mesh and its smooth copy are one object."""
    return path.stem.removesuffix(COPY)


def _train_level(cleaner: Cleaner, data: dict[str, Tensor], train: Tensor) -> Tensor:
    """Learns the noise of clouds (c,); ln of its guess, in the spacings of points (c, p)."""
    told, target = data["told"], (data["noise"] + FLOOR).log()
    _scale(cleaner, "told", told[train])

    def error(i: Tensor) -> Tensor:
        return cleaner.log_noise(told[i]) - target[i]

    _descend(cleaner.level, error, train, LEVEL_STEPS, "noise of clouds")
    with torch.no_grad():
        for name, rows in (("trained on", train), ("held back", ~train)):
            print(f"ln(noise), {name}: {error(rows).square().mean().sqrt():.2f} off")
        guess = cleaner.log_noise(told).exp().sub(FLOOR).clamp_min(0)
        return (guess[:, None] * data["typical"] + FLOOR).log()


def _train_trust(cleaner: Cleaner, data: dict[str, Tensor], train: Tensor, log_noise: Tensor):
    """Learns the heights of points, told the same about noise as in use."""
    signed, unsigned, height = (data[n].flatten(0, 1) for n in ("signed", "unsigned", "height"))
    height = height.clamp(-LARGEST_HEIGHT, LARGEST_HEIGHT)
    even = (data["noise"][:, None] * data["typical"]).flatten() + EVEN_NOISE
    train, log_noise = train.repeat_interleave(log_noise.shape[1]), log_noise.flatten()
    _scale(cleaner, "unsigned", torch.cat((unsigned, log_noise[:, None]), dim=1)[train])
    cleaner.signed_scale.copy_(signed[train].std(dim=0) + 1e-3)

    def off(i: Tensor) -> Tensor:
        return cleaner.height(signed[i], unsigned[i], log_noise[i]) - height[i]

    _descend(cleaner.trust, lambda i: off(i) / even[i], train, TRUST_STEPS, "heights")
    with torch.no_grad():
        before, after = (t.square().mean().sqrt() for t in (height[~train], off(~train)))
    print(f"held back: {before:.3f} spacings off the surface before, {after:.3f} after")


def examples(paths: list[Path], cache: Path, seed: int) -> dict[str, Tensor]:
    """Noisy clouds: fits of some of their points, noise in typical spacings, and true heights."""
    from tqdm import tqdm

    rows = []
    for number, path in enumerate(tqdm(paths, desc="noisy clouds", unit="mesh")):
        scene = mesh_surface(path)
        rng = np.random.default_rng((seed, number))
        surface = sampled(path, seed, cache)
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
    some = rng.permutation(len(noisy))[:PICKED]
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


def _descend(network, error, train: Tensor, steps: int, name: str) -> None:
    """Least squares of the errors of rows, drawn from those to train on."""
    from tqdm import tqdm

    rows = torch.nonzero(train)[:, 0]
    optimiser = torch.optim.AdamW(network.parameters(), RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps)
    for _ in tqdm(range(steps), desc=name, unit="step", mininterval=2):
        value = error(rows[torch.randint(len(rows), (BATCH,))]).square().mean()
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        schedule.step()
