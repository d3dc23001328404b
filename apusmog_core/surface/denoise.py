# SPDX-License-Identifier: Apache-2.0
"""How noisy a cloud is, and where its points would lie without the noise.

Planes and quadrics are fitted around each point, narrow and wide, through all neighbours or those
that face the same way. Wide ones average more noise out and cut more corners: how much to trust
each of them is what a small network knows. At tips and borders, where all neighbours lie on one
side, it also knows how far to move towards them. In a cloud that was cleaned once, corners and
outliers show better: further passes begin there. What is upsampled from such a cloud is spaced
evenly, since noise had scattered it, and settles on the surface in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor, nn

from ..compute import even_parts, in_threads
from ..weights import FOLDER, load, store

WEIGHTS = FOLDER / "cleaner.pth"
NEIGHBOURS = 64
LEAST_POINTS = 1024  # fewer do not tell corners from noise
BANDWIDTHS = np.array([0.8, 1.1, 1.5, 2.0, 2.8, 4.0])  # of the fits, in spacings
FRAME_BANDWIDTH = 1.6  # of the plane that says where "up" is
PLANE, QUADRIC = 3, 6  # coefficients: 1 u v, and u^2 uv v^2
MONOMIALS = [(i, d - i) for d in range(5) for i in range(d, -1, -1)]  # powers of u and v
PRODUCTS = np.array(
    [
        [MONOMIALS.index((a + c, b + d)) for c, d in MONOMIALS[:QUADRIC]]
        for a, b in MONOMIALS[:QUADRIC]
    ]
)
RIDGE = np.diag([1e-9] + [1e-4] * (QUADRIC - 1))
TURN_BANDWIDTHS = (0.15, 0.4)  # sines of angles between normals: more is around a corner
ROBUST_SCALE = 2  # which bandwidth says, by its height and residual, what neighbours are outliers
NARROW = 3  # bandwidths whose residuals tell the noise of the cloud
QUANTILES = (0.01, 0.03, 0.1, 0.3, 0.5, 0.75)
SAMPLE = 4096  # points that tell how noisy a cloud is
CHUNK = 1024  # points that are fitted at once
FLOOR = 0.03  # spacings: noise that is nearly none
CLEAN = 0.08  # spacings: below, a cloud is left as it is
LARGEST_MOVE = 2.5  # deviations of the noise; tips of thin parts look like outliers
LARGEST_INWARD = 0.6  # deviations, in one pass: where a tip ends, noise hides as often as it adds
EVEN_STEPS = 12  # of points away from each other
EVEN_NEIGHBOURS = 12
EVEN_REACH = 1.5  # spacings: farther ones do not matter
EVEN_STEP = 0.4  # spacings, from a neighbour in the same place
BORDER = 0.25  # where the neighbours lie to one side by so much, a point begins to stay


@dataclass
class Fits:
    """What planes and quadrics say about n points; all lengths in spacings."""

    normal: np.ndarray  # (n, 3)
    inward: np.ndarray  # (n, 3) along the surface, to where the neighbours are
    spacing: np.ndarray  # (n,)
    signed: np.ndarray  # (n, o) heights and curvatures: they turn with the normal
    unsigned: np.ndarray  # (n, e) residuals, slopes, shape, shares: they do not
    telling: np.ndarray  # (n, t) logarithms whose distribution tells the noise of the cloud

    def log_noise(self, noise: float) -> np.ndarray:
        """ln(noise + FLOOR) (n,), the noise in the spacing of each point."""
        return np.log(noise / self.spacing + FLOOR).astype(np.float32)


def fit(
    tree: cKDTree,
    at: np.ndarray,
    normals: np.ndarray | None = None,
    measured: np.ndarray | None = None,
) -> Fits:
    """Planes and quadrics around n places (n, 3), through the points (N, 3) of a tree.

    Where these were moved from `measured` (N, 3), they also guide fits of those: what is near, and
    what is an outlier, shows better in a cleaner cloud, but the noise averages out in the measured.
    With the normals (N, 3) of all, fits too (of the measured, if there) through those that agree.
    """
    index, distance, spacing, away, spread, axes = _around(tree, at)
    height, u, v = np.moveaxis(away @ axes, -1, 0)  # (n, k) each
    columns = _columns(height, u, v)
    near = np.exp(-0.5 * (distance[:, None] / BANDWIDTHS[:, None]) ** 2)  # (n, s, k)
    sums = near @ columns
    plain = _solve(sums)
    centre, residual = (a[:, ROBUST_SCALE, None, None] for a in (plain[0][0], plain[0][3]))
    unlikely = (height[:, None] - centre) / (2 * np.maximum(residual, 4 * FLOOR))
    likely = near * np.exp(-0.5 * unlikely**2)
    solved, moved = [plain, _solve(likely @ columns)], []
    normal, tangents = axes[..., :1], axes[..., 1:]
    middle = (sums[..., 1:3] / sums[..., :1]) @ tangents.swapaxes(1, 2)  # (n, s, 3) of the near
    inward = middle[:, ROBUST_SCALE]
    inward = inward / (np.linalg.norm(inward, axis=1, keepdims=True) + 1e-12)
    aside = [(middle @ inward[..., None])[..., 0]]
    if measured is not None:
        before = (measured[index] - at[:, None]) / spacing[:, None, None]
        up = (before @ normal)[..., 0]  # (n, k), the nearest is the point itself, if it is one
        columns = _columns(up, u, v)
        solved += [_solve(near @ columns), _solve(likely @ columns)]
        moved = [up[:, :1]]
        aside.append((before[:, 0] * inward).sum(axis=1, keepdims=True))

    signed, unsigned, telling = [], [spread, *aside], []
    if normals is not None:
        turned = 1 - (normals[index] @ normal)[..., 0] ** 2  # (n, k) squares of sines
        for bandwidth in TURN_BANDWIDTHS:
            same = likely * np.exp(-0.5 * turned / bandwidth**2)[:, None]
            unsigned.append(np.log(same.sum(axis=2) / near.sum(axis=2) + 0.01))
            for heights, *_, residual in _solve(same @ columns):
                signed.append(heights)
                unsigned.append(np.log(residual + 0.01))
    for plane, quadric in solved:
        signed += [plane[0], quadric[0], quadric[2][..., 0] + quadric[2][..., 2]]
        bend = quadric[2][..., 0] * quadric[2][..., 2] - quadric[2][..., 1] ** 2 / 4
        unsigned.append(np.log(np.abs(bend) + 0.01))
        for heights, slope, _, residual in (plane, quadric):
            unsigned += [np.log(residual + 0.01), slope]
            narrow = (residual[:, :NARROW], np.abs(heights[:, :NARROW]))
            telling += [np.log(a + 1e-3) for a in narrow]
    return Fits(
        normal[..., 0],
        inward,
        spacing,
        np.concatenate(signed + moved, axis=1).clip(-3, 3).astype(np.float32),
        np.concatenate(unsigned, axis=1).clip(-6, 6).astype(np.float32),
        np.concatenate(telling, axis=1).astype(np.float32),
    )


def _around(tree: cKDTree, at: np.ndarray) -> tuple[np.ndarray, ...]:
    """Neighbours of n places: index (n, k) and distance; the spacing (n,); offsets (n, k, 3) in
    spacings, as the distances; and the frames of these."""
    distance, index = tree.query(at, k=min(NEIGHBOURS, tree.n))
    spacing = distance[:, 1:7].mean(axis=1)
    spacing = np.maximum(spacing, 0.1 * np.median(spacing) + 1e-12)
    away = (tree.data[index] - at[:, None]) / spacing[:, None, None]
    distance = distance / spacing[:, None]
    frames = _frames(away, np.exp(-0.5 * (distance / FRAME_BANDWIDTH) ** 2))
    return index, distance, spacing, away, *frames


def all_normals(tree: cKDTree) -> np.ndarray:
    """Normals (n, 3) of all points of a tree, either way."""
    return _in_chunks(lambda at: _around(tree, at)[-1][..., 0], tree.data)


def _in_chunks(work: Callable, places: np.ndarray) -> np.ndarray:
    """What `work` says about places (n, 3), some at a time, on all cores."""
    chunks = np.split(places, range(CHUNK, len(places), CHUNK))
    sizes = np.array([len(chunk) for chunk in chunks])

    def of(part: slice) -> np.ndarray:
        return np.concatenate([work(chunk) for chunk in chunks[part]])

    return np.concatenate(in_threads(of, even_parts(sizes, torch.get_num_threads())))


def _columns(height: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The monomials of u and v, height times those of a quadric, and its square: (n, k, 22)."""
    columns = np.empty((*u.shape, len(MONOMIALS) + QUADRIC + 1))
    columns[..., 0] = 1
    for at, (i, j) in enumerate(MONOMIALS[1:], start=1):
        less, factor = ((i - 1, j), u) if i else ((i, j - 1), v)
        np.multiply(columns[..., MONOMIALS.index(less)], factor, out=columns[..., at])
    columns[..., len(MONOMIALS) : -1] = height[..., None] * columns[..., :QUADRIC]
    columns[..., -1] = height**2
    return columns


