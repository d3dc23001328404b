# SPDX-License-Identifier: Apache-2.0
"""The picture of the learned mixture: on the paper's sphere, and on the rays of a sensor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.spatial import cKDTree

from apusmog_core.geometry import nearest
from apusmog_core.model.smog import Mixture
from apusmog_core.sensor.network import EncodedRays, hit_probability
from apusmog_core.sensor.view import ObjectGraph, look_around
from apusmog_core.show.picture import aim, look_at
from apusmog_core.upsampler import Upsampler

from .drawing import (
    BAD,
    HEAD,
    INK,
    MARGINS,
    PALE,
    PAPER,
    TEXT,
    add_panel,
    colours_by_place,
    draw_dots,
    new_figure,
    save_figure,
)
from .ratios import knot, sample_mesh
from .seen import Seen, keep_rings, see

SURFACE_POINTS, PATCH_POINTS = 1024, 192
CAR_AT = 15.0  # metres
STRIDE = 4  # of the rings of an HDL-64E, so that there is something between them
FINE = np.radians(0.06)  # of the heat map
CHANCE = "#8fc1f2"


def mixture(lidar: Upsampler, surface: Upsampler, out: Path, seed: int = 0) -> Path:
    """The learned components: of a surface patch on the sphere, of a car on the sensor's rays."""
    figure = new_figure(12, 10.4)
    rows = figure.add_gridspec(2, 1, height_ratios=(1, 1.3), hspace=0.18, **MARGINS)
    globes = rows[0].subgridspec(1, 3, wspace=0.04)
    _on_sphere([add_panel(figure, globes[column]) for column in range(3)], surface, seed)
    _on_rays(add_panel(figure, rows[1]), lidar, see("car", CAR_AT, seed))
    return save_figure(figure, out)


def _one_sigma(mixture: Mixture) -> np.ndarray:
    """Outlines (K, 49, 2 or 3) of the components, one deviation around their means."""
    turn = torch.linspace(0, 2 * torch.pi, 49)
    circle = torch.stack((turn.cos(), turn.sin()), dim=-1)
    shape = (*mixture.mean.shape[:2], *circle.shape)
    return mixture.sample(circle.to(mixture.mean).expand(shape))[0].cpu().numpy()


def _on_sphere(panels: Sequence, up: Upsampler, seed: int) -> None:
    """A patch, and its components on both sides of the unit sphere in the same colours."""
    cloud = sample_mesh(knot(), SURFACE_POINTS, seed)
    patch = cloud[cKDTree(cloud).query(cloud[0], k=PATCH_POINTS)[1]]
    patch = patch - patch.mean(axis=0)
    near = nearest(patch, up.config.neighbours)
    with torch.inference_mode():
        batch = (torch.as_tensor(a, device=up.device)[None] for a in (patch, near))
        encoded = up.network.encode(*batch)
        found = up.network.mixture(encoded)
    axis = np.linalg.svd(patch, full_matrices=False)[2]
    colours = colours_by_place(patch @ axis[:2].T)
    camera = look_at(4 * np.ptp(patch, axis=0).max() * (axis[2] + 0.3 * axis[0]), np.zeros(3))
    draw_dots(panels[0], camera, patch, colours, 22)
    flat = camera.project(patch)[0]
    aim(panels[0], flat.min(axis=0), flat.max(axis=0))
    panels[0].set_title(f"a patch of {len(patch)} points", **HEAD)
    colours = colours[up.network.anchors()]
    mean, outline = found.mean[0].cpu().numpy(), _one_sigma(found)
    for axes, side, name in zip(panels[1:], (1, -1), ("front", "back"), strict=True):
        _globe(axes, side * mean.mean(axis=0), mean, outline, colours)
        axes.set_title(f"its mixture, {name} of the sphere", **HEAD)


def _globe(axes, eye: np.ndarray, mean: np.ndarray, outline: np.ndarray, colours) -> None:
    """The half of the unit sphere that is seen from the direction of `eye`."""
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Circle

    turn = look_at(eye, np.zeros(3)).rotation

    def visible(lines: np.ndarray) -> np.ndarray:
        seen = lines @ turn.T
        return np.where(seen[..., 2:] > 0, seen[..., :2], np.nan)

    axes.add_patch(Circle((0, 0), 1, facecolor="#f4f6f9", edgecolor=PALE, lw=1))
    axes.add_collection(LineCollection(visible(_graticule()), colors="#d5dbe2", linewidths=0.6))
    axes.add_collection(LineCollection(visible(outline), colors=colours, linewidths=0.7, alpha=0.6))
    dots = visible(mean)
    axes.scatter(*dots.T, c=colours, s=12, linewidths=0.3, edgecolors=INK, zorder=3)
    shown = np.isfinite(dots[:, 0]).sum()
    axes.set_xlabel(f"{shown} means and one-sigma ellipses", **TEXT)
    aim(axes, (-1, -1), (1, 1))


def _graticule() -> np.ndarray:
    """Meridians and parallels (lines, 73, 3) every 30 degrees."""
    along, steps = np.linspace(-np.pi, np.pi, 73), np.radians(np.arange(-60, 91, 30))
    level, turn = np.meshgrid(steps, along, indexing="ij")
    parallels = (np.cos(level) * np.cos(turn), np.cos(level) * np.sin(turn), np.sin(level))
    meridians = (np.cos(turn) * np.cos(level), np.cos(turn) * np.sin(level), np.sin(turn))
    return np.concatenate([np.stack(lines, axis=-1) for lines in (parallels, meridians)])


