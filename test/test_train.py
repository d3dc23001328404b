# SPDX-License-Identifier: Apache-2.0
"""Training: reproducible, exact to resume, the same in two processes as in one."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from apusmog_core.compute import keep_allocations
from apusmog_core.config import PRESETS, DataConfig, ModelConfig, TrainConfig
from apusmog_core.evaluation.baselines import midpoint
from apusmog_core.geometry import nearest_in_batch
from apusmog_core.model.losses import chamfer, surface_loss
from apusmog_core.model.network import ApuSmog
from apusmog_core.sensor.grid import wrap
from apusmog_core.sensor.losses import ray_loss
from apusmog_core.sensor.network import RayNetwork
from apusmog_core.sensor.view import ObjectScan, look_around, ray_points
from apusmog_core.training import probes
from apusmog_core.training.loop import begin_from, learning_rate, train
from apusmog_core.training.patches import MeshPatches, augment
from apusmog_core.weights import load_network

o3d = pytest.importorskip("open3d", reason="open3d makes the training data")
TINY = {"width": 8, "neighbours": 6, "encoder_hidden": 8, "decoder_hidden": 8}


@pytest.fixture(scope="module")
def mesh_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("meshes")
    o3d.io.write_triangle_mesh(str(folder / "torus.ply"), o3d.geometry.TriangleMesh.create_torus())
    return folder


@pytest.fixture
def config(mesh_folder, tmp_path_factory):
    data = DataConfig(
        meshes=str(mesh_folder), cache=str(mesh_folder / "cache"), points=32, ratios=(2.0, 3.5)
    )
    return TrainConfig(
        model=ModelConfig(**TINY),
        data=data,
        out=str(tmp_path_factory.mktemp("run")),
        steps=20,
        batch=4,
        warmup=2,
        device="cpu",
    )


def weights_of(path):
    return torch.load(path, weights_only=True)["state"]


def same(a, b, **tolerance):
    return all(torch.allclose(a[n].float(), b[n].float(), **tolerance) for n in a)


def test_twenty_steps_are_ten_and_a_resume_and_ten_more(config, tmp_path, monkeypatch):
    whole = weights_of(train(config))
    halves = replace(config, out=str(tmp_path))
    from apusmog_core.training import loop as module

    save, advance = module.Run.save, module.Run.advance

    def interrupted(run, forward):
        if run.step == 10:
            save(run)
            raise KeyboardInterrupt
        return advance(run, forward)

    with monkeypatch.context() as patch:
        patch.setattr(module.Run, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(halves)
    assert same(whole, weights_of(train(halves, resume=True)), atol=0, rtol=0)


def test_two_processes_train_what_one_does(config, tmp_path):
    alone = weights_of(train(replace(config, steps=6)))
    script = tmp_path / "run.py"
    both = replace(config, steps=6, out=str(tmp_path / "both"))
    script.write_text(
        "from apusmog_core.config import *\nfrom apusmog_core.training.loop import train\n"
        f"train({both!r})\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, str(script)], check=True, timeout=240, env=environment)
    together = weights_of(tmp_path / "both" / "weights.pt")
    assert same(alone, together, atol=2e-3)


def test_a_run_starts_from_given_weights_of_its_own_shape(config, tmp_path):
    path = train(replace(config, rate=0.01))
    still = replace(config, out=str(tmp_path / "a"), steps=1, rate=1e-30, rate_end=1e-30, warmup=0)
    assert same(weights_of(train(still, start_from=path)), weights_of(path), atol=1e-3)
    new = train(replace(still, out=str(tmp_path / "b")))
    assert not same(weights_of(new), weights_of(path), atol=1e-3)
    with pytest.raises(ValueError, match="another shape"):
        train(replace(still, out=str(tmp_path / "c")), start_from="shape")


def test_a_deeper_run_starts_with_the_answers_of_given_weights(config, tmp_path):
    path = train(replace(config, rate=0.01))
    deeper = replace(config.network, encoder_layers=3, decoder_layers=3)
    grown, known = ApuSmog(deeper), load_network(path)
    begin_from(grown, known, "known")
    points, noise = torch.randn(2, 20, 3), torch.randn(2, 20, 4, 2)
    near = nearest_in_batch(points, deeper.neighbours)
    answers = [network(points, near, noise)[0].fine for network in (grown, known)]
    torch.testing.assert_close(*answers)
    with pytest.raises(ValueError, match="encoder_layers, decoder_layers"):
        begin_from(known, grown, "grown")


def states(out):
    """Network, average and optimiser of a checkpoint."""
    stored = torch.load(os.path.join(out, "checkpoint.pt"), weights_only=True)
    return stored["network"], stored["average"], stored["optimiser"]


def test_what_is_saved_is_the_average_of_the_weights(config, tmp_path):
    for ema, is_average in ((0.9, True), (0.0, False)):
        path = train(replace(config, out=str(tmp_path / str(ema)), rate=0.05, ema=ema))
        network, average, _ = states(path.parent)
        assert same(weights_of(path), average, atol=2e-3, rtol=1e-3)
        assert same(weights_of(path), network, atol=2e-3, rtol=1e-3) != is_average


def test_the_average_follows_the_weights_step_by_step(config, monkeypatch):
    from apusmog_core.training import loop as module

    history, advance = [], module.Run.advance

    def remember(run, forward):
        parts = advance(run, forward)
        history.append([p.detach().clone() for p in run.network.parameters()])
        return parts

    monkeypatch.setattr(module.Run, "advance", remember)
    torch.manual_seed(config.seed)
    start = [p.detach().clone() for p in ApuSmog(config.network).parameters()]
    train(replace(config, steps=3, rate=0.05, ema=0.2))
    expected = start
    for step, now in enumerate(history, start=1):
        decay = min(0.2, (1 + step) / (10 + step))
        expected = [decay * a + (1 - decay) * b for a, b in zip(expected, now, strict=True)]
    names = [n for n, _ in ApuSmog(config.network).named_parameters()]
    average = states(config.out)[1]
    assert same(dict(zip(names, expected, strict=True)), average, atol=1e-5)


def test_gradients_are_clipped_before_they_count(config, tmp_path):
    """Adam's first moment is a tenth of the clipped gradient after one step."""
    for clip in (0.1, 1e-3):
        run = replace(config, out=str(tmp_path / str(clip)), steps=1, clip=clip, lambda_fine=1e3)
        moments = [s["exp_avg"] for s in states(train(run).parent)[2]["state"].values()]
        norm = torch.cat([m.flatten() for m in moments]).norm().item()
        assert norm == pytest.approx(0.1 * clip, rel=1e-3)


