# SPDX-License-Identifier: Apache-2.0
"""The pictures of the documentation: objects made dense, ratios of one shape, the mixture."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.spatial import cKDTree

from apusmog_core.evaluation.metrics import distance_to_mesh, mesh_surface
from apusmog_core.evaluation.metrics import distances as distance_to
from apusmog_core.geometry import farthest, nearest
from apusmog_core.model.smog import Mixture
from apusmog_core.picture import Camera, aim, beside, look_at
from apusmog_core.sensor.grid import RayGrid, grid_context, ray_neighbours, scan_grids, wrap
from apusmog_core.sensor.grow import ANCHORS
from apusmog_core.simulate import objects, shapes
from apusmog_core.simulate.sensor import Placed, Scene, Sensor, scan, visible_surface
from apusmog_core.surface.mesh import read_mesh, reconstruct
from apusmog_core.training.ray_samples import PROBE_REACH
from apusmog_core.upsampler import Upsampler

RANGES = (10.0, 20.0, 35.0)  # metres
RATIO = 4.0
RATIOS = (1.98, 4.0, 7.72, 16.0)
OBJECTS = {"car": 2.15, "cyclist": 1.15, "person": 1.35}  # heading of each, radians
SHAPE_POINTS = 1024
PATCH_POINTS = 192
SENSOR_AT = (0.0, 0.0, 0.0)

PAPER, INK, PALE = "#ffffff", "#17202b", "#98a2ae"
GOOD, FAIR, BAD = "#1f83e0", "#f2a01f", "#df2b2b"
LIMITS = (0.05, 0.20)  # metres from the true surface where GOOD becomes FAIR, and FAIR BAD
SKIN = (0.42, 0.62, 0.86)


def figures(
    out: str | Path,
    weights: str | Path = "lidar",
    surface_weights: str | Path = "shape",
    mesh: str | Path | None = None,
    device: str = "auto",
    seed: int = 0,
) -> list[Path]:
    """Write all pictures into a folder; `mesh` is the shape of the ratios, else a knot."""
    lidar = _load(weights, "sensor", device, seed)
    surface = _load(surface_weights, "canonical", device, seed)
    shape = knot() if mesh is None else read_mesh(mesh)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    return [
        before_after(lidar, out / "before_after.png", seed),
        ratios(surface, out / "ratios.png", shape, seed),
        mixture(lidar, surface, out / "mixture.png", seed),
    ]


def _load(weights: str | Path, domain: str, device: str, seed: int) -> Upsampler:
    up = Upsampler.load(weights, device, seed)
    if up.config.domain != domain:
        better = "lidar" if domain == "sensor" else "shape"
        raise ValueError(f"{weights}: the mixture's domain is not {domain!r}; try {better!r}")
    return up


# --- before and after ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """One object on open ground: what the sensor returned, and what it could have seen."""

    points: np.ndarray  # (n, 3)
    truth: np.ndarray  # (m, 3)
    scene: Scene
    sensor: Sensor


def see(kind: str, distance: float, seed: int = 0) -> Seen:
    """An object of this kind straight ahead of an HDL-64E."""
    body = objects.BUILDERS[kind](np.random.default_rng(seed))
    scene = Scene([Placed(body, kind, distance, 0.0, OBJECTS[kind])])
    sensor = Sensor.named("HDL-64E").jittered(seed)
    turn = scan(scene, sensor, seed)
    finer = (round(2 * distance), round(0.4 * distance))  # about a centimetre apart at any range
    truth = visible_surface(scene, sensor, 1, oversample=finer)
    return Seen(turn.points[turn.instance == 1], truth, scene, sensor)


def before_after(up: Upsampler, out: Path, seed: int = 0) -> Path:
    """Objects at three ranges: measured, dense, and the true visible surface."""
    figure = _figure(12, 12.4)
    bands = figure.add_gridspec(2, 1, height_ratios=(1, 1.35), hspace=0.1, **MARGINS)
    halves = bands[1].subgridspec(1, 2, width_ratios=(1.2, 1), wspace=0.08)
    cells = {"car": bands[0], "cyclist": halves[0], "person": halves[1]}
    for kind, cell in cells.items():
        grid = cell.subgridspec(len(RANGES), 3, hspace=0.16, wspace=0.02)
        panels = [[_panel(figure, grid[row, column]) for column in range(3)] for row in range(3)]
        _head(panels[0], (f"{kind}, measured", f"dense, × {RATIO:g}", "truth"))
        seen = [see(kind, distance, seed) for distance in RANGES]
        clouds = [one.points for one in seen]
        dense = up.upsample_many(clouds, RATIO, keep_measured=True, origin=SENSOR_AT)
        for row, distance in enumerate(RANGES):
            _compare(panels[row], seen[row], dense[row][len(clouds[row]) :])
            panels[row][0].set_title(f"{distance:g} m: {len(clouds[row]):,} points", **NOTE)
    _legend(figure)
    return _save(figure, out)


def _compare(panels: Sequence, seen: Seen, new: np.ndarray) -> None:
    """Three views of one object from the same place."""
    camera = beside(seen.truth)
    flat = camera.project(seen.truth)[0]
    total = len(seen.points) + len(new)
    size = 110 / np.sqrt(total)
    away = distance_to(new, seen.truth)
    even = seen.truth[farthest(seen.truth, 4000)]
    _dots(panels[0], camera, seen.points, INK, 1.6 * size)
    _dots(panels[1], camera, new, grade(away), size)
    _dots(panels[1], camera, seen.points, INK, size)
    _dots(panels[2], camera, even, _by_depth(camera, even), 1.6)
    panels[1].set_title(f"{total:,} points, {100 * away.mean():.1f} cm off", **NOTE)
    for axes in panels:
        aim(axes, flat.min(axis=0), flat.max(axis=0))


def grade(away: np.ndarray) -> np.ndarray:
    """The colour of each distance (n,) from the true surface."""
    return np.array([GOOD, FAIR, BAD])[np.searchsorted(LIMITS, away)]


def _legend(figure) -> None:
    from matplotlib.lines import Line2D

    near, far = (f"{100 * limit:g} cm" for limit in LIMITS)
    labels = {
        "measured": INK,
        f"new, at most {near} off the true surface": GOOD,
        f"{near} to {far}": FAIR,
        f"beyond {far}": BAD,
        "what the sensor can see": PALE,
    }
    dots = [Line2D([], [], ls="", marker="o", ms=6, mew=0, color=c) for c in labels.values()]
    figure.legend(
        dots, labels, ncols=len(labels), loc="lower center", frameon=False, fontsize=10.5,
        labelcolor=INK, handletextpad=0.1, columnspacing=1.6,
    )  # fmt: skip


# --- ratios --------------------------------------------------------------------------------------


def ratios(up: Upsampler, out: Path, shape, seed: int = 0) -> Path:
    """An Open3D mesh at several ratios from the same weights, and the Poisson surface of each."""
    sparse, truth = sample_mesh(shape, SHAPE_POINTS, seed), _scene(shape)
    camera = _above(sparse)
    flat, size = camera.project(sparse)[0], np.ptp(sparse, axis=0).max()
    figure = _figure(15, 6.3)
    grid = figure.add_gridspec(2, 1 + len(RATIOS), hspace=0.02, wspace=0.02, **MARGINS)
    for column, ratio in enumerate((1.0, *RATIOS)):
        points = sparse if column == 0 else up.upsample(sparse, ratio)
        away = distance_to_mesh(points, truth).mean() / size
        top, below = (_panel(figure, grid[row, column]) for row in range(2))
        name = "input" if column == 0 else f"× {ratio:g}"
        top.set_title(f"{name}: {len(points):,} points", **HEAD)
        _dots(top, camera, points, _by_depth(camera, points), 150 / np.sqrt(len(points)))
        aim(top, flat.min(axis=0), flat.max(axis=0))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "surface.ply"
            reconstruct(points, file)
            found = mesh_surface(file)
        aim(below, flat.min(axis=0), flat.max(axis=0))
        _render(below, found, camera)
        below.set_xlabel(f"mean error {1000 * away:.2f} ‰ of the size", **TEXT)
    return _save(figure, out)


def knot():
    """A trefoil: curved everywhere, with strands that pass close to each other."""
    t = np.linspace(0, 2 * np.pi, 241)
    path = np.stack((np.sin(t) + 2 * np.sin(2 * t), np.cos(t) - 2 * np.cos(2 * t), -np.sin(3 * t)))
    sides = 24
    tube = shapes.tube(path.T, 0.62, 0.5, sides)
    skin = tube.triangles[: -2 * (sides - 2)]  # without the lids at its ends, which meet
    return _legacy(tube.vertices, skin % (len(tube.vertices) - sides))


def _legacy(vertices: np.ndarray, triangles: np.ndarray):
    import open3d as o3d

    return o3d.geometry.TriangleMesh(
        o3d.utility.Vector3dVector(vertices), o3d.utility.Vector3iVector(triangles)
    )


def sample_mesh(mesh, count: int, seed: int) -> np.ndarray:
    """Evenly spread points (count, 3) of a mesh."""
    import open3d as o3d

    o3d.utility.random.seed(seed)
    points = np.asarray(mesh.sample_points_uniformly(4 * count).points, np.float32)
    return points[farthest(points, count)]


def _scene(mesh):
    import open3d as o3d

    scene = o3d.t.geometry.RaycastingScene()
    scene.add_triangles(o3d.t.geometry.TriangleMesh.from_legacy(mesh))
    return scene


def _above(points: np.ndarray) -> Camera:
    middle = (points.min(axis=0) + points.max(axis=0)) / 2
    return look_at(
        middle + 2.5 * np.ptp(points, axis=0).max() * np.array([0.25, -0.45, 0.85]), middle
    )


def _render(axes, scene, camera: Camera) -> None:
    """The lit surface, one ray for each pixel of the panel."""
    box = axes.get_window_extent()
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    x, y = np.meshgrid(
        np.linspace(left, right, int(box.width)), np.linspace(low, high, int(box.height))
    )
    ahead = np.stack((x, y, -np.ones_like(x)), axis=-1) @ camera.rotation
    rays = np.concatenate((np.broadcast_to(camera.eye, ahead.shape), ahead), axis=-1)
    hits = scene.cast_rays(rays.astype(np.float32))
    normal = hits["primitive_normals"].numpy() @ camera.rotation.T  # (h, w, 3): right, up, back
    normal *= np.sign(normal[..., 2:])
    light = np.array([-0.45, 0.6, 0.66])
    shade = 0.3 + 0.75 * np.clip(normal @ light, 0, 1)
    pixels = np.dstack(
        [*(np.clip(shade * c, 0, 1) for c in SKIN), np.isfinite(hits["t_hit"].numpy())]
    )
    axes.imshow(pixels, origin="lower", extent=(left, right, low, high), aspect="auto")


# --- the mixture ---------------------------------------------------------------------------------


def mixture(lidar: Upsampler, surface: Upsampler, out: Path, seed: int = 0) -> Path:
    """The learned components: of a surface patch on the sphere, of a car on the sensor's rays."""
    figure = _figure(12, 9.0)
    rows = figure.add_gridspec(2, 1, height_ratios=(1.2, 1), hspace=0.2, **MARGINS)
    globes = rows[0].subgridspec(1, 3, wspace=0.04)
    _on_sphere([_panel(figure, globes[column]) for column in range(3)], surface, seed)
    _on_rays(_panel(figure, rows[1]), lidar, see("car", 20.0, seed))
    return _save(figure, out)


