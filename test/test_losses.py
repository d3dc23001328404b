# SPDX-License-Identifier: Apache-2.0
"""Each loss against a slow loop written from the equations of section 3.5."""

import math

import pytest
import torch

from apusmog_core.config import PRESETS, TrainConfig
from apusmog_core.geometry import nearest_in_batch
from apusmog_core.model.losses import (
    augmented_chamfer,
    chamfer,
    drift,
    interior_loss,
    projection_loss,
    surface_loss,
)
from apusmog_core.model.network import ApuSmog

ALPHA = 50.0  # milder than the paper's, so that all four neighbours count


@pytest.fixture
def clouds():
    generator = torch.Generator().manual_seed(3)
    return torch.rand(2, 12, 3, generator=generator), torch.rand(2, 17, 3, generator=generator)


def squared(a, b) -> float:
    return float(sum((p - q) ** 2 for p, q in zip(a.tolist(), b.tolist(), strict=True)))


def slow_projection_distance(x, z) -> float:
    total = 0.0
    for point in x:
        near = sorted(z, key=lambda other: squared(point, other))[:4]
        weights = [math.exp(-ALPHA * squared(point, other)) for other in near]
        mean = sum(w * other for w, other in zip(weights, near, strict=True)) / sum(weights)
        total += squared(point, mean)
    return total / len(x)


def slow_one_way(x, z) -> float:
    return sum(min(squared(p, q) for q in z) for p in x) / len(x)


def test_projection_loss_is_the_sum_of_both_directions_of_the_equation(clouds):
    x, z = clouds
    pairs = list(zip(x, z, strict=True))
    slow = sum(slow_projection_distance(a, b) + slow_projection_distance(b, a) for a, b in pairs)
    assert projection_loss(x, z, ALPHA, 4).item() == pytest.approx(slow / len(pairs), rel=1e-4)


def test_augmented_chamfer_is_the_worse_direction_of_each_patch(clouds):
    x, z = clouds
    pairs = list(zip(x, z, strict=True))
    slow = sum(max(slow_one_way(a, b), slow_one_way(b, a)) for a, b in pairs) / len(pairs)
    assert augmented_chamfer(x, z).item() == pytest.approx(slow, rel=1e-4)
    both = sum(slow_one_way(a, b) + slow_one_way(b, a) for a, b in pairs) / len(pairs)
    assert chamfer(x, z).item() == pytest.approx(both, rel=1e-4)


def test_identical_clouds_cost_nothing(clouds):
    x, _ = clouds
    assert augmented_chamfer(x, x) == 0
    assert projection_loss(x, x, 1e6, 4) < 1e-9


def test_the_interior_loss_does_not_look_at_the_border():
    generator = torch.Generator().manual_seed(0)
    target = torch.rand(1, 400, 3, generator=generator) * 2 - 1
    output = target[:, ::2].clone()
    inside = output.norm(dim=-1) < 0.7
    calm = interior_loss(output, target, inside, 0.7, 1e3, 4)
    output[~inside] += 0.3 * output[~inside]  # outwards, away from what is looked at
    assert interior_loss(output, target, inside, 0.7, 1e3, 4) < 1.3 * calm
    output[inside] *= 1.2
    assert interior_loss(output, target, inside, 0.7, 1e3, 4) > 1.5 * calm


def test_drift_is_the_move_that_all_outputs_share():
    away = torch.randn(4, 50, 3, generator=torch.Generator().manual_seed(0))
    away = away - away.mean(dim=(0, 1))
    assert drift(away) < 1e-10
    assert drift(away + torch.tensor([0.3, 0.0, 0.4])).item() == pytest.approx(0.25, rel=1e-4)


def test_far_apart_clouds_keep_a_finite_gradient(clouds):
    x = clouds[0].clone().requires_grad_()
    projection_loss(x, clouds[1] + 100.0).backward()
    assert torch.isfinite(x.grad).all() and x.grad.abs().sum() > 0


def test_the_total_is_the_weighted_sum_of_its_parts():
    torch.manual_seed(0)
    network = ApuSmog(PRESETS["shape"])
    points = torch.randn(1, 24, 3)
    batch = {
        "points": points,
        "neighbours": nearest_in_batch(points, 16),
        "target": torch.randn(1, 96, 3),
        "noise": torch.randn(1, 96, 2),
    }
    plain = surface_loss(network, batch, TrainConfig())[1]
    weights = TrainConfig(lambda_fine=0.02, lambda_coarse=0.03, lambda_drift=0.5)
    twice = surface_loss(network, batch, weights)
    assert twice[1]["fine"].item() == pytest.approx(2 * plain["fine"].item(), rel=1e-5)
    assert twice[1]["coarse"].item() == pytest.approx(3 * plain["coarse"].item(), rel=1e-5)
    assert twice[0].item() == pytest.approx(sum(v.item() for v in twice[1].values()), rel=1e-5)
