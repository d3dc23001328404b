# SPDX-License-Identifier: Apache-2.0
"""Neighbours, farthest points and patches."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import dijkstra
from scipy.spatial import cKDTree
from torch import Tensor

from .compute import free_memory

# --- neighbours ----------------------------------------------------------------------------------


MANY = 4096  # queries from which on threads of their own pay
PAIR = 64  # bytes of memory, free, for each distance
MOST_PAIRS = 1 << 30  # distances at once, whatever the memory: indices of kernels have 32 bits


def search(points: np.ndarray, queries: np.ndarray, k) -> tuple[np.ndarray, np.ndarray]:
    """Distances and indices of the nearest points, as `cKDTree.query` gives them for k."""
    return cKDTree(points).query(queries, k=k, workers=-1 if len(queries) >= MANY else 1)


def nearest(points: np.ndarray, k: int, queries: np.ndarray | None = None) -> np.ndarray:
    """Indices (m, k) of the k nearest points, nearest first; repeats them where there are fewer."""
    queries = points if queries is None else queries
    k_found = min(k, len(points))
    _, index = search(points, queries, k_found)
    index = index.reshape(len(queries), k_found)
    return index[:, np.arange(k) % k_found]


def nearest_in_batch(points: Tensor, k: int) -> Tensor:
    """Indices (B, N, k) of the k nearest points of each patch (B, N, 3), itself first."""
    if torch.compiler.is_compiling():  # for export: the same operations for any size
        away = (points[:, :, None] - points[:, None]).square().sum(-1)
        return away.topk(k, largest=False).indices
    if not points.is_cuda:  # trees are faster
        return torch.from_numpy(np.stack([nearest(p.numpy(), k) for p in points.detach().float()]))
    index = nearest_on_device(points, points, min(k, points.shape[1]))[1]
    return index[..., torch.arange(k, device=points.device) % index.shape[-1]]


@torch.no_grad()
def nearest_on_device(points: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Distances and indices (B, m, k) of the points (B, n, 3) nearest to queries (B, m, 3).

    All distances, so many queries at a time as a part of the free memory holds.
    """
    rows = max(1, pairs_that_fit(points.device) // max(1, points.shape[0] * points.shape[1]))
    parts = []
    for some in queries.float().split(rows, dim=1):
        exact = "donot_use_mm_for_euclid_dist"  # the other way is off by a thousandth of the size
        away = torch.cdist(some, points.float(), compute_mode=exact)
        parts.append(away.topk(k, largest=False))
    if len(parts) == 1:
        return parts[0].values, parts[0].indices
    values, indices = zip(*parts, strict=True)
    return torch.cat(values, dim=1), torch.cat(indices, dim=1)


def pairs_that_fit(device: torch.device) -> int:
    """How many distances there is room for at once."""
    return min(free_memory(device) // PAIR, MOST_PAIRS)


def nearest_between(x: Tensor, z: Tensor, k: int) -> Tensor:
    """Indices (B, X, k) of the k nearest points of z (B, Z, 3) for each of x (B, X, 3)."""
    k = min(k, z.shape[1])
    if x.is_cuda:
        return nearest_on_device(z, x, k)[1]
    pairs = zip(x.detach().numpy(), z.detach().numpy(), strict=True)
    found = [cKDTree(b).query(a, k=np.arange(1, k + 1))[1] for a, b in pairs]
    return torch.from_numpy(np.stack(found))


def farthest(points: np.ndarray, count: int) -> np.ndarray:
    """Indices of `count` farthest points, in the order they are found."""
    import fpsample

    points = np.ascontiguousarray(points, np.float32)
    count = min(count, len(points))
    if count < 1:
        return np.zeros(0, np.int64)
    if len(points) < 256 or points.shape[1] > 8:
        return fpsample.fps_sampling(points, count, start_idx=0).astype(np.int64)
    height = int(np.clip(np.log2(len(points)) - 6, 3, 9))
    found = fpsample.bucket_fps_kdline_sampling(points, count, h=height, start_idx=0)
    return found.astype(np.int64)


def principal_axes(away: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Principal axes (n, 3, 3) of offsets (n, k, 3), the normal first."""
    weight = weight / weight.sum(axis=1, keepdims=True)
    centred = away - (weight[:, None] @ away)
    return np.linalg.eigh(np.swapaxes(weight[..., None] * centred, 1, 2) @ centred)[1]


def typical_spacing(points: np.ndarray) -> float:
    """Median over points (n, 3) of the mean distance to the six nearest."""
    return float(np.median(cKDTree(points).query(points, k=range(2, 8))[0].mean(axis=1)))


# --- patches -------------------------------------------------------------------------------------


def geodesic_patches(points: np.ndarray, size: int, overlap: float = 3.0) -> np.ndarray:
    """Indices (patches, size): neighbours along the surface of farthest-point seeds.

    A point is expected in `overlap` patches; what a disconnected seed cannot reach is filled with
    its nearest points in space.
    """
    count = len(points)
    if count <= size:
        return np.arange(count)[None]
    seeds = farthest(points, int(np.ceil(overlap * count / size)))
    graph = _neighbour_graph(points, 8)
    patches = np.empty((len(seeds), size), np.int64)
    windows = nearest(points, min(count, 4 * size), points[seeds])  # keep shortest paths cheap
    for row, window in enumerate(windows):
        inside = graph[window][:, window]
        along = dijkstra(inside, indices=0)
        order = np.argsort(along, kind="stable")[:size]
        chosen = window[order[np.isfinite(along[order])]]
        rest = window[~np.isin(window, chosen)][: size - len(chosen)]  # nearest in space first
        patches[row] = np.concatenate((chosen, rest))
    return patches


def _neighbour_graph(points: np.ndarray, k: int) -> csr_matrix:
    k = min(k + 1, len(points))
    distance, index = search(points, points, k)
    rows = np.repeat(np.arange(len(points)), k - 1)
    edges = distance[:, 1:].ravel() + 1e-12  # zero would mean "no edge"
    graph = csr_matrix((edges, (rows, index[:, 1:].ravel())), shape=(len(points),) * 2)
    return graph.maximum(graph.T)