def _one_sigma(mixture: Mixture) -> np.ndarray:
    """Outlines (K, 49, 2 or 3) of the components, one deviation around their means."""
    turn = torch.linspace(0, 2 * torch.pi, 49)
    circle = torch.stack((turn.cos(), turn.sin()), dim=-1)
    shape = (*mixture.mean.shape[:2], *circle.shape)
    return mixture.sample(circle.to(mixture.mean).expand(shape))[0].cpu().numpy()


def _on_sphere(panels: Sequence, up: Upsampler, seed: int) -> None:
    """A patch, and its components on both sides of the unit sphere in the same colours."""
    cloud = sample_mesh(knot(), SHAPE_POINTS, seed)
    patch = cloud[cKDTree(cloud).query(cloud[0], k=PATCH_POINTS)[1]]
    patch = patch - patch.mean(axis=0)
    near = nearest(patch, up.config.neighbours)
    with torch.inference_mode():
        batch = (torch.as_tensor(a, device=up.device)[None] for a in (patch, near))
        encoded = up.network.encode(*batch)
        found = up.network.mixture(encoded)
    axis = np.linalg.svd(patch, full_matrices=False)[2]
    colours = _wheel(patch @ axis[:2].T)
    camera = look_at(4 * np.ptp(patch, axis=0).max() * (axis[2] + 0.3 * axis[0]), np.zeros(3))
    _dots(panels[0], camera, patch, colours, 22)
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

    (grid,), rays = scan_grids([car.points], SENSOR_AT)
    low, high = rays[:, :2].min(axis=0) - 2, rays[:, :2].max(axis=0) + 2
    x, y = (np.arange(a, b, 1 / 6) for a, b in zip(low, high, strict=True))
    found, chance = _ask(up, grid, rays, np.stack(np.meshgrid(x, y), axis=-1))
    blues = LinearSegmentedColormap.from_list("", (PAPER, "#8fc1f2"))
    extent = (low[0], high[0], low[1], high[1])
    axes.imshow(chance, cmap=blues, vmin=0, vmax=1, origin="lower", extent=extent)
    meets, passes = _fired(car, grid, low, high)
    axes.scatter(*passes.T, **CROSS)
    axes.scatter(*meets.T, **RING)
    axes.scatter(*rays[:, :2].T, **DOT)
    outline = rays[up.network.anchors(), None, :2] + _one_sigma(found)
    weight = found.log_weight[0].exp().cpu().numpy()
    strength = np.clip(weight / weight.max(), 0.1, 1)
    axes.add_collection(LineCollection(outline, colors=BAD, linewidths=0.8, alpha=strength))
    aim(axes, low, high)
    axes.invert_xaxis()  # azimuth grows to the left, as the sensor sees it
    axes.set_title("the mixture of a car at 20 m on the rays of its sensor", **HEAD)
    _ray_legend(axes)


