# SPDX-License-Identifier: Apache-2.0
"""The network on the sensor's rays: mixture, losses, and the same in machine code."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sensor_scans import bumpy, grid_scan
from torch.distributions import MultivariateNormal

from apusmog_core.config import PRESETS
from apusmog_core.sensor.compiled import CompiledRayNetwork, supports
from apusmog_core.sensor.grow import RayUpsampler
from apusmog_core.sensor.kernels import LANES
from apusmog_core.sensor.losses import depth_loss, outline_loss, ray_loss
from apusmog_core.sensor.network import RayNetwork, hit_probability
from apusmog_core.sensor.view import CONTEXT, NEIGHBOURS, look_around
from apusmog_core.training.probes import ProbedObjects, probed_object

PYTORCH = (torch.device("cpu"), torch.float32)


def network(**changes) -> RayNetwork:
    torch.manual_seed(0)
    made = RayNetwork(dataclasses.replace(PRESETS["lidar"], **changes))
    with torch.no_grad():
        for parameter in made.parameters():  # zeros would hide what they multiply
            parameter += 0.1 * torch.randn_like(parameter)
    return made.eval().requires_grad_(False)


def arrays(count: int, per: int = 3) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Offsets, neighbours, context and cloud of random points, and rays of shuffled anchors."""
    rng = np.random.default_rng(count)
    k = len(NEIGHBOURS)
    own = np.arange(count)[:, None]
    near = np.concatenate((own, rng.integers(count, size=(count, k - 1))), axis=1)
    offsets = rng.normal(size=(count, k, 3)) * (1.5, 1, 5)
    offsets[near == own] = 0
    context = rng.normal(size=(count, CONTEXT))
    rays = rng.uniform(-1.2, 1.2, (count, per, 2)).astype(np.float32)
    given = [offsets.astype(np.float32), near, context.astype(np.float32), np.arange(count) // 7]
    return given, rays, rng.permutation(count)


def tensors(given) -> list[torch.Tensor]:
    return [torch.from_numpy(a) for a in given]


# --- the mixture ---------------------------------------------------------------------------------


def test_the_intensity_is_the_weighted_sum_of_the_neighbours_gaussians_each_once():
    slow = network()
    given, rays, anchors = arrays(20)
    encoded = slow.encode(*tensors(given))
    found = slow.decode(encoded, *tensors((rays, anchors))).log_intensity.exp()
    offsets, near, *_ = given
    for a, anchor in enumerate(anchors[:5]):
        real = [0] + [j for j in range(1, near.shape[1]) if near[anchor, j] != anchor]
        for s in range(rays.shape[1]):
            expected = 0.0
            for j in real:
                mean, factor, weight = encoded.components[near[anchor, j]].split((2, 3, 1))
                first, low, second = factor.tolist()
                scale = torch.tensor([[first, 0.0], [low, second]])
                centre = torch.from_numpy(offsets[anchor, j, :2]) + mean
                normal = MultivariateNormal(centre, scale_tril=scale)
                expected += (normal.log_prob(torch.from_numpy(rays[a, s])) + weight).exp().item()
            assert found[a, s].item() == pytest.approx(expected, rel=1e-3)


def test_a_ray_meets_the_object_unless_a_poisson_process_returns_nothing():
    intensity = torch.tensor([1e-9, math.log(2), 100.0])
    assert hit_probability(intensity.log()).tolist() == pytest.approx([0, 0.5, 1], abs=1e-6)


def test_an_object_does_not_change_what_is_said_of_another():
    whole = network()
    given, rays, _ = arrays(20)
    given[1] = np.tile(np.arange(20)[:, None], len(NEIGHBOURS))  # no neighbours across objects
    first = slice(0, 7)
    together = whole.encode(*tensors(given))
    alone = whole.encode(*tensors([a[first] for a in given]))
    assert torch.allclose(together.features[first], alone.features, atol=1e-5)


def test_before_training_a_depth_is_that_of_the_neighbours_the_ray_passes():
    """The head starts at zero: what is left is the prior, followed here neighbour by neighbour."""
    torch.manual_seed(0)
    fresh = RayNetwork(PRESETS["lidar"]).eval().requires_grad_(False)
    given, rays, anchors = arrays(20)
    found = fresh.decode(fresh.encode(*tensors(given)), *tensors((rays, anchors))).depth
    offsets = given[0].astype(np.float64)
    for a, anchor in enumerate(anchors[:5]):
        for s, ray in enumerate(rays[a]):
            away = (offsets[anchor, :, :2] - ray) ** 2 @ (0.5, 2.0)
            weights = np.exp(away.min() - away)
            expected = weights @ offsets[anchor, :, 2] / weights.sum()
            assert found[a, s].item() == pytest.approx(expected, abs=1e-4)


# --- losses --------------------------------------------------------------------------------------


def test_the_outline_costs_the_log_chance_of_what_the_rays_did():
    intensity = torch.tensor([0.5, 2.0, 0.5, 2.0])
    hit = torch.tensor([True, True, False, False])
    met = [-math.log(1 - math.exp(-0.5)), -math.log(1 - math.exp(-2.0))]
    expected = (met[0] + met[1] + 0.5 + 2.0) / 4
    assert outline_loss(intensity.log(), hit).item() == pytest.approx(expected, rel=1e-5)
    first = torch.tensor([True, False, False, False])
    expected = (met[0] + 2.0 + 0.5 + 2.0) / 4
    assert outline_loss(intensity.log(), first).item() == pytest.approx(expected, rel=1e-5)
    likely = torch.tensor([3.0, -3.0])  # ln, of a ray that meets and of one that does not
    right = torch.tensor([True, False])
    assert outline_loss(likely, right) < 0.1 < outline_loss(likely, ~right)


def test_the_outline_keeps_a_gradient_however_wrong_it_is():
    for value, hit in ((-10.0, True), (3.0, False)):
        log_intensity = torch.tensor([value], requires_grad=True)
        outline_loss(log_intensity, torch.tensor([hit])).backward()
        assert log_intensity.grad.isfinite().all()
        assert (log_intensity.grad < 0) == hit


def test_depth_costs_a_cauchy_density_at_hits_alone():
    error, scale = torch.tensor([0.3, -0.3, 9.0]), torch.tensor([math.log(0.5), 0.0, 1.0])
    hit = torch.tensor([True, True, False])
    expected = (math.log(1.36 * 0.5) + math.log(1.09)) / 2
    assert depth_loss(error, scale, hit).item() == pytest.approx(expected, rel=1e-5)
    assert depth_loss(-error, scale, hit).item() == pytest.approx(expected, rel=1e-5)
    assert depth_loss(error, -scale, hit).item() != pytest.approx(expected, rel=1e-2)
    assert depth_loss(error, scale, ~hit & False).item() == 0
    far = depth_loss(torch.tensor([99.0]), scale[1:2], hit[:1])
    assert far < 10  # the tails are heavy
    best = depth_loss(error[:1], torch.tensor([math.log(0.3)]), hit[:1])  # scale = the error
    assert best < depth_loss(error[:1], torch.tensor([math.log(0.4)]), hit[:1])
    assert best < depth_loss(error[:1], torch.tensor([math.log(0.2)]), hit[:1])


def batch_of(count: int = 30) -> dict[str, torch.Tensor]:
    given, rays, _ = arrays(count)
    names = ("offsets", "neighbours", "context", "cloud")
    depth = np.random.default_rng(0).normal(size=(*rays.shape[:2], 1)).astype(np.float32)
    return dict(
        zip(names, tensors(given), strict=True),
        probes=torch.from_numpy(np.concatenate((rays, depth), axis=-1)),
        hit=torch.from_numpy(depth[..., 0] > 0),
    )


def test_the_loss_of_a_batch_compares_depths_with_their_sign_and_reaches_every_weight():
    learner = network().requires_grad_(True)
    batch = batch_of()
    total, parts = ray_loss(learner, batch)
    encoded = learner.encode(*(batch[n] for n in ("offsets", "neighbours", "context", "cloud")))
    out = learner.decode(encoded, batch["probes"][..., :2], torch.arange(30))
    away = (out.depth - batch["probes"][..., 2])[batch["hit"]].abs()
    scale = out.log_scale[batch["hit"]]
    expected = (torch.log1p((away / scale.exp()) ** 2) + scale).mean()
    assert parts["depth"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert total.item() == pytest.approx(sum(p.item() for p in parts.values()), rel=1e-5)
    total.backward()
    silent = [n for n, p in learner.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []


# --- mirrored ------------------------------------------------------------------------------------


def test_a_mirrored_batch_is_the_batch_of_the_mirrored_scan():
    reach = bumpy(rings=5, columns=16)
    instance = np.ones(reach.shape, int)
    instance[:, 10:] = 0  # so that left and right of the object differ
    scan = grid_scan(reach, instance, start=0.2)
    rng = np.random.default_rng(0)
    probes, hit = rng.normal(size=(50, 6, 3)), rng.random((50, 6)) < 0.5
    flipped = dataclasses.replace(scan, points=scan.points * (1, -1, 1))
    batches = []
    for one, sign in ((scan, 1), (flipped, -1)):
        probed = probed_object(look_around(one), slice(0, 50), probes * (sign, 1, 1), hit)
        batches.append(ProbedObjects.of([probed]))
    mirrored = batches[0].batch(np.array([0]), SimpleNamespace(random=np.zeros))
    expected = batches[1].batch(np.array([0]), SimpleNamespace(random=np.ones))
    order = [NEIGHBOURS.tolist().index([ring, -column]) for ring, column in NEIGHBOURS.tolist()]
    for name in ("neighbours", "offsets"):
        mirrored[name] = mirrored[name][:, order]
    for name, value in expected.items():
        assert torch.allclose(mirrored[name].double(), value.double(), atol=5e-3), name
    unchanged = batches[0].batch(np.array([0]), SimpleNamespace(random=np.ones))
    assert not torch.allclose(unchanged["context"], expected["context"], atol=5e-3)


# --- machine code --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, LANES - 1, LANES, 3 * LANES + 1])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(width=12, decoder_layers=2),
        dict(frequencies=3, learned_weights=False, encoder_hidden=20, decoder_hidden=24),
        dict(width=80, encoder_hidden=128, decoder_hidden=8, xi_hidden=8, spread=1.0),
    ],
)
def test_machine_code_gives_the_answers_of_the_network(count, changes):
    slow = network(**changes)
    given, rays, anchors = arrays(count)
    quick = CompiledRayNetwork(slow)
    found = quick.decode(quick.encode(*given), rays, anchors)
    out = slow.decode(slow.encode(*tensors(given)), *tensors((rays, anchors)))
    expected = (out.depth.numpy(), out.log_scale.numpy(), out.log_intensity.exp().numpy())
    for name, a, b in zip(("depth", "log_scale", "intensity"), found, expected, strict=True):
        assert a == pytest.approx(b, abs=1e-4, rel=1e-3 if name == "intensity" else 1e-5), name
    assert np.ptp(expected[0]) > 0.1


@pytest.mark.parametrize(
    "changes",
    [
        dict(query_self_attention=True),
        dict(covariance="clamp"),
        dict(width=18),
        dict(xi_hidden=18),
        dict(decoder_hidden=34),
    ],
)
def test_what_the_machine_code_does_not_know_stays_with_pytorch(changes):
    other = network(**changes)
    assert not supports(other) and supports(network())
    assert not RayUpsampler.serves(other, *PYTORCH) and RayUpsampler.serves(network(), *PYTORCH)
    with pytest.raises(ValueError, match="machine code"):
        CompiledRayNetwork(other)


def test_weights_that_training_has_broken_give_nan_as_the_network_does():
    broken = network()
    broken.head.offset.weight.fill_(float("nan"))
    given, rays, anchors = arrays(10)
    quick = CompiledRayNetwork(broken)
    assert np.isnan(quick.decode(quick.encode(*given), rays, anchors)[0]).all()