@pytest.mark.parametrize("decay_all", [False, True])
def test_weights_decay_and_the_others_only_if_asked(config, decay_all):
    """Without a gradient to speak of, a step is the decay alone."""
    still = replace(config, steps=3, clip=1e-20, rate=0.1, rate_end=0.1, warmup=0, ema=0.0)
    torch.manual_seed(config.seed)
    start = ApuSmog(config.network).state_dict()
    train(replace(still, weight_decay=0.5, decay_all=decay_all))
    network = states(config.out)[0]
    shrunk = (1 - 0.1 * 0.5) ** 3
    for name, parameter in ApuSmog(config.network).named_parameters():
        factor = shrunk if parameter.dim() > 1 or decay_all else 1.0
        torch.testing.assert_close(network[name], factor * start[name], rtol=1e-4, atol=1e-6)


def test_samplings_in_the_cache_belong_to_the_mesh_they_were_made_of(tmp_path):
    folder, cache = tmp_path / "meshes", tmp_path / "cache"
    folder.mkdir()
    sizes = []
    for radius in (1.0, 2.0):  # another mesh under the same name
        mesh = o3d.geometry.TriangleMesh.create_sphere(radius)
        o3d.io.write_triangle_mesh(str(folder / "ball.ply"), mesh)
        surface = MeshPatches(str(folder), 0, str(cache)).surfaces[0]
        sizes.append(np.linalg.norm(surface.dense, axis=1).max())
    assert sizes == pytest.approx([1.0, 2.0], rel=0.01)


def test_probes_in_the_cache_belong_to_the_meshes_they_were_cast_at(tmp_path):
    (tmp_path / "MANIFEST.tsv").write_text("name\tclass\na.obj\tcar\n")
    (tmp_path / "a.obj").write_text("v 0 0 0")
    before = probes._named(str(tmp_path))
    assert probes._named(str(tmp_path)) == before != probes._named(None)
    (tmp_path / "a.obj").write_text("v 0 0 1")
    assert probes._named(str(tmp_path)) != before


def test_a_checkpoint_of_another_preset_is_refused(config):
    train(replace(config, steps=1))
    other = replace(config, model=None, preset="shape")
    with pytest.raises(ValueError, match="checkpoint.pt: .*another network"):
        train(other, resume=True)


def test_a_new_run_does_not_write_over_an_earlier_one(config):
    path = train(replace(config, steps=1))
    before = weights_of(path)
    with pytest.raises(ValueError, match="earlier run: --resume it, change `out`"):
        train(config)
    assert same(weights_of(path), before, atol=0, rtol=0)