DOT = dict(marker="o", s=11, color=INK, linewidths=0)
RING = dict(marker="o", s=22, facecolors="none", edgecolors=INK, linewidths=0.7)
CROSS = dict(marker="x", s=11, color=PALE, linewidths=0.8)


def _ray_legend(axes) -> None:
    from matplotlib.patches import Patch

    handles = [
        axes.scatter([], [], label="measured", **DOT),
        axes.scatter([], [], label="meets the car, no return", **RING),
        axes.scatter([], [], label="passes it, or meets glass", **CROSS),
        axes.plot([], [], color=BAD, lw=1, label="component, one sigma")[0],
        Patch(color="#8fc1f2", label="network: the ray meets the car"),
    ]
    axes.legend(
        handles=handles, ncols=len(handles), loc="upper center", bbox_to_anchor=(0.5, 0.0),
        frameon=False, fontsize=10.5, labelcolor=INK, handletextpad=0.3, columnspacing=1.4,
    )  # fmt: skip


def _ask(
    up: Upsampler, grid: RayGrid, rays: np.ndarray, asked: np.ndarray
) -> tuple[Mixture, np.ndarray]:
    """The mixture of a cloud in grid steps, and the chance (h, w) that rays (h, w, 2) meet it."""
    sizes = np.array([len(rays)])
    local = (rays - rays.mean(axis=0)).astype(np.float32)
    near = ray_neighbours(rays, sizes, up.config.neighbours)
    anchor = nearest(rays[:, :2], 1, asked.reshape(-1, 2)).reshape(asked.shape[:2])  # (h, w)
    steps = (asked - rays[anchor, :2]).astype(np.float32)  # (h, w, 2)
    queries = steps.reshape(1, -1, 1, 2)
    arrays = (local[None], near[None], grid_context([grid], rays, sizes)[None], queries)
    with torch.inference_mode():
        *batch, samples = (torch.as_tensor(a, device=up.device) for a in arrays)
        encoded = up.network.encode(*batch)
        anchors = torch.as_tensor(anchor.ravel(), device=up.device)
        hit = up.network.decode_at(encoded, samples, anchors, ANCHORS).hit
        found = up.network.mixture(encoded)
    chance = hit.sigmoid().cpu().numpy().reshape(anchor.shape)
    trained = (np.abs(steps) <= PROBE_REACH).all(axis=-1)
    return found, np.where(trained, chance, 0.0)  # farther out it would guess


