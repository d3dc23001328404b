# SPDX-License-Identifier: Apache-2.0
"""Neighbours, farthest points, patches, and the sensor's grid of rays."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import dijkstra
from scipy.spatial import cKDTree
from torch import Tensor

# --- neighbours ----------------------------------------------------------------------------------


def nearest(points: np.ndarray, k: int, queries: np.ndarray | None = None) -> np.ndarray:
    """Indices (m, k) of the k nearest points, nearest first; repeats them where there are fewer."""
    queries = points if queries is None else queries
    k_found = min(k, len(points))
    _, index = cKDTree(points).query(queries, k=k_found, workers=-1)
    index = index.reshape(len(queries), k_found)
    return index[:, np.arange(k) % k_found]


def nearest_in_batch(points: Tensor, k: int) -> Tensor:
    """Indices (B, N, k) of the k nearest points of each patch (B, N, 3), itself first."""
    if torch.compiler.is_compiling():  # for export: the same operations for any size
        away = (points[:, :, None] - points[:, None]).square().sum(-1)
        return away.topk(k, largest=False).indices
    k_found = min(k, points.shape[1])
    if not points.is_cuda or points.shape[1] > 4096:  # trees are faster, or need less memory
        found = [nearest(p.cpu().numpy(), k) for p in points.detach().float()]
        return torch.as_tensor(np.stack(found), device=points.device)
    with torch.no_grad():
        index = torch.cdist(points, points).topk(k_found, largest=False).indices
    return index[..., torch.arange(k, device=points.device) % k_found]


def farthest(points: np.ndarray, count: int, first: int = 0) -> np.ndarray:
    """Indices of `count` farthest points, in the order they are found."""
    import fpsample

    points = np.ascontiguousarray(points, np.float32)
    count = min(count, len(points))
    if count < 1:
        return np.zeros(0, np.int64)
    if len(points) < 256 or points.shape[1] > 8:
        return fpsample.fps_sampling(points, count, start_idx=first).astype(np.int64)
    height = int(np.clip(np.log2(len(points)) - 6, 3, 9))
    found = fpsample.bucket_fps_kdline_sampling(points, count, h=height, start_idx=first)
    return found.astype(np.int64)


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
    straight = nearest(points, size, points[seeds])
    for row, seed in enumerate(seeds):  # a local window keeps the shortest paths cheap
        window = nearest(points, min(count, 4 * size), points[seed : seed + 1])[0]
        inside = graph[window][:, window]
        along = dijkstra(inside, indices=0)
        order = np.argsort(along, kind="stable")[:size]
        chosen = window[order[np.isfinite(along[order])]]
        rest = np.setdiff1d(straight[row], chosen, assume_unique=True)[: size - len(chosen)]
        patches[row] = np.concatenate((chosen, rest))
    return patches


def _neighbour_graph(points: np.ndarray, k: int) -> csr_matrix:
    k = min(k + 1, len(points))
    distance, index = cKDTree(points).query(points, k=k, workers=-1)
    rows = np.repeat(np.arange(len(points)), k - 1)
    edges = distance[:, 1:].ravel() + 1e-12  # zero would mean "no edge"
    graph = csr_matrix((edges, (rows, index[:, 1:].ravel())), shape=(len(points),) * 2)
    return graph.maximum(graph.T)


# --- the sensor's grid ---------------------------------------------------------------------------


@dataclass(frozen=True)
class RayGrid:
    """Log-polar coordinates about the sensor, in steps of its own pattern.

    (azimuth / step_azimuth, elevation / step_elevation, ln(range) / step_elevation): neighbouring
    rays are one apart, and a surface looks the same at any range.
    """

    origin: np.ndarray
    step_azimuth: float  # radians between points of one ring
    step_elevation: float  # radians between rings
    forward: float  # azimuth that becomes zero, so that no object straddles the wrap

    def to_grid(self, points: np.ndarray) -> np.ndarray:
        """Cartesian (n, 3) -> grid coordinates (n, 3)."""
        azimuth, elevation, reach = polar(points, self.origin)
        azimuth = wrap(azimuth - self.forward)
        steps = (self.step_azimuth, self.step_elevation, self.step_elevation)
        return np.stack((azimuth, elevation, np.log(reach)), axis=1) / np.asarray(steps)

    def to_points(self, grid: np.ndarray) -> np.ndarray:
        """Grid coordinates (n, 3) -> Cartesian (n, 3)."""
        azimuth = grid[:, 0] * self.step_azimuth + self.forward
        elevation = grid[:, 1] * self.step_elevation
        reach = np.exp(grid[:, 2] * self.step_elevation)
        level = reach * np.cos(elevation)
        return self.origin + np.stack(
            (level * np.cos(azimuth), level * np.sin(azimuth), reach * np.sin(elevation)), axis=1
        )


def wrap(angle: np.ndarray) -> np.ndarray:
    """Angles into [-pi, pi)."""
    return (angle + np.pi) % (2 * np.pi) - np.pi


def polar(points: np.ndarray, origin: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Azimuth, elevation and range of points (n, 3) as seen from the origin."""
    ray = np.asarray(points, np.float64) - origin
    reach = np.maximum(np.linalg.norm(ray, axis=1), 1e-3)
    return np.arctan2(ray[:, 1], ray[:, 0]), np.arcsin(np.clip(ray[:, 2] / reach, -1, 1)), reach