def test_resuming_without_a_checkpoint_says_so(config):
    with pytest.raises(ValueError, match="no checkpoint to resume"):
        train(config, resume=True)


def test_the_rate_warms_up_and_ends_where_it_should():
    config = TrainConfig(steps=1000, warmup=100)
    rates = [learning_rate(config, step) for step in range(1001)]
    assert rates[0] < rates[50] < rates[99] == pytest.approx(config.rate)
    assert all(a >= b for a, b in zip(rates[100:], rates[101:], strict=False))
    assert rates[-1] == pytest.approx(config.rate_end)


def test_overfitting_one_patch_beats_the_midpoints_four_times():
    """Dense enough to leave interpolation behind: the bumps between the points are learned."""
    keep_allocations()
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(np.linspace(-1, 1, 64), np.linspace(-1, 1, 64)), -1).reshape(-1, 2)

    def surface(xy):
        return np.c_[xy, 0.15 * np.sin(9 * xy[:, 0]) * np.cos(9 * xy[:, 1])].astype(np.float32)

    sparse = surface(rng.uniform(-1, 1, (128, 2)))
    dense = surface(grid[rng.permutation(len(grid))[:512]])
    points, target = torch.from_numpy(sparse)[None], torch.from_numpy(dense)[None]
    network = ApuSmog(PRESETS["shape"])
    noise = torch.randn(1, 128, 4, 2)
    near = nearest_in_batch(points, network.config.neighbours)
    batch = {"points": points, "neighbours": near, "target": target, "noise": noise.flatten(1, 2)}
    config = TrainConfig(
        loss="chamfer", lambda_fine=1.0, lambda_coarse=0.2, lambda_reconstruction=0.0
    )
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 300)
    for _ in range(300):
        loss, _ = surface_loss(network, batch, config)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        out = network(points, near, noise)[0].fine
    baseline = torch.from_numpy(midpoint(sparse, 512))[None]
    assert chamfer(out, target) < chamfer(baseline, target) / 4


def test_rays_are_learned_from_simulated_streets():
    torch.manual_seed(0)
    objects = probes.ProbedObjects.of(probes.street_objects(3))
    network = RayNetwork(PRESETS["lidar"])
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
    rng = np.random.default_rng(0)
    history = []
    for _ in range(40):
        batch = objects.batch(rng.integers(len(objects), size=8), rng)
        loss, _ = ray_loss(network, batch)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        history.append(loss.item())
    assert np.mean(history[-8:]) < np.mean(history[:8]) - 0.3


def test_a_deeper_ray_network_starts_with_the_answers_of_given_weights():
    torch.manual_seed(0)
    known = RayNetwork(PRESETS["lidar"])
    grown = RayNetwork(replace(PRESETS["lidar"], decoder_layers=2))
    begin_from(grown, known, "known")
    batch = probes.ProbedObjects.of(probes.street_objects(3)[:2]).batch(
        np.arange(2), np.random.default_rng(0)
    )
    torch.testing.assert_close(ray_loss(grown, batch)[0], ray_loss(known, batch)[0])


@pytest.fixture(scope="module")
def wall_truth():
    """A wall of 2 m by 1.2 m at x = 10 before a larger one, seen by every other ring."""
    from apusmog_core import simulate
    from apusmog_core.simulate import shapes

    near = shapes.box((0, -1, 0), (0.001, 1, 1.2), 0.5)  # no top or side to be seen
    far = shapes.box((0, -20, 0), (0.2, 20, 8), 0.5)
    scene = simulate.Scene(
        [simulate.Placed(near, "wall", 10, 0), simulate.Placed(far, "wall", 25, 0)]
    )
    sensor = simulate.Sensor.named("HDL-64E", noise=0.0)
    turn = simulate.scan(scene, sensor)
    kept = (turn.ring % 2 == 0) & (np.abs(turn.azimuth - np.pi) > 2)  # what lies ahead
    instance = np.where(turn.instance == 1, 1, 0)[kept]
    graph = look_around(ObjectScan(turn.points[kept], instance, turn.ring[kept]))
    rings = np.array(sensor.elevation)
    window = probes.RayWindow(0.0, np.pi, rings.min(), rings.max())
    return probes.Truth(
        scene, sensor, (0.0, 0.0, 0.0), np.array([1]), -sensor.height, window
    ), graph


def ends_of_rays(graph, rays, depth):
    anchors = np.repeat(np.arange(len(rays)), rays.shape[1])
    return ray_points(graph, anchors, rays.reshape(-1, 2), depth.ravel())