def _fired(seen: Seen, grid: RayGrid, low, high) -> tuple[np.ndarray, np.ndarray]:
    """The sensor's rays (n, 2) between two corners: those that meet the object, and the rest."""
    sensor = seen.sensor
    turn = np.arange(sensor.columns) * (2 * np.pi / sensor.columns)
    azimuth = wrap(np.add.outer(sensor.phase, turn) - grid.forward) / grid.step_azimuth
    elevation = np.broadcast_to(np.array(sensor.elevation)[:, None], azimuth.shape)
    fired = np.stack((azimuth, elevation / grid.step_elevation, 0 * azimuth), -1).reshape(-1, 3)
    fired = fired[((fired[:, :2] > low) & (fired[:, :2] < high)).all(axis=1)]
    hits = seen.scene.hits(grid.to_points(fired), (0.0, 0.0, sensor.height))
    meets = (hits.instance == 1) & (hits.reflectivity > 0)
    return fired[meets, :2], fired[~meets, :2]


# --- drawing -------------------------------------------------------------------------------------

MARGINS = dict(left=0.015, right=0.985, top=0.94, bottom=0.045)
HEAD = dict(color=INK, fontsize=12, fontweight="bold", ha="center")
TEXT = dict(color=INK, fontsize=10.5)
NOTE = dict(pad=3, **TEXT)