def _on_rays(axes, up: Upsampler, car: Seen) -> None:
    """Components of a car among the rays of the sensor, and where the network expects the car."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import LinearSegmentedColormap

    graph = look_around(keep_rings(car, STRIDE).scan)
    measured = graph.polar[:, :2]
    low = measured.min(axis=0) - (1.2 * graph.column, 1.1 * graph.steps[:, 1].max())
    high = measured.max(axis=0) + (1.2 * graph.column, 1.1 * graph.steps[:, 0].max())
    x, y = (np.arange(a, b, FINE) for a, b in zip(low, high, strict=True))
    asked = np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)
    encoded = _encode(up, graph)
    shape = (len(y), len(x))
    chance = _chance(up, graph, encoded, asked).reshape(shape)
    truth = car.meets(*asked.T).reshape(shape)
    blues = LinearSegmentedColormap.from_list("", (PAPER, CHANCE))
    extent = (x[0] - FINE / 2, x[-1] + FINE / 2, y[0] - FINE / 2, y[-1] + FINE / 2)
    axes.imshow(chance, cmap=blues, vmin=0, vmax=1, origin="lower", extent=extent)
    axes.contour(x, y, truth, levels=[0.5], colors=INK, linewidths=0.9)
    outline, weight = _ellipses(graph, encoded)
    strength = np.clip(weight / np.quantile(weight, 0.95), 0.08, 1)
    axes.add_collection(LineCollection(outline, colors=BAD, linewidths=0.6, alpha=0.6 * strength))
    axes.scatter(*measured.T, **DOT)
    aim(axes, low, high)
    axes.invert_xaxis()  # azimuth grows to the left, as the sensor sees it
    axes.set_title(
        f"the mixture of a car at {CAR_AT:g} m, from every {STRIDE}th ring of an HDL-64E", **HEAD
    )
    _ray_legend(axes)


DOT = dict(marker="o", s=7, color=INK, linewidths=0)


def _ray_legend(axes) -> None:
    from matplotlib.patches import Patch

    handles = [
        axes.scatter([], [], label="measured", **DOT),
        axes.plot([], [], color=BAD, lw=1, label="component, one sigma")[0],
        Patch(color=CHANCE, label="mixture: the ray meets the car"),
        axes.plot([], [], color=INK, lw=1, label="where rays really meet it (not its glass)")[0],
    ]
    axes.legend(
        handles=handles, ncols=len(handles), loc="upper center", bbox_to_anchor=(0.5, 0.0),
        frameon=False, fontsize=10.5, labelcolor=INK, handletextpad=0.3, columnspacing=1.4,
    )  # fmt: skip


def _encode(up: Upsampler, graph: ObjectGraph) -> EncodedRays:
    cloud = np.repeat(np.arange(len(graph.sizes)), graph.sizes)
    arrays = (graph.offsets, graph.neighbours, graph.context, cloud)
    with torch.inference_mode():
        return up.network.encode(*(torch.as_tensor(a, device=up.device) for a in arrays))


def _chance(
    up: Upsampler, graph: ObjectGraph, encoded: EncodedRays, asked: np.ndarray
) -> np.ndarray:
    """Chance (n,) that rays (n, 2) of azimuth and elevation meet the object, by the mixture.

    The nearest point answers, as far as a ring and a column away; farther out none is asked.
    """
    unit = np.array([graph.column, graph.steps[:, 0].mean()])
    anchor = cKDTree(graph.polar[:, :2] / unit).query(asked / unit)[1]
    away = asked - graph.polar[anchor, :2]
    rise = np.where(away[:, 1] > 0, *graph.steps[anchor].T)
    rays = np.stack((away[:, 0] / graph.column, away[:, 1] / rise), axis=1)
    with torch.inference_mode():
        given = (rays[:, None].astype(np.float32), anchor)
        answers = up.network.decode(encoded, *(torch.as_tensor(a, device=up.device) for a in given))
    chance = hit_probability(answers.log_intensity)[:, 0].cpu().numpy()
    return np.where((np.abs(rays) <= 1.05).all(axis=1), chance, 0.0)


def _ellipses(graph: ObjectGraph, encoded: EncodedRays) -> tuple[np.ndarray, np.ndarray]:
    """Outlines (n, 49, 2) of the components in azimuth and elevation, and their weights (n,)."""
    mean, factor, weight = encoded.components[None].split((2, 3, 1), dim=-1)
    first, low, second = factor.unbind(-1)
    cholesky = torch.stack((first, torch.zeros_like(low), low, second), dim=-1).unflatten(
        -1, (2, 2)
    )
    steps = _one_sigma(Mixture(mean, cholesky, weight[..., 0]))
    rise = np.where(steps[..., 1] > 0, graph.steps[:, :1], graph.steps[:, 1:])
    angles = np.stack((steps[..., 0] * graph.column, steps[..., 1] * rise), axis=-1)
    return graph.polar[:, None, :2] + angles, weight[0, :, 0].exp().cpu().numpy()
