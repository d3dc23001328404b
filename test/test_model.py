# SPDX-License-Identifier: Apache-2.0
"""The network of section 3: what holds whatever the weights are."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from apusmog_core.config import PRESETS, ModelConfig
from apusmog_core.geometry import nearest_in_batch
from apusmog_core.model.network import ApuSmog
from apusmog_core.model.smog import MixtureHead, cholesky_factor, to_angles, to_cartesian

RATIOS = (0.5, 1, 1.5, 1.98, 2.34, 3.45, 4, 4.93, 7.72, 9.51, 18.11, 22.86)
SMALL = {"width": 16, "neighbours": 6, "encoder_hidden": 16, "decoder_hidden": 16}


def small(preset="shape", **changes) -> ApuSmog:
    torch.manual_seed(0)
    values = {**vars(PRESETS[preset]), **SMALL, **changes}
    network = ApuSmog(ModelConfig(**values))
    for parameter in network.parameters():  # heads start at zero: shake them awake
        parameter.data += 0.1 * torch.randn_like(parameter)
    return network.eval()


def run(network: ApuSmog, points: torch.Tensor, noise: torch.Tensor):
    near = nearest_in_batch(points, network.config.neighbours)
    return network(points, near, noise)


@pytest.fixture
def cloud():
    return torch.randn(2, 40, 3, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def noise():
    return torch.randn(2, 40, 3, 2, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("preset", ["paper", "shape"])
def test_gradients_reach_means_and_covariances_of_the_mixture(preset, cloud, noise):
    network = small(preset)
    out, mixture = run(network, cloud, noise)
    mixture.mean.retain_grad(), mixture.cholesky.retain_grad()
    out.fine.square().sum().backward()
    assert mixture.mean.grad.abs().sum() > 0
    assert mixture.cholesky.grad.abs().sum() > 0
    assert network.mixture_head.xi[0].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("form", ["clamp", "tanh", "rotation"])
def test_every_covariance_is_positive_semidefinite_for_extreme_inputs(form):
    values = torch.tensor([-1e6, -30.0, -1.0, 0.0, 1.0, 30.0, 1e6])
    raw = torch.cartesian_prod(values, values, values)
    factor = cholesky_factor(raw, form)
    covariance = (factor @ factor.mT).double()
    assert torch.isfinite(covariance).all()
    lowest = torch.linalg.eigvalsh(covariance)[:, 0]
    assert (lowest >= -1e-5 * covariance.diagonal(dim1=1, dim2=2).sum(1)).all()


@pytest.mark.parametrize("form", ["clamp", "tanh", "rotation"])
def test_sampled_moments_match_the_parameters(form):
    torch.manual_seed(0)
    config = ModelConfig(covariance=form, **SMALL)
    mixture = MixtureHead(config)(torch.randn(1, 5, 16))
    mixture.mean = to_cartesian(torch.full((1, 5), 0.7), torch.full((1, 5), 1.5))
    mixture.cholesky = mixture.cholesky * 0.08  # small enough not to wrap
    azimuth, elevation = to_angles(mixture.sample(torch.randn(1, 5, 100_000, 2)))
    samples = torch.stack((azimuth, elevation), dim=-1)[0]
    for component, wanted in zip(samples, mixture.covariance[0], strict=True):
        assert torch.allclose(component.mean(0), torch.tensor([0.7, 1.5]), atol=0.01)
        assert torch.allclose(torch.cov(component.T), wanted, rtol=0.05, atol=1e-4)


def test_samples_stay_on_the_unit_sphere_across_poles_and_seam():
    azimuth = torch.tensor([3.1, -3.1, 9.0, 0.0])
    elevation = torch.tensor([0.01, 3.3, -0.2, 1.0])
    assert torch.allclose(to_cartesian(azimuth, elevation).norm(dim=-1), torch.ones(4))


@pytest.mark.parametrize("preset", ["paper", "shape"])
def test_output_is_equivariant_to_the_order_of_the_input(preset, cloud, noise):
    network = small(preset)
    order = torch.randperm(40)
    direct, _ = run(network, cloud, noise)
    shuffled, _ = run(network, cloud[:, order], noise[:, order])
    wanted = direct.fine.unflatten(1, (40, 3))[:, order].flatten(1, 2)
    assert torch.allclose(shuffled.fine, wanted, atol=1e-4)


@pytest.mark.parametrize("preset", ["paper", "shape"])
def test_output_is_equivariant_to_translation_and_scale(preset, cloud, noise):
    network = small(preset)
    direct, _ = run(network, cloud, noise)
    moved, _ = run(network, cloud * 7.0 + torch.tensor([3.0, -2.0, 1.0]), noise)
    assert torch.allclose(moved.fine, direct.fine * 7 + torch.tensor([3.0, -2.0, 1.0]), atol=1e-3)


@pytest.mark.parametrize("preset", ["paper", "shape"])
@pytest.mark.parametrize("shape", ["flat", "line", "duplicates", "single"])
def test_degenerate_patches_give_finite_results(preset, shape, cloud):
    points = cloud[:1].clone()
    if shape == "flat":
        points[..., 2] = 0
    elif shape == "line":
        points[..., 1:] = 0
    elif shape == "duplicates":
        points[:] = points[:, :1]
    else:
        points = points[:, :1]
    network = small(preset)
    out, mixture = run(network, points, torch.randn(1, points.shape[1], 2, 2))
    assert torch.isfinite(out.fine).all()
    out.fine.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in network.parameters() if p.grad is not None)


def test_an_output_point_does_not_depend_on_how_many_are_asked_for(cloud, noise):
    network = small("shape", refinements=0)
    three, _ = run(network, cloud, noise)
    one, _ = run(network, cloud, noise[:, :, :1])
    assert torch.allclose(three.coarse.unflatten(1, (40, 3))[:, :, 0], one.coarse, atol=1e-5)


def test_before_training_a_sample_leads_to_the_neighbours_on_its_side(cloud, noise):
    """Heads start at zero: what is left is the prior, followed here neighbour by neighbour."""
    torch.manual_seed(0)
    network = ApuSmog(ModelConfig(**{**vars(PRESETS["shape"]), **SMALL, "refinements": 0}))
    near = nearest_in_batch(cloud, 6)
    encoded = network.encode(cloud, near)
    samples = network.sample(network.mixture(encoded), noise.flatten(1, 2))
    out = network.decode(encoded, samples).coarse.unflatten(1, (40, 3))
    for i in (0, 17, 39):
        spacing = (cloud[0, near[0, i, 1:7]] - cloud[0, i]).norm(dim=1).mean()
        offsets = (cloud[0, near[0, i]] - cloud[0, i]) / spacing
        for s in range(3):
            lead = 0.7 * samples[0, 3 * i + s]
            weights = (-6.0 * (offsets - lead).square().sum(dim=1)).softmax(dim=0)
            expected = cloud[0, i] + spacing * (weights[:, None] * offsets).sum(dim=0)
            assert torch.allclose(out[0, i, s], expected, atol=1e-4)


def test_every_switch_of_the_configuration_runs(cloud, noise):
    for changes in (
        {"output": "anchored"},
        {"output": "absolute", "attention": "global"},
        {"attention": "global", "query_self_attention": True},
        {"frame": "patch", "query_code": "random", "mlp_norm": "batch"},
        {"refine_from": "backbone", "covariance": "clamp", "sample_limit": 2.0, "spread": 0.3},
        {"uniform_sphere": True},
        {"learned_weights": True},
        {"refinements": 2, "refine_neighbours": 5},
        {"encoder_layers": 0},
    ):
        out, _ = run(small("shape", **changes), cloud, noise)
        assert out.fine.shape == (2, 120, 3) and torch.isfinite(out.fine).all(), changes
    out, mixture = run(small("shape", component_share=0.25), cloud, noise[:, :10])
    assert mixture.mean.shape[1] == 10 and out.fine.shape == (2, 30, 3)


def test_autocast_gives_nearly_the_same_points(cloud, noise):
    network = small("shape")
    exact, _ = run(network, cloud, noise)
    with torch.autocast("cpu", torch.bfloat16):
        rough, _ = run(network, cloud, noise)
    assert (exact.fine - rough.fine).abs().median() < 0.05 * np.median(exact.fine.detach().abs())


def test_impossible_configurations_are_refused_with_a_reason():
    with pytest.raises(ValueError, match="multiple of heads"):
        ModelConfig(width=30, heads=4, attention="global")
    with pytest.raises(ValueError, match="'local' has no heads"):
        ModelConfig(heads=2)
    lidar = PRESETS["lidar"]
    for name, value in (("attention", "global"), ("neighbours", 13), ("mlp_norm", "batch")):
        with pytest.raises(ValueError, match=f"domain 'sensor' needs {name}"):
            replace(lidar, **{name: value})
