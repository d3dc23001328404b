# SPDX-License-Identifier: Apache-2.0
"""Triangle meshes and the solids that objects are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

GLASS = 0.0  # the reflectivity of what sends nothing back
RUBBER = 0.06


@dataclass(frozen=True)
class Mesh:
    """Triangles with a diffuse reflectivity each; 0 is glass, from which no ray returns."""

    vertices: np.ndarray  # (v, 3) float32
    triangles: np.ndarray  # (f, 3) int32
    reflectivity: np.ndarray  # (f,) float32

    @property
    def size(self) -> np.ndarray:
        return np.ptp(self.vertices, axis=0)

    def moved(self, offset: Sequence[float], yaw: float = 0.0) -> Mesh:
        """Turned about the vertical by `yaw`, then shifted."""
        c, s = np.cos(yaw), np.sin(yaw)
        turn = np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]])
        return replace(self, vertices=np.float32(self.vertices @ turn + np.asarray(offset)))

    def scaled(self, factor: float | Sequence[float]) -> Mesh:
        return replace(self, vertices=np.float32(self.vertices * np.asarray(factor)))


def join(*meshes: Mesh) -> Mesh:
    """All triangles in one mesh."""
    starts = np.cumsum([0] + [len(m.vertices) for m in meshes[:-1]])
    return Mesh(
        np.concatenate([m.vertices for m in meshes]),
        np.concatenate([m.triangles + s for m, s in zip(meshes, starts, strict=True)]).astype("i4"),
        np.concatenate([m.reflectivity for m in meshes]),
    )


# --- primitives ----------------------------------------------------------------------------------


def solid(vertices: np.ndarray, triangles: np.ndarray, shade: float | np.ndarray) -> Mesh:
    """A mesh of one reflectivity, or one for each triangle."""
    triangles = np.asarray(triangles, np.int32).reshape(-1, 3)
    shades = np.broadcast_to(np.float32(shade), len(triangles)).copy()
    return Mesh(np.float32(vertices), triangles, shades)


def skin(rings: np.ndarray, shade: float) -> Mesh:
    """The surface through cross-sections (s, k, 3), closed at both ends."""
    s, k, _ = rings.shape
    i, j = np.meshgrid(np.arange(s - 1), np.arange(k), indexing="ij")
    a, b = i * k + j, i * k + (j + 1) % k
    sides = np.stack([a, b, b + k, a, b + k, a + k], -1).reshape(-1, 3)
    fan = np.stack([np.zeros(k - 2, int), np.arange(1, k - 1), np.arange(2, k)], -1)
    return solid(rings.reshape(-1, 3), np.concatenate([sides, fan, fan + (s - 1) * k]), shade)


def box(low: Sequence[float], high: Sequence[float], shade: float) -> Mesh:
    (x0, y0, z0), (x1, y1, z1) = low, high
    rectangle = [(y0, z0), (y1, z0), (y1, z1), (y0, z1)]
    return skin(np.array([[(x, y, z) for y, z in rectangle] for x in (x0, x1)]), shade)


def tube(path: Sequence, radii: Sequence[float] | float, shade: float, sides: int = 8) -> Mesh:
    """A round tube along a path (s, 3), with one radius or one for each point."""
    path = np.asarray(path, float)
    along = np.gradient(path, axis=0)
    along /= np.linalg.norm(along, axis=1, keepdims=True)
    helper = np.eye(3)[np.argmin(np.abs(along).mean(0))]  # the axis the path keeps away from
    u = np.cross(along, helper)
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    v = np.cross(along, u)
    turn = np.linspace(0, 2 * np.pi, sides, endpoint=False)[None, :, None]
    radii = np.broadcast_to(radii, len(path))[:, None, None]
    circle = u[:, None] * np.cos(turn) + v[:, None] * np.sin(turn)
    return skin(path[:, None] + radii * circle, shade)


def ellipsoid(centre: Sequence[float], radii: Sequence[float], shade: float, n: int = 10) -> Mesh:
    polar = np.linspace(0.05, np.pi - 0.05, n)[:, None]
    turn = np.linspace(0, 2 * np.pi, n, endpoint=False)[None]
    unit = np.stack(
        [np.sin(polar) * np.cos(turn), np.sin(polar) * np.sin(turn), np.cos(polar) + 0 * turn], -1
    )
    return skin(np.asarray(centre) + unit * np.asarray(radii), shade)


def hoop(centre: Sequence[float], radius: float, thickness: float, shade: float) -> Mesh:
    """A bicycle tyre: a ring in the xz plane."""
    turn = np.linspace(0, 2 * np.pi, 21)
    path = np.stack([np.cos(turn), 0 * turn, np.sin(turn)], -1) * radius + np.asarray(centre)
    spokes = [tube(path[[i, i + 10]], 0.004, shade, 3) for i in range(0, 10, 2)]
    return join(tube(path, thickness, shade, 5), *spokes)


def wheel(x: float, y: float, radius: float, width: float) -> Mesh:
    axle = [(x, y - width / 2, radius), (x, y + width / 2, radius)]
    return tube(axle, radius, RUBBER, 16)


def panes(corners: Sequence, across: int, up: int, border: float, shade: float) -> Mesh:
    """A quad (bottom left, bottom right, top right, top left) with across x up panes of glass.

    `border` is the share of each pane's width and height that is opaque."""
    a, b, c, d = np.asarray(corners, float)
    u, v = _cuts(across, border), _cuts(up, border)
    uu, vv = u[None, :, None], v[:, None, None]
    grid = (1 - vv) * ((1 - uu) * a + uu * b) + vv * ((1 - uu) * d + uu * c)
    i, j = np.meshgrid(np.arange(len(v) - 1), np.arange(len(u) - 1), indexing="ij")
    p = i * len(u) + j
    quads = np.stack([p, p + 1, p + len(u) + 1, p, p + len(u) + 1, p + len(u)], -1)
    glass = (i % 2 == 1) & (j % 2 == 1)  # every second strip, both ways
    return solid(grid.reshape(-1, 3), quads, np.repeat(np.where(glass, GLASS, shade), 2))


def _cuts(count: int, border: float) -> np.ndarray:
    """0, both edges of each of `count` panes between borders, 1."""
    edges = np.arange(count)[:, None] + (border / 2, 1 - border / 2)
    return np.concatenate([[0], edges.ravel() / count, [1]])


def leaves(centres: np.ndarray, size: float, shade: float, rng: np.random.Generator) -> Mesh:
    """One randomly turned triangle for each centre."""
    corners = rng.normal(size=(len(centres), 3, 3))
    corners *= size / np.linalg.norm(corners, axis=-1, keepdims=True)
    vertices = (centres[:, None] + corners).reshape(-1, 3)
    vertices[:, 2] = np.maximum(vertices[:, 2], 0.02)
    return solid(vertices, np.arange(len(vertices)), shade)
