# SPDX-License-Identifier: Apache-2.0
"""Trains the cleaner of noise.py on points of meshes, moved by known noise."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor, nn

from ..compute import processes
from ..evaluation.metrics import mesh_surface
from ..surface.denoise import (
    FLOOR,
    LEAST_POINTS,
    Cleaner,
    Trust,
    all_normals,
    clean,
    fit,
    load_cleaner,
    quantiles,
    save_cleaner,
    some_of,
    typical_spacing,
)
from ..surface.mesh import COPY
from ..upsampler import Upsampler
from .patches import find_meshes, sampled

LEVEL_DRAWS, TRUST_DRAWS = 3, 1  # noisy versions of each sampling
NO_NOISE = 0.15  # share of clouds without any
LARGEST_NOISE = 0.65  # spacings
PASSES = 3
MOST_UPSAMPLED, RATIO = 2048, 4.0  # points of a cloud: larger ones take long
PICKED = LEAST_POINTS  # of each cloud
FARTHEST = 1.5  # spacings: beyond is another part of the object
EVEN_NOISE = 0.3  # spacings: errors count relative to the noise and this
BATCH = 2048
JITTER = 0.1  # deviations, of what clouds tell: few clouds, many numbers of each
LEVEL_STEPS, TRUST_STEPS = 3000, 16_000
RATE = 3e-3
HELD = 10  # every tenth object is for the printed scores


def train_cleaner(meshes: Path, cache: Path, seed: int = 0) -> Cleaner:
    """A cleaner for clouds like those of the meshes in a folder."""
    paths = find_meshes(meshes)
    objects = sorted({_object(path) for path in paths})
    if len(objects) < 2:
        raise ValueError(f"{meshes}: two objects at least, as one is held back to score")
    held = {number for number, path in enumerate(paths) if objects.index(_object(path)) % HELD == 0}
    torch.manual_seed(seed)
    data = examples(paths, cache, seed, LEVEL_DRAWS, told_of)
    cleaner = Cleaner(data["told"].shape[-1])
    _train_level(cleaner, data, _not_in(held, data["mesh"]))

    def trained(number: int, describe: Callable, name: str) -> Trust:
        so_far = cache / f"cleaner-{number}.pth"  # a file for all processes
        save_cleaner(cleaner, so_far)
        describe = partial(describe, cleaner=so_far)
        data = examples(paths, cache, seed + number, TRUST_DRAWS, describe)
        trust = Trust(data["signed"].shape[-1], data["unsigned"].shape[-1])
        _train_trust(trust, data, _not_in(held, data["mesh"]), name)
        return trust.requires_grad_(False)

    for number in range(PASSES):
        cleaner.passes.append(trained(number, moves_of, f"pass {number + 1}"))
    cleaner.upsampled = trained(PASSES, upsampled_moves_of, "what is upsampled")
    return cleaner


def _object(path: Path) -> str:
    """A mesh and its smooth copy are one object."""
    return path.stem.removesuffix(COPY)


def _not_in(held: set[int], meshes: Tensor) -> Tensor:
    return torch.tensor([number not in held for number in meshes.tolist()])


def _train_level(cleaner: Cleaner, data: dict[str, Tensor], train: Tensor) -> None:
    """Learns the noise of clouds (c,)."""
    told, target = data["told"], (data["noise"] + FLOOR).log()
    _scale(cleaner, "told", told[train])

    def error(i: Tensor, jitter: float = 0.0) -> Tensor:
        given = told[i] + jitter * cleaner.told_scale * torch.randn_like(told[i])
        return cleaner.log_noise(given) - target[i]

    _descend(cleaner.level, partial(error, jitter=JITTER), train, LEVEL_STEPS, "noise of clouds")
    with torch.no_grad():
        for name, rows in (("trained on", train), ("held back", ~train)):
            print(f"ln(noise), {name}: {error(rows).square().mean().sqrt():.2f} off")


def _train_trust(trust: Trust, data: dict[str, Tensor], train: Tensor, name: str) -> None:
    """Learns the moves of points (c, p, 2)."""
    train = train.repeat_interleave(data["move"].shape[1])
    signed, unsigned, move, log_noise, noise = (
        data[n].flatten(0, 1) for n in ("signed", "unsigned", "move", "log_noise", "noise")
    )
    _scale(trust, "shape", torch.cat((unsigned, log_noise[:, None]), dim=1)[train])
    trust.signed_scale.copy_(signed[train].std(dim=0) + 1e-3)

    def off(i: Tensor) -> Tensor:
        return trust(signed[i], unsigned[i], log_noise[i]) - move[i]

    _descend(trust, lambda i: off(i) / (noise[i, None] + EVEN_NOISE), train, TRUST_STEPS, name)
    with torch.no_grad():
        before, after = (t.square().mean(dim=0).sqrt() for t in (move[~train], off(~train)))
    for way, *error in zip(("along the normal", "inward"), before, after, strict=True):
        print(f"held back, {name}: {error[0]:.3f} spacings off {way} before, {error[1]:.3f} after")


# --- examples ------------------------------------------------------------------------------------


def examples(
    paths: list[Path], cache: Path, seed: int, draws: int, describe: Callable
) -> dict[str, Tensor]:
    """What there is to know of noisy clouds, and the number of their mesh; on all cores."""
    from tqdm import tqdm

    of_mesh = partial(_of_mesh, cache=cache, seed=seed, draws=draws, describe=describe)
    with processes(len(paths)) as pool:
        found = pool.imap(of_mesh, enumerate(paths))
        rows = sum(tqdm(found, desc="noisy clouds", unit="mesh", total=len(paths)), [])
    if not rows:
        raise ValueError("no cloud of these meshes looks noisy: more of them, or smoother ones")
    return {name: torch.from_numpy(np.stack([r[name] for r in rows])) for name in rows[0]}


def _of_mesh(
    numbered: tuple[int, Path], cache: Path, seed: int, draws: int, describe: Callable
) -> list[dict]:
    number, path = numbered
    rng = np.random.default_rng((seed, number))
    scene = mesh_surface(path)
    rows = []
    for sparse in draws * sampled(path, 0, cache).sparse:
        noise = rng.uniform(0, LARGEST_NOISE) * (rng.random() >= NO_NOISE)
        noise *= typical_spacing(sparse)
        noisy = sparse + noise * rng.standard_normal(sparse.shape)
        found = describe(noisy, noise, scene, rng)
        if found:
            rows.append({**found, "mesh": number})
    return rows


def told_of(noisy: np.ndarray, noise: float, *_) -> dict:
    """What the fits tell of a cloud, and its noise, relative to what it shows: the spacing of the
    clean one is not known in use."""
    fits = fit(cKDTree(noisy), some_of(noisy))
    return {"told": quantiles(fits), "noise": np.float32(noise / np.median(fits.spacing))}


def moves_of(noisy: np.ndarray, noise: float, scene, rng, cleaner: Path) -> dict | None:
    """Fits of some points after the passes so far, and how far they still are from the surface."""
    cleaner = load_cleaner(cleaner)
    found, estimate = clean(noisy, cleaner)
    if not estimate:
        return None  # passes as clean, in use as well
    measured = noisy if len(cleaner.passes) else None
    return _still_off(rng.permutation(found)[:PICKED], found, measured, noise, estimate, scene)


def upsampled_moves_of(noisy: np.ndarray, noise: float, scene, rng, cleaner: Path) -> dict | None:
    """The same of some points that `default` makes of the cleaned ones."""
    if len(noisy) > MOST_UPSAMPLED:
        return None
    upsampler = _upsampler(cleaner)
    found, estimate = clean(noisy, upsampler.way.denoiser)
    if not estimate:
        return None
    made = upsampler.upsample(noisy, RATIO)
    return _still_off(rng.permutation(made)[:PICKED], found, noisy, noise, estimate, scene)


@lru_cache
def _upsampler(cleaner: Path) -> Upsampler:
    upsampler = Upsampler.load("shape", device="cpu")
    upsampler.way.denoiser = load_cleaner(cleaner)
    return upsampler


def _still_off(
    at: np.ndarray,
    points: np.ndarray,
    measured: np.ndarray | None,
    noise: float,
    estimate: float,
    scene,
) -> dict:
    tree = cKDTree(points)
    fits = fit(tree, at, all_normals(tree), measured)
    true = scene.compute_closest_points(at.astype(np.float32))["points"].numpy()
    away = (true - at) / fits.spacing[:, None]
    move = np.stack([(away * way).sum(axis=1) for way in (fits.normal, fits.inward)], axis=1)
    return {
        "signed": fits.signed,
        "unsigned": fits.unsigned,
        "move": move.clip(-FARTHEST, FARTHEST).astype(np.float32),
        "log_noise": fits.log_noise(estimate),
        "noise": (noise / fits.spacing).astype(np.float32),
    }


# --- training ------------------------------------------------------------------------------------


def _scale(network: nn.Module, name: str, values: Tensor) -> None:
    getattr(network, f"{name}_mean").copy_(values.mean(dim=0))
    getattr(network, f"{name}_scale").copy_(values.std(dim=0) + 1e-3)


def _descend(network: nn.Module, error, train: Tensor, steps: int, name: str) -> None:
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