def _frames(away: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How flat and how round (n, 2), and axes (n, 3, 3), the normal first, of offsets (n, k, 3)."""
    weight = weight / weight.sum(axis=1, keepdims=True)
    centred = away - (weight[:, None] @ away)
    value, axes = np.linalg.eigh(np.swapaxes(weight[..., None] * centred, 1, 2) @ centred)
    ratio = np.maximum(value[:, :2], 0) / np.maximum(value[:, 1:], 1e-12)
    return np.sqrt(ratio), axes


def _solve(sums: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """Plane and quadric of weighted sums (n, s, 22): height, slope, bends and residual of each."""
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
        fits.append((found[..., 0], slope, found[..., 3:], residual))
    return fits


def typical_spacing(points: np.ndarray) -> float:
    """Median over points (n, 3) of the mean distance to the six nearest."""
    return float(np.median(cKDTree(points).query(points, k=range(2, 8))[0].mean(axis=1)))


def quantiles(fits: Fits) -> np.ndarray:
    """What the fits tell of the whole cloud (q,)."""
    return np.quantile(fits.telling, QUANTILES, axis=0).ravel().astype(np.float32)


# --- the network ---------------------------------------------------------------------------------


class Trust(nn.Module):
    """How far to trust each fit around a point: where the surface is."""

    def __init__(self, signed: int, unsigned: int, width: int = 128):
        super().__init__()
        self.sizes = (signed, unsigned, width)
        self.register_buffer("signed_scale", torch.ones(signed))
        self.register_buffer("shape_mean", torch.zeros(unsigned + 1))
        self.register_buffer("shape_scale", torch.ones(unsigned + 1))
        self.network = nn.Sequential(
            nn.Linear(signed + unsigned + 1, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, signed + 2),
        )

    def forward(self, signed: Tensor, unsigned: Tensor, log_noise: Tensor) -> Tensor:
        """Moves (n, 2) along the normals and inward, in spacings; a normal has no side, so that
        the first are odd in what turns with it, and the others even."""
        shape = torch.cat((unsigned, log_noise[:, None]), dim=-1)
        shape = (shape - self.shape_mean) / self.shape_scale
        scaled = signed / self.signed_scale
        up, down = (self.network(torch.cat((sign * scaled, shape), dim=-1)) for sign in (1, -1))
        even, odd = up + down, up - down
        height = (0.15 * even[:, :-2] * signed).sum(-1) + 0.05 * odd[:, -2]
        return torch.stack((height, 0.05 * even[:, -1]), dim=-1)


class Cleaner(nn.Module):
    """Estimates the noise of a cloud, and takes it out in passes; later ones know the earlier.

    The network that upsamples does not average out what they leave: one more pass is for what it
    makes of the cloud.
    """

    def __init__(self, told: int, passes: Sequence[Trust] = (), upsampled: Trust | None = None):
        super().__init__()
        self.register_buffer("told_mean", torch.zeros(told))
        self.register_buffer("told_scale", torch.ones(told))
        self.level = nn.Sequential(nn.Linear(told, 64), nn.SiLU(), nn.Linear(64, 1))
        self.passes = nn.ModuleList(passes)
        self.upsampled = upsampled

    def log_noise(self, told: Tensor) -> Tensor:
        """ln(deviation + FLOOR), in typical spacings, of clouds (..., q)."""
        return self.level((told - self.told_mean) / self.told_scale)[..., 0]


def estimate_noise(points: np.ndarray, cleaner: Cleaner | None = None) -> float:
    """Deviation of the noise of points (n, 3), in their unit; 0 where clean, or too few."""
    return _noise_of(cKDTree(points), cleaner or load_cleaner())


def clean(points: np.ndarray, cleaner: Cleaner | None = None) -> tuple[np.ndarray, float]:
    """Points (n, 3) nearer to the surface they show, and the deviation of the noise they had; the
    same array and 0 where they are clean."""
    measured, back = np.unique(points, axis=0, return_inverse=True)  # a twin hides the noise
    cleaner, tree = cleaner or load_cleaner(), cKDTree(measured)
    noise = _noise_of(tree, cleaner)
    if noise == 0:
        return points, 0.0
    found = measured
    for number, trust in enumerate(cleaner.passes):
        known = (cKDTree(found), measured) if number else (tree, None)
        moves = found - measured + _moves(found, *known, noise, trust)
        found = measured + _limited(moves, LARGEST_MOVE * noise)
    return found[back.ravel()], noise


def settle(
    upsampled: np.ndarray,
    points: np.ndarray,
    measured: np.ndarray,
    noise: float,
    cleaner: Cleaner | None = None,
    fixed: np.ndarray | None = None,
) -> np.ndarray:
    """What was made (m, 3) of points (n, 3), even and nearer to the surface; these were cleaned of
    `noise` and `measured` (n, 3) before. Places of `fixed` (f, 3) are taken."""
    trust = (cleaner or load_cleaner()).upsampled
    if trust is None:
        return upsampled
    _, once = np.unique(measured, axis=0, return_index=True)
    tree = cKDTree(points[once])

    def on_surface(at: np.ndarray) -> np.ndarray:
        moves = _moves(at, tree, measured[once], noise, trust)
        return at + _limited(moves, LARGEST_MOVE * noise)

    even = even_out(on_surface(upsampled), measured[:0] if fixed is None else fixed)
    return on_surface(even)


def even_out(points: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """Points (m, 3) that have moved away from each other and from `fixed` (f, 3), along their
    surface; those at its border stay."""
    spacing = typical_spacing(np.concatenate((points, fixed)))
    for _ in range(EVEN_STEPS):
        tree = cKDTree(np.concatenate((points, fixed)))
        points = points + _in_chunks(lambda at, tree=tree: _pushed(tree, at, spacing), points)
    return points


def _pushed(tree: cKDTree, at: np.ndarray, spacing: float) -> np.ndarray:
    """How far the other points of a tree push those at (n, 3)."""
    distance, index = tree.query(at, k=range(2, min(EVEN_NEIGHBOURS, tree.n - 1) + 2))
    away = (tree.data[index] - at[:, None]) / spacing  # (n, k, 3)
    distance = distance / spacing + 1e-9
    force = np.maximum(1 - distance / EVEN_REACH, 0) ** 2 / distance
    push = -EVEN_STEP * (force[:, None] @ away)[:, 0]
    normal = _frames(away, np.ones_like(distance))[1][..., 0]
    push -= (push * normal).sum(axis=1, keepdims=True) * normal
    one_sided = np.linalg.norm(away.mean(axis=1), axis=1) / distance.mean(axis=1)
    return spacing * push * (2 - one_sided / BORDER).clip(0, 1)[:, None]


def _limited(moves: np.ndarray, largest: float) -> np.ndarray:
    """Moves (n, 3) that are shorter than the largest, and as they are where much shorter."""
    length = np.linalg.norm(moves, axis=1, keepdims=True) / largest + 1e-12
    return moves * np.tanh(length) / length


def _noise_of(tree: cKDTree, cleaner: Cleaner) -> float:
    if tree.n < LEAST_POINTS:
        return 0.0
    fits = fit(tree, some_of(tree.data))
    with torch.inference_mode():
        log_noise = float(cleaner.log_noise(torch.from_numpy(quantiles(fits))))
    relative = np.exp(log_noise) - FLOOR
    return float(relative * np.median(fits.spacing)) if relative > CLEAN else 0.0


def some_of(points: np.ndarray) -> np.ndarray:
    """Points that are enough to tell how noisy a cloud is."""
    return points[np.linspace(0, len(points) - 1, min(len(points), SAMPLE)).astype(int)]


def _moves(
    places: np.ndarray, tree: cKDTree, measured: np.ndarray | None, noise: float, trust: Trust
) -> np.ndarray:
    """From each place (n, 3) to the surface of a tree, in the unit of the points and the noise."""
    normals = all_normals(tree)

    def moves_at(at: np.ndarray) -> np.ndarray:
        fits = fit(tree, at, normals, measured)
        given = map(torch.from_numpy, (fits.signed, fits.unsigned, fits.log_noise(noise)))
        with torch.inference_mode():
            found = trust(*given).numpy()
        up, inward = np.split(fits.spacing[:, None] * found, 2, axis=1)
        return up * fits.normal + _limited(inward * fits.inward, LARGEST_INWARD * noise)

    return _in_chunks(moves_at, places)


# --- weights -------------------------------------------------------------------------------------


def save_cleaner(cleaner: Cleaner, path: Path) -> None:
    sizes = {
        "told": len(cleaner.told_mean),
        "passes": [trust.sizes for trust in cleaner.passes],
        "upsampled": cleaner.upsampled and cleaner.upsampled.sizes,
    }
    store({**sizes, "state": cleaner.state_dict()}, path)


@cache
def load_cleaner(path: Path = WEIGHTS) -> Cleaner:
    """The cleaner that ships, or one from a file."""
    try:
        stored = load(path)
        passes = [Trust(*sizes) for sizes in stored["passes"]]
        upsampled = stored["upsampled"] and Trust(*stored["upsampled"])
        cleaner = Cleaner(stored["told"], passes, upsampled)
        cleaner.load_state_dict(stored["state"])
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(
            f"{path}: not a cleaner ({type(error).__name__}); 'apusmog train-cleaner' writes one"
        ) from error
    return cleaner.eval().requires_grad_(False)