RING_JITTER = np.radians(0.1)  # points closer than this in elevation are on one ring
DEFAULT_STEPS = (np.radians(0.17), np.radians(0.42))  # an HDL-64E at 10 Hz
WITNESSES = 24  # points of each cloud that are asked for their neighbours


def scan_grids(clouds: Sequence[np.ndarray], origin) -> tuple[list[RayGrid], np.ndarray]:
    """The sensor's grid as each cloud shows it, and all points (n, 3) in grid steps.

    A cloud that does not show its steps (a single ring, a handful of points) takes the median of
    the others.
    """
    origin = np.asarray(origin, np.float64)
    sizes = np.array([len(c) for c in clouds])
    cloud = np.repeat(np.arange(len(sizes)), sizes)
    azimuth, elevation, reach = polar(np.concatenate(clouds), origin)
    starts = np.cumsum(sizes) - sizes
    forward = np.arctan2(
        np.add.reduceat(np.sin(azimuth), starts), np.add.reduceat(np.cos(azimuth), starts)
    )
    azimuth = wrap(azimuth - forward[cloud])
    steps = _measure_steps(azimuth, elevation, cloud, sizes)
    for column, fallback in zip(steps.T, DEFAULT_STEPS, strict=True):
        known = column[np.isfinite(column)]
        column[~np.isfinite(column)] = np.median(known) if len(known) else fallback
    steps[:, 1] = steps.max(axis=1)  # rings are never closer than the points of one
    unit = np.stack((steps[cloud, 0], steps[cloud, 1], steps[cloud, 1]), axis=1)
    grid = np.stack((azimuth, elevation, np.log(reach)), axis=1) / unit
    grids = [RayGrid(origin, *s, f) for s, f in zip(steps.tolist(), forward.tolist(), strict=True)]
    return grids, grid


def ray_grid(points: np.ndarray, origin) -> RayGrid:
    """The grid that the points of one cloud show."""
    return scan_grids([points], origin)[0][0]


def _measure_steps(azimuth, elevation, cloud, sizes) -> np.ndarray:
    """Typical steps (clouds, 2) along a ring and between rings, radians; nan: cannot be seen."""
    apart = np.stack((azimuth + 10.0 * cloud, elevation), axis=1)
    starts = np.cumsum(sizes) - sizes
    spread = (np.arange(WITNESSES) + 0.5) / WITNESSES
    asked = (starts[:, None] + np.minimum(spread * sizes[:, None], sizes[:, None] - 1)).astype(int)
    k = min(24, len(apart))
    _, index = ray_tree(apart).query(apart[asked.ravel()], k=np.arange(1, k + 1))
    own = cloud[index] == cloud[asked].reshape(-1, 1)
    across = np.abs(azimuth[index] - azimuth[asked].reshape(-1, 1))
    up = np.abs(elevation[index] - elevation[asked].reshape(-1, 1))
    same_ring = up < RING_JITTER
    along = np.where(own & same_ring & (across > 1e-5), across, np.nan)
    between = np.where(own & ~same_ring, up, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all-nan rows are what nan says
        nearest_steps = [np.nanmin(s, axis=1).reshape(len(sizes), -1) for s in (along, between)]
        return np.stack([np.nanmedian(s, axis=1) for s in nearest_steps], axis=1)


def ray_tree(rays: np.ndarray) -> cKDTree:
    """A tree that is quick to build: rays are spread evenly, balance gains nothing."""
    return cKDTree(rays, balanced_tree=False, compact_nodes=False)


def ray_neighbours(grid: np.ndarray, sizes: np.ndarray, k: int) -> np.ndarray:
    """Nearest rays (n, k) of the same cloud, whatever their depth, itself first."""
    cloud = np.repeat(np.arange(len(sizes)), sizes)
    apart = np.stack((grid[:, 0] + cloud * 1e5, grid[:, 1]), axis=1)
    k_found = min(k, len(grid))
    index = ray_tree(apart).query(apart, k=np.arange(1, k_found + 1), workers=-1)[1]
    index = index[:, np.arange(k) % k_found]
    return np.where(cloud[index] == cloud[:, None], index, np.arange(len(grid))[:, None])


def grid_context(grids: list[RayGrid], coordinates: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """What a network is told of the scale (n, 2): ln(metres between rings), ln(step ratio).

    coordinates (n, 3) are those of all grids, sizes[i] of grid i.
    """
    up = np.repeat([g.step_elevation for g in grids], sizes)
    along = np.repeat([g.step_azimuth for g in grids], sizes)
    gap = coordinates[:, 2] * up + np.log(up)
    return np.stack((gap, np.log(up / along)), axis=1).astype(np.float32)