def _figure(width: float, height: float):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure


def _save(figure, out: Path) -> Path:
    figure.savefig(out, facecolor=PAPER)
    return out


def _panel(figure, cell):
    axes = figure.add_subplot(cell, facecolor=PAPER)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    return axes


def _head(panels: Sequence, names: Sequence[str]) -> None:
    """Names of columns, above the titles of the first row."""
    for axes, name in zip(panels, names, strict=True):
        place = dict(xy=(0.5, 1), xytext=(0, 20), textcoords="offset points")
        axes.annotate(name, xycoords="axes fraction", **place, **HEAD)


def _dots(axes, camera: Camera, points: np.ndarray, colour, size: float) -> None:
    """Points from far to near; strays are drawn over the edge of the panel, not left out."""
    flat, depth = camera.project(points)
    order = np.argsort(-depth)
    colour = colour if isinstance(colour, str) else np.asarray(colour)[order]
    axes.scatter(*flat[order].T, c=colour, s=size, linewidths=0, clip_on=False)


def _by_depth(camera: Camera, points: np.ndarray) -> np.ndarray:
    """Colours (n, 3) that fade with the distance from the camera."""
    depth = camera.project(points)[1]
    far = ((depth - depth.min()) / max(np.ptp(depth), 1e-9))[:, None]
    near, away = np.array([0.20, 0.27, 0.36]), np.array([0.80, 0.84, 0.88])
    return near + (away - near) * far


def _wheel(flat: np.ndarray) -> np.ndarray:
    """Colours (n, 3) of places (n, 2) in a plane: the direction is the hue."""
    from matplotlib.colors import hsv_to_rgb

    reach = np.linalg.norm(flat, axis=1)
    hue = (np.arctan2(flat[:, 1], flat[:, 0]) / (2 * np.pi)) % 1
    full = np.clip(reach / reach.max(), 0.15, 1)
    return hsv_to_rgb(np.stack((hue, full, np.full(len(flat), 0.85)), axis=1))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw the pictures of the documentation.")
    parser.add_argument("output", type=Path, metavar="OUT", help="the folder to write")
    parser.add_argument("--weights", default="lidar", help="for LiDAR (%(default)s)")
    parser.add_argument("--surface-weights", default="shape", help="for shapes (%(default)s)")
    parser.add_argument("--mesh", type=Path, help="shape of the ratios, instead of a knot")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    args = parser.parse_args(argv)
    options = (args.weights, args.surface_weights, args.mesh, args.device, args.seed)
    try:
        for path in figures(args.output, *options):
            print(path)
    except ValueError as error:
        print(f"figures: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
