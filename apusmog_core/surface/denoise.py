# SPDX-License-Identifier: Apache-2.0
"""Denoising: how noisy a cloud is, and where the surface lies that its points show.

Planes and quadrics are fitted around each place, narrow and wide: through all neighbours, those
near the plane, and those that also face the same way. Wide fits average more noise and cut more
corners: a small network weighs them (training/denoiser.py). Points of the cloud, and what is
upsampled from them, move in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor, nn

from ..compute import in_chunks
from ..geometry import principal_axes
from ..weights import FOLDER, load

WEIGHTS = FOLDER / "denoiser.pth"
MIN_POINTS = 1024  # with fewer, corners and noise look alike
CLEAN = 0.12  # spacings: a cloud with less noise is left as it is
MAX_MOVE = 3.0  # standard deviations of the noise; tips of thin parts look like outliers
MAX_INWARD = 0.6  # the same, in one pass: at a tip, noise hides as often as it adds
PASSES = 2  # nearer to the surface, the neighbours are better ones
NEIGHBOURS = 64
BANDWIDTHS = np.array([0.8, 1.2, 1.8, 2.8, 4.0])  # of the fits, in spacings
NARROW = 2  # bandwidths whose fits show the noise of a cloud
QUANTILES = (0.03, 0.1, 0.3, 0.5, 0.75)  # of these fits, over the cloud
SAMPLE = 2048  # points whose fits show it
FRAME_BANDWIDTH = 1.6  # of the plane that the heights are measured from
OUTLIER = 2.0  # residuals: points that far from the plane hardly count
TURN = 0.3  # sine of the angle between normals that agree
PLANE, QUADRIC = 3, 6  # coefficients: 1 u v, and u^2 uv v^2
MONOMIALS = [(i, d - i) for d in range(5) for i in range(d, -1, -1)]  # powers of u and v
FIRST = MONOMIALS[:QUADRIC]
PRODUCTS = np.array([[MONOMIALS.index((a + c, b + d)) for c, d in FIRST] for a, b in FIRST])
RIDGE = np.diag([1e-9] + [1e-4] * (QUADRIC - 1))
FLOOR = 0.03  # spacings, added to noise before a logarithm
LEAST = 0.01  # spacings, added to what the fits show


@dataclass
class Fits:
    """What planes and quadrics say about n places; all lengths but `spacing` in spacings."""

    normal: np.ndarray  # (n, 3)
    inward: np.ndarray  # (n, 3) along the surface, to where the neighbours are
    spacing: np.ndarray  # (n,)
    signed: np.ndarray  # (n, o) heights and curvatures: they change sign with the normal
    unsigned: np.ndarray  # (n, e) residuals, slopes, shares: they do not


def fit(tree: cKDTree, normals: np.ndarray, at: np.ndarray) -> Fits:
    """Fits around n places (n, 3) through the points of a tree, which have normals (N, 3)."""
    index, distance, spacing, away, axes = _neighbourhoods(tree, at)
    normal, columns = axes[..., 0], _columns(away @ axes)
    near = _gaussian(distance, BANDWIDTHS)
    height, residual = (a[:, 1, None] for a in _solve(near @ columns)[0][:2])  # of one plane
    off = ((away @ normal[..., None])[..., 0] - height) / np.maximum(residual, 4 * FLOOR)  # (n, k)
    likely = near * _gaussian(off, [OUTLIER])
    turned = 1 - (normals[index] @ normal[..., None])[..., 0] ** 2  # (n, k) squares of sines
    same = likely * np.exp(-0.5 * turned / TURN**2)[:, None]
    total = near.sum(axis=2)
    middle = (near @ away) / total[..., None]  # (n, s, 3)
    inward = middle[:, 2] - (middle[:, 2] * normal).sum(axis=1, keepdims=True) * normal
    inward /= np.linalg.norm(inward, axis=1, keepdims=True) + 1e-12
    signed, unsigned = [], [(middle @ inward[..., None])[..., 0]]  # large at tips and borders
    unsigned += [np.log(weight.sum(axis=2) / total + LEAST) for weight in (likely, same)]
    for weight in (near, likely, same):
        plane, quadric = _solve(weight @ columns)
        uu, uv, vv = np.moveaxis(quadric[-1], -1, 0)
        signed += [plane[0], quadric[0], uu + vv]
        unsigned.append(np.log(np.abs(uu * vv - uv**2 / 4) + LEAST))
        for _, residual, slope, _ in (plane, quadric):
            unsigned += [np.log(residual + LEAST), slope]
    return Fits(
        normal,
        inward,
        spacing,
        np.concatenate(signed, axis=1).clip(-3, 3).astype(np.float32),
        np.concatenate(unsigned, axis=1).clip(-6, 6).astype(np.float32),
    )


def _neighbourhoods(tree: cKDTree, at: np.ndarray) -> tuple[np.ndarray, ...]:
    """Neighbours of n places: index and distance (n, k); spacing (n,); offsets (n, k, 3) and axes
    (n, 3, 3), the normal first. Distances and offsets are in spacings."""
    distance, index = tree.query(at, k=min(NEIGHBOURS, tree.n))
    spacing = distance[:, 1:7].mean(axis=1)
    spacing = np.maximum(spacing, 0.1 * np.median(spacing) + 1e-12)
    away = (tree.data[index] - at[:, None]) / spacing[:, None, None]
    distance = distance / spacing[:, None]
    axes = principal_axes(away, _gaussian(distance, [FRAME_BANDWIDTH])[:, 0])
    return index, distance, spacing, away, axes


def _gaussian(distance: np.ndarray, bandwidths) -> np.ndarray:
    """Weights (n, s, k) of neighbours at distances (n, k)."""
    return np.exp(-0.5 * (distance[:, None] / np.asarray(bandwidths)[:, None]) ** 2)


def _columns(local: np.ndarray) -> np.ndarray:
    """The monomials of u and v, height times those of a quadric, and its square: (n, k, 22)."""
    height, u, v = np.moveaxis(local, -1, 0)  # (n, k) each
    columns = np.empty((*u.shape, len(MONOMIALS) + QUADRIC + 1))
    columns[..., 0] = 1
    for at, (i, j) in enumerate(MONOMIALS[1:], start=1):
        less, factor = ((i - 1, j), u) if i else ((i, j - 1), v)
        np.multiply(columns[..., MONOMIALS.index(less)], factor, out=columns[..., at])
    columns[..., len(MONOMIALS) : -1] = height[..., None] * columns[..., :QUADRIC]
    columns[..., -1] = height**2
    return columns


def _solve(sums: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """Plane and quadric of weighted sums (n, s, 22) of the columns: height, residual and slope
    (n, s) of each, and bends (n, s, 3): the coefficients of u^2, uv, v^2."""
    count = len(MONOMIALS)
    matrix, right = sums[..., PRODUCTS], sums[..., count : count + QUADRIC]
    fits = []
    for size in (PLANE, QUADRIC):
        m, b = matrix[..., :size, :size], right[..., :size]
        found = np.linalg.solve(m + RIDGE[:size, :size], b[..., None])[..., 0]  # (n, s, size)
        square = sums[..., -1] - 2 * (found * b).sum(-1)
        square += (found[..., None, :] @ m @ found[..., None])[..., 0, 0]
        residual = np.sqrt(np.maximum(square, 0) / np.maximum(sums[..., 0], 1e-12))
        slope = np.linalg.norm(found[..., 1:3], axis=-1)
        fits.append((found[..., 0], residual, slope, found[..., PLANE:]))
    return fits


def find_normals(tree: cKDTree) -> np.ndarray:
    """Normals (n, 3) of all points of a tree, to either side."""
    return in_chunks(lambda at: _neighbourhoods(tree, at)[-1][..., 0], tree.data, "normals")


def noise_features(tree: cKDTree) -> tuple[np.ndarray, float]:
    """What shows the noise of a cloud (q,), and its typical spacing.

    A point of a clean cloud lies on the narrow fits wherever the surface is smooth.
    """
    some = tree.data[np.linspace(0, tree.n - 1, min(tree.n, SAMPLE)).astype(int)]
    _, distance, spacing, away, axes = _neighbourhoods(tree, some)
    fits = _solve(_gaussian(distance, BANDWIDTHS[:NARROW]) @ _columns(away @ axes))
    shown = [np.log(np.abs(a) + LEAST) for f in fits for a in f[:2]]  # heights and residuals
    features = np.quantile(np.concatenate(shown, axis=1), QUANTILES, axis=0)
    return features.ravel().astype(np.float32), float(np.median(spacing))


# --- the network ---------------------------------------------------------------------------------


class Denoiser(nn.Module):
    """Weighs the fits around each place; the noise of a cloud is linear in what shows it."""

    def __init__(self, signed: int, unsigned: int, width: int = 64):
        super().__init__()
        self.sizes = (signed, unsigned, width)
        self.register_buffer("signed_scale", torch.ones(signed))
        self.register_buffer("shape_mean", torch.zeros(unsigned + 1))
        self.register_buffer("shape_scale", torch.ones(unsigned + 1))
        self.log_noise = nn.Linear(4 * NARROW * len(QUANTILES), 1)  # ln(noise + FLOOR), spacings
        self.weigh = nn.Sequential(
            nn.Linear(signed + unsigned + 1, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, signed + 2),
        )

    def forward(self, signed: Tensor, unsigned: Tensor, noise: Tensor) -> Tensor:
        """Moves (n, 2) along the normals and inward; these and the noise (n,) are in spacings.

        The first change sign with the normal, which has no side: so the weights are even in it.
        """
        shape = torch.cat((unsigned, (noise + FLOOR).log()[:, None]), dim=-1)
        shape = (shape - self.shape_mean) / self.shape_scale
        scaled = signed / self.signed_scale
        up, down = (self.weigh(torch.cat((sign * scaled, shape), dim=-1)) for sign in (1, -1))
        even, odd = up + down, up - down
        height = (0.15 * even[:, :-2] * signed).sum(-1) + 0.05 * odd[:, -2]
        return torch.stack((height, 0.05 * even[:, -1]), dim=-1)


@cache
def load_denoiser(path: Path = WEIGHTS) -> Denoiser:
    """The denoiser that ships, or one from a file."""
    try:
        stored = load(path)
        denoiser = Denoiser(*stored["sizes"])
        denoiser.load_state_dict(stored["state"])
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(
            f"{path}: not a denoiser ({type(error).__name__}); 'apusmog train-denoiser' writes one"
        ) from error
    return denoiser.eval().requires_grad_(False)


# --- clouds --------------------------------------------------------------------------------------


@dataclass
class NoisyCloud:
    """Points that scatter around a surface, and the way from any place to it."""

    tree: cKDTree
    noise: float  # standard deviation, in the unit of the points
    denoiser: Denoiser

    def __post_init__(self):
        self.normals = find_normals(self.tree)

    def project(self, places: np.ndarray) -> np.ndarray:
        """Places (n, 3) moved onto the surface, by at most MAX_MOVE standard deviations."""
        moves = np.zeros_like(places)
        for _ in range(PASSES):
            moves += in_chunks(self._moves, places + moves, "denoising")
            length = np.linalg.norm(moves, axis=1, keepdims=True)
            moves *= np.minimum(1, MAX_MOVE * self.noise / (length + 1e-12))
        return places + moves

    def _moves(self, at: np.ndarray) -> np.ndarray:
        fits = fit(self.tree, self.normals, at)
        given = fits.signed, fits.unsigned, (self.noise / fits.spacing).astype(np.float32)
        with torch.inference_mode():
            moves = self.denoiser(*map(torch.from_numpy, given)).numpy()
        up, inward = (fits.spacing[:, None] * moves).T[..., None]
        limit = MAX_INWARD * self.noise
        return up * fits.normal + inward.clip(-limit, limit) * fits.inward


def find_noise(points: np.ndarray, denoiser: Denoiser | None = None) -> NoisyCloud | None:
    """The points (n, 3) as a noisy cloud; None where they are clean, or too few to know."""
    tree = cKDTree(np.unique(points, axis=0))  # a duplicate would hide the noise
    if tree.n < MIN_POINTS:
        return None
    denoiser = denoiser or load_denoiser()
    features, spacing = noise_features(tree)
    with torch.inference_mode():
        noise = float(denoiser.log_noise(torch.from_numpy(features)).exp()) - FLOOR
    return NoisyCloud(tree, noise * spacing, denoiser) if noise > CLEAN else None
