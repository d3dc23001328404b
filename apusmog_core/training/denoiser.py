# SPDX-License-Identifier: Apache-2.0
"""Trains the denoiser (surface/denoise.py) on points of meshes, moved by known noise."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from ..compute import processes
from ..geometry import typical_spacing
from ..surface.denoise import FLOOR, MIN_POINTS, Denoiser, find_normals, fit, noise_features
from ..surface.mesh import read_mesh
from ..weights import store
from .patches import find_meshes, poisson_disk

CLOUDS = 4  # of each mesh
SIZES = (512, 1024, 2048, 4096)  # their points: with fewer, a mesh has thinner parts
CLEAN_SHARE = 0.2  # of the clouds
MOST_NOISE = 0.65  # spacings
PLACES = 256  # of each cloud, and as many beside its points, as upsampling makes them
BESIDE = 0.2  # spacings: how far those lie from the surface
FARTHEST = 1.5  # spacings: beyond is another part of the object
EVEN_NOISE = 0.3  # spacings: errors count relative to the noise and this
ESTIMATE = 0.15  # ln: how far the noise is misjudged in use
BATCH, RATE, STEPS = 2048, 3e-3, 8000
HELD = 10  # every tenth mesh is for the printed scores


def train_denoiser(meshes: Path, seed: int = 0) -> Denoiser:
    """A denoiser for clouds like those of the meshes in a folder."""
    paths = find_meshes(meshes)
    if len(paths) < 2:
        raise ValueError(f"{meshes}: two meshes at least, as one is held back to score")
    torch.manual_seed(seed)
    clouds = _sample_clouds(paths, seed)
    denoiser = Denoiser(clouds["signed"].shape[-1], clouds["unsigned"].shape[-1])
    _solve_noise(denoiser, _only(clouds, clouds["count"] >= MIN_POINTS))
    _train_weights(denoiser, _only(clouds, clouds["noise"] > 0))
    return denoiser


def save_denoiser(denoiser: Denoiser, path: Path) -> None:
    store({"sizes": denoiser.sizes, "state": denoiser.state_dict()}, path)


def _only(clouds: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    return {name: values[rows] for name, values in clouds.items()}


def _solve_noise(denoiser: Denoiser, clouds: dict[str, Tensor]) -> None:
    """Least squares of ln(noise) over clouds (c,)."""
    held = clouds["mesh"] % HELD == 0
    features, target = clouds["features"].double(), (clouds["noise"] + FLOOR).log().double()
    mean, offset = features[~held].mean(dim=0), target[~held].mean()
    a, b = (features - mean)[~held], (target - offset)[~held]
    ridge = 1e-3 * len(a) * torch.eye(a.shape[1], dtype=a.dtype)
    slope = torch.linalg.solve(a.T @ a + ridge, a.T @ b)
    with torch.no_grad():
        denoiser.log_noise.weight.copy_(slope[None])
        denoiser.log_noise.bias.copy_(offset - mean @ slope)
        off = denoiser.log_noise(clouds["features"])[held, 0] - target[held]
    print(f"held back: ln(noise) is {off.square().mean().sqrt():.2f} off")


def _train_weights(denoiser: Denoiser, clouds: dict[str, Tensor]) -> None:
    """Learns the moves (c, p, 2) from places to the surface."""
    from tqdm import tqdm

    held = (clouds["mesh"] % HELD == 0).repeat_interleave(clouds["moves"].shape[1])
    names = ("signed", "unsigned", "moves", "local_noise")
    signed, unsigned, moves, noise = (clouds[name].flatten(0, 1) for name in names)
    shape = torch.cat((unsigned, (noise + FLOOR).log()[:, None]), dim=1)[~held]
    denoiser.shape_mean.copy_(shape.mean(dim=0))
    denoiser.shape_scale.copy_(shape.std(dim=0) + 1e-3)
    denoiser.signed_scale.copy_(signed[~held].std(dim=0) + 1e-3)

    rows = torch.nonzero(~held)[:, 0]
    optimiser = torch.optim.AdamW(denoiser.weigh.parameters(), RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=STEPS)
    for _ in tqdm(range(STEPS), desc="weights of fits", unit="step", mininterval=2):
        some = rows[torch.randint(len(rows), (BATCH,))]
        estimate = noise[some] * (ESTIMATE * torch.randn(BATCH)).exp()
        off = denoiser(signed[some], unsigned[some], estimate) - moves[some]
        loss = (off / (noise[some, None] + EVEN_NOISE)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        off = denoiser(signed[held], unsigned[held], noise[held]) - moves[held]
    before, after = (t[:, 0].square().mean().sqrt() for t in (moves[held], off))
    print(f"held back: {before:.3f} spacings off the surface before, {after:.3f} after")


# --- clouds --------------------------------------------------------------------------------------


def _sample_clouds(paths: list[Path], seed: int) -> dict[str, Tensor]:
    """Noisy clouds, what their fits show, and the truth; each names its mesh."""
    from tqdm import tqdm

    with processes(len(paths)) as pool:
        found = pool.imap(partial(_clouds_of, seed=seed), enumerate(paths))
        rows = sum(tqdm(found, desc="noisy clouds", unit="mesh", total=len(paths)), [])
    return {name: torch.from_numpy(np.stack([r[name] for r in rows])) for name in rows[0]}


def _clouds_of(numbered: tuple[int, Path], seed: int) -> list[dict]:
    import open3d as o3d

    number, path = numbered
    rng = np.random.default_rng((seed, number))
    o3d.utility.random.seed(int(rng.integers(2**31)))
    mesh = read_mesh(path)
    scene = o3d.t.geometry.RaycastingScene()
    scene.add_triangles(o3d.t.geometry.TriangleMesh.from_legacy(mesh))
    rows = []
    for _ in range(CLOUDS):
        noise = rng.uniform(0, MOST_NOISE) * (rng.random() >= CLEAN_SHARE)
        row = _describe(mesh, scene, int(rng.choice(SIZES)), noise, rng)
        rows.append({**row, "mesh": number})
    return rows


def _describe(mesh, scene, count: int, noise: float, rng: np.random.Generator) -> dict:
    """One cloud of a mesh with noise, in spacings: what its fits show, and the truth."""
    clean = poisson_disk(mesh, count)
    spacing = typical_spacing(clean)
    noisy = clean + noise * spacing * rng.standard_normal(clean.shape)
    beside = np.asarray(mesh.sample_points_uniformly(PLACES).points)
    beside = beside + BESIDE * spacing * rng.standard_normal(beside.shape)
    at = np.concatenate((rng.permutation(noisy)[:PLACES], beside))
    tree = cKDTree(noisy)
    fits = fit(tree, find_normals(tree), at)
    true = scene.compute_closest_points(at.astype(np.float32))["points"].numpy()
    away = (true - at) / fits.spacing[:, None]
    moves = np.stack([(away * way).sum(axis=1) for way in (fits.normal, fits.inward)], axis=1)
    features, typical = noise_features(tree)  # the spacing of the clean cloud is not known in use
    return {
        "count": count,
        "features": features,
        "noise": np.float32(noise * spacing / typical),
        "local_noise": (noise * spacing / fits.spacing).astype(np.float32),
        "signed": fits.signed,
        "unsigned": fits.unsigned,
        "moves": moves.clip(-FARTHEST, FARTHEST).astype(np.float32),
    }
