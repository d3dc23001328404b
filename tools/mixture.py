# SPDX-License-Identifier: Apache-2.0
def mixture(lidar: Upsampler, surface: Upsampler, out: Path, seed: int = 0) -> Path:
    """The learned components: of a surface patch on the sphere, of a car on the sensor's rays."""
    figure = new_figure(12, 9.0)
    rows = figure.add_gridspec(2, 1, height_ratios=(1.2, 1), hspace=0.2, **MARGINS)
    globes = rows[0].subgridspec(1, 3, wspace=0.04)
    _on_sphere([add_panel(figure, globes[column]) for column in range(3)], surface, seed)
    _on_rays(add_panel(figure, rows[1]), lidar, see("car", 20.0, seed))
    return save_figure(figure, out)


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