def test_probes_say_whether_and_where_their_rays_meet_the_true_object(wall_truth):
    """Each ray is followed to the plane of the wall by hand, from its angles alone."""
    truth, graph = wall_truth
    count = len(graph.rows)
    probed = probes._probed(truth, graph, slice(0, count), np.random.default_rng(0))
    ahead = ends_of_rays(graph, probed.probes[..., :2], 0 * probed.probes[..., 2])
    met = ahead * (10 / ahead[:, :1])
    height = met[:, 2] + truth.sensor.height
    inside = (np.abs(met[:, 1]) < 1) & (height > 0) & (height < 1.2)
    edges = (np.abs(met[:, 1]) - 1, height - 1.2, height)  # where rounding decides
    clear = np.abs(edges).min(axis=0) > 0.005
    hit = probed.hit.ravel()
    assert (hit == inside)[clear].all() and 0.02 < 1 - hit.mean() < 0.5
    ends = ends_of_rays(graph, probed.probes[..., :2], probed.probes[..., 2])
    assert np.abs(ends[hit, 0] - 10).max() < 0.01
    assert (probed.probes[..., 2][~probed.hit] == 0).all()


def test_probes_stay_where_the_kept_rings_of_the_sensor_look():
    window = probes.RayWindow(azimuth=3.0, half_width=0.1, lowest=-0.4, highest=0.03)
    azimuth, elevation = window.clip(np.array([-3.1, 2.95, 2.0]), np.array([0.1, 0.0, -0.5]))
    assert wrap(azimuth - [-np.pi + 3.1 - np.pi, 2.95, 2.9]) == pytest.approx([0, 0, 0], abs=1e-9)
    assert elevation.tolist() == [0.03, 0.0, -0.4]
    for probed in probes.street_objects(5)[:20]:
        assert (np.abs(probed.probes[..., :2]) <= (1.001, 1.051)).all()
        assert len(probed.probes) >= probes.FEWEST and probed.hit.any()


def test_patches_cover_the_same_piece_of_surface_and_scale_to_one(mesh_folder):
    patches = MeshPatches(str(mesh_folder), 0, str(mesh_folder / "cache"))
    rng = np.random.default_rng(0)
    sparse, dense = patches.cut(rng, 64, 300)
    assert sparse.shape == (64, 3) and dense.shape == (300, 3)
    points, target = augment(sparse, dense, DataConfig(jitter=0.05, thinning=1.0), rng)
    assert points.shape == (64, 3) and np.linalg.norm(target, axis=1).max() < 1.5


@pytest.mark.parametrize("kind", ["PU1K", "PU-GAN", "meshes"])
def test_the_papers_network_trains_on_published_patches_and_on_meshes(kind, mesh_folder, tmp_path):
    data = DataConfig(meshes=str(mesh_folder), cache=str(mesh_folder / "cache"))
    if kind != "meshes":
        h5py = pytest.importorskip("h5py")
        rng = np.random.default_rng(0)
        more = 3 if kind == "PU-GAN" else 0  # its file has normals behind the coordinates
        with h5py.File(tmp_path / "patches.h5", "w") as file:
            for size in (256, 1024):
                surface = rng.normal(size=(3, size, 3 + more))
                surface[..., :3] /= np.linalg.norm(surface[..., :3], axis=-1, keepdims=True)
                file[f"poisson_{size}"] = surface.astype(np.float32)
        data = DataConfig(hdf5=str(tmp_path / "patches.h5"))
    small = dict(width=16, neighbours=6, encoder_hidden=8, decoder_hidden=8)
    config = TrainConfig(
        preset="paper",
        model=replace(PRESETS["paper"], **small),
        data=data,
        out=str(tmp_path / "run"),
        steps=3,
        batch=2,
        warmup=0,
        rate=0.01,
        rate_end=0.01,  # whatever the number of steps
        device="cpu",
        decay_all=True,
        ema=0.0,
    )
    path = train(config)
    network = load_network(path)
    assert network.config == config.network
    assert all(torch.isfinite(v).all() for v in network.state_dict().values())
    tracked = {n: v for n, v in network.named_buffers() if n.endswith("running_mean")}
    assert tracked and all(v.abs().sum() > 0 for v in tracked.values())
    again = weights_of(train(replace(config, out=str(tmp_path / "again"), steps=2)))
    assert not same(weights_of(path), again, atol=0)
    resumed = replace(config, out=str(tmp_path / "again"))
    assert same(weights_of(path), weights_of(train(resumed, resume=True)), atol=0, rtol=0)


def test_a_folder_without_meshes_is_named(tmp_path):
    with pytest.raises(ValueError, match="no meshes"):
        MeshPatches(str(tmp_path), 0, str(tmp_path))
