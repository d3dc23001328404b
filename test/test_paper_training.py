# SPDX-License-Identifier: Apache-2.0
"""Preset `paper`, in training (section 3.5, both passes), and in sizes and use (section 4.1)."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from paper_network import PAPER, awake, encode, paper, training_batch, two_patches

from apusmog_core import Upsampler
from apusmog_core.config import PRESETS, TrainConfig
from apusmog_core.model.losses import surface_loss
from apusmog_core.model.network import ApuSmog, parameter_count
from apusmog_core.settings import load_yaml


@pytest.fixture
def patch():
    return two_patches()


# --- 3.5 -----------------------------------------------------------------------------------------


def both_passes(network: ApuSmog, batch: dict[str, torch.Tensor]):
    """Features, upsampling (four samples a point) and reconstruction of a training batch."""
    encoded = encode(network, batch["points"])
    mixture = network.mixture(encoded)
    noise = batch["noise"].unflatten(1, (-1, 4))
    up = network.decode(encoded, mixture.sample(noise).flatten(1, 2))
    return encoded, up, network.decode(encoded, mixture.mean)


def off_projection(point: torch.Tensor, cloud: torch.Tensor) -> float:
    """Squared distance to the projection on four neighbours, alpha = 1000."""
    value, index = (cloud.double() - point).square().sum(dim=1).sort()
    weights = (-1e3 * (value[:4] - value[0])).exp()
    mean = (weights[:, None] * cloud[index[:4]].double()).sum(dim=0) / weights.sum()
    return (point - mean).square().sum().item()


def slow_projection(x: torch.Tensor, z: torch.Tensor) -> float:
    """L_Pi of two clouds, both directions."""
    pairs = ((x, z), (z, x))
    return sum(np.mean([off_projection(point, b) for point in a.double()]) for a, b in pairs)


def slow_acd(x: torch.Tensor, z: torch.Tensor) -> float:
    squared = torch.cdist(x.double(), z.double()).square()
    return max(squared.amin(dim=1).mean().item(), squared.amin(dim=0).mean().item())


def test_the_total_loss_of_the_paper_is_its_equation_10(patch):
    network = paper()
    batch = training_batch(network, patch)
    config = load_yaml(TrainConfig, "config/train/paper.yaml")
    total, parts = surface_loss(network, batch, config)
    _, up, again = both_passes(network, batch)
    expected = 0.0
    for b in range(2):
        target, points = batch["target"][b], patch[b]
        expected += 0.01 * slow_projection(up.coarse[b], target) / 2
        expected += 0.01 * slow_projection(up.fine[b], target) / 2
        expected += 1.00 * slow_acd(again.coarse[b], points) / 2
    assert set(parts) == {"coarse", "fine", "reconstruction"}
    assert total.item() == pytest.approx(expected, rel=1e-4)
    total.backward()
    silent = [n for n, p in network.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == ["decoder.0.norm0.weight"]  # 3DETR's queries begin as zeros


def test_the_total_loss_of_shape_is_the_sum_its_settings_say(patch):
    torch.manual_seed(0)
    network = awake(ApuSmog(replace(PRESETS["shape"], width=8, neighbours=5)))
    batch = training_batch(network, patch)
    config = load_yaml(TrainConfig, "config/train/shape.yaml")
    total, parts = surface_loss(network, batch, config)
    encoded, up, again = both_passes(network, batch)
    off = sum(slow_acd(again.coarse[b], patch[b]) for b in range(2)) / 2
    assert parts["reconstruction"].item() == pytest.approx(0.02 * off, rel=1e-4)
    for name, weight, points in (("coarse", 0.5, up.coarse), ("fine", 1.0, up.fine)):
        expected = slow_interior(points, batch["target"], patch)
        assert parts[name].item() == pytest.approx(weight * expected, rel=1e-3), name
    own = patch.repeat_interleave(4, dim=1)
    spacing = encoded.spacing.repeat_interleave(4, dim=1)
    shift = ((up.fine - own) / spacing).flatten(0, 1).mean(dim=0)
    assert parts["drift"].item() == pytest.approx(0.05 * shift.square().sum().item(), rel=1e-4)
    assert total.item() == pytest.approx(sum(v.item() for v in parts.values()), rel=1e-6)


def slow_interior(x, z, anchors) -> float:
    off, covered = [], []
    for b in range(len(x)):
        for m, point in enumerate(x[b].double()):
            if anchors[b, m // 4].norm() < 0.7:
                off.append(off_projection(point, z[b]))
        for point in z[b].double():
            if point.norm() < 0.85 * 0.7:
                covered.append((x[b].double() - point).square().sum(dim=1).min().item())
    return 2 * np.mean(off) + np.mean(covered)


# --- 4.1 -----------------------------------------------------------------------------------------


def test_sizes_and_schedule_are_those_of_section_4_1():
    network = ApuSmog(PAPER)
    shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
    expected = {
        "extract.alpha.weight": (128, 3),
        "extract.eta.0.weight": (3, 3),
        "extract.gamma.3.weight": (128, 16),
        "encoder.0.feed.0.weight": (64, 128),
        "decoder.0.feed.0.weight": (128, 128),
        "decoder.1.itself.query.weight": (128, 128),
        "mixture_head.xi.0.weight": (64, 128),
        "head.0.weight": (64, 128),
        "head.3.weight": (32, 64),
        "head.6.weight": (3, 32),
        "refine.0.layer.alpha.weight": (128, 128),
        "refine.0.residual.0.weight": (64, 128),
    }
    assert {name: shapes.get(name) for name in expected} == expected
    assert parameter_count(network) == 621_265
    assert (len(network.encoder), len(network.decoder), len(network.refine)) == (1, 2, 1)
    assert (PAPER.neighbours, PAPER.heads, PAPER.refine_neighbours) == (32, 4, 0)
    assert (PAPER.component_share, PAPER.learned_weights, PAPER.covariance) == (1, False, "clamp")
    run = load_yaml(TrainConfig, "config/train/paper.yaml")
    assert run.network == PAPER
    assert (run.steps, run.batch, run.rate, run.rate_end) == (100_000, 64, 5e-4, 1e-6)
    assert (run.weight_decay, run.clip, run.loss) == (0.1, 0.1, "projection")
    assert (run.lambda_coarse, run.lambda_fine, run.lambda_reconstruction) == (0.01, 0.01, 1.0)
    assert (run.projection_alpha, run.projection_neighbours) == (1e3, 4)
    assert (run.data.points, run.data.ratios, run.data.target_factor) == (256, (4.0,), 1.0)


def test_the_papers_way_returns_farthest_points_of_its_patches_and_nothing_else(monkeypatch):
    """No measured points among the candidates, no relaxation, exact counts for any ratio."""
    network = paper()
    up = Upsampler(network, "cpu")
    decoded = []
    candidates = up.way.candidates

    def remember(*args):
        found = candidates(*args)
        decoded.append(found.flatten(0, 1).numpy())
        return found

    monkeypatch.setattr(up.way, "candidates", remember)
    cloud = np.random.default_rng(0).normal(size=(600, 3)).astype(np.float32)
    for ratio in (1.5, 2.34, 4.0):
        decoded.clear()
        out = up.upsample(cloud, ratio)
        assert len(out) == round(ratio * 600)
        known = np.concatenate(decoded) + cloud.mean(axis=0)
        known = {tuple(np.round(p, 4)) for p in known.tolist()}
        assert sum(tuple(np.round(p, 4)) in known for p in out.tolist()) > 0.99 * len(out)
    assert math.isfinite(out.sum())
