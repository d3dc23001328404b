# SPDX-License-Identifier: Apache-2.0
"""Preset `paper`, held to the equations of sections 3.1 to 3.4 by slow loops."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from paper_network import FEW, PAPER, awake, encode, paper, training_batch, two_patches
from torch import nn

from apusmog_core.config import PRESETS, TrainConfig
from apusmog_core.geometry import nearest_in_batch
from apusmog_core.model.attention import PointTransformerLayer
from apusmog_core.model.losses import drawn_share, projection_loss, surface_loss
from apusmog_core.model.network import ApuSmog
from apusmog_core.model.smog import Mixture, MixtureHead
from apusmog_core.model.transformer import DecoderLayer, EncoderLayer


@pytest.fixture
def patch():
    return two_patches()


# --- 3.1 -----------------------------------------------------------------------------------------


def slow_equation_1(layer: PointTransformerLayer, features, offsets, neighbours) -> torch.Tensor:
    """f_i = sum_j softmax_j(gamma(beta(x_i) - psi(x_j) + delta)) * (alpha(x_j) + delta)."""
    rows = []
    for i in range(len(features)):
        scores, values = [], []
        for n, j in enumerate(neighbours[i].tolist()):
            delta = layer.eta(offsets[i, n][None])[0]
            difference = layer.beta(features[i]) - layer.psi(features[j]) + delta
            scores.append(layer.gamma(difference[None])[0])
            values.append(layer.alpha(features[j]) + delta)
        weights = torch.stack(scores).exp()
        weights = weights / weights.sum(dim=0)  # each channel on its own
        rows.append((weights * torch.stack(values)).sum(dim=0))
    return torch.stack(rows)


@pytest.mark.parametrize("norm", ["batch", "none"])
def test_the_point_transformer_layer_is_equation_1(norm, patch):
    layer = awake(PointTransformerLayer(7, 12, eta=3, gamma=5, norm=norm))
    features = torch.randn(2, 20, 7)
    near = nearest_in_batch(patch, 4)
    offsets = torch.randn(2, 20, 4, 3)
    found = layer(features, layer.project(features), offsets, near)
    for b in range(2):
        expected = slow_equation_1(layer, features[b], offsets[b], near[b])
        torch.testing.assert_close(found[b], expected, atol=1e-5, rtol=1e-4)


def test_the_backbone_is_equation_1_on_the_coordinates_of_the_patch(patch):
    network = paper()
    near = nearest_in_batch(patch, network.config.neighbours)
    found = network.encode(patch, near).features
    for b, points in enumerate(patch):
        centred = points - points.mean(dim=0)
        unit = centred / centred.norm(dim=1).max()
        offsets = unit[near[b]] - unit[:, None]
        expected = slow_equation_1(network.extract, unit, offsets, near[b])
        expected = torch.relu(network.extracted[0](expected))  # the released code's end
        torch.testing.assert_close(found[b], expected, atol=1e-5, rtol=1e-4)


# --- 3.2 -----------------------------------------------------------------------------------------


def test_deviations_start_where_the_released_code_starts_and_covariances_are_clamped():
    head = MixtureHead(PAPER)
    nn.init.zeros_(head.xi[-1].weight)
    head.xi[-1].bias.data = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 9.0, 0.0])
    mixture = head(torch.randn(1, 3, 128))
    covariance = mixture.covariance[0, 0].tolist()
    assert covariance[0][0] == pytest.approx(0.275**2) == pytest.approx(covariance[1][1])
    assert covariance[0][1] == pytest.approx(0.275**2, abs=2e-6)  # a 9 does not fit
    head.xi[-1].bias.data[3:6] = torch.tensor([-9.0, 0.0, 0.003])
    covariance = head(torch.randn(1, 3, 128)).covariance[0, 0].tolist()
    assert covariance[0][0] == pytest.approx(0.05**2)
    assert covariance[0][1] == pytest.approx(0.003, rel=1e-4)


def test_samples_stay_within_two_deviations():
    mean = torch.tensor([[[1.0, 0.0, 0.0]]])
    mixture = Mixture(mean, 0.1 * torch.eye(2)[None, None], torch.zeros(1, 1), limit=2.0)
    step = mixture.displace(torch.tensor([[[[5.0, -1.0], [0.5, -7.0]]]]))
    assert step.flatten().tolist() == pytest.approx([0.2, -0.1, 0.05, -0.2])
    assert MixtureHead(PAPER)(torch.randn(1, 2, 128)).limit == 2.0


def mixture_of(weights: list[float]) -> Mixture:
    """Components at the corners of an octahedron, narrow, with these weights."""
    corners = torch.cat((torch.eye(3), -torch.eye(3)))[: len(weights)]
    narrow = (0.01 * torch.eye(2)).expand(1, len(weights), 2, 2)
    return Mixture(corners[None], narrow, torch.tensor([weights]).log())


def test_samples_follow_the_weights_and_are_as_many_as_asked_for():
    mixture = mixture_of([0.5, 0.3, 0.15, 0.05])
    counts = mixture.allot(40)
    assert counts.tolist() == [[20, 12, 6, 2]]
    samples = mixture.draw(torch.randn(1, 40, 2), counts)
    nearest = (samples[0] @ mixture.mean[0].T).argmax(dim=1)
    assert torch.bincount(nearest, minlength=4).tolist() == [20, 12, 6, 2]
    rng = np.random.default_rng(0)
    for count in (1, 7, 1000):
        weights = rng.dirichlet(np.ones(6) * 0.5)
        counts = mixture_of(weights.tolist()).allot(count)[0]
        assert counts.sum() == count and (np.abs(counts.numpy() - weights * count) < 1.01).all()


def test_equal_weights_give_every_component_the_same():
    equal = mixture_of([1 / 6] * 6)
    assert equal.allot(24).tolist() == [[4] * 6]
    assert sorted(equal.allot(15)[0].tolist()) == [2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("preset", ["paper", "shape"])
def test_learned_weights_place_the_outputs_and_keep_their_number(preset, patch):
    torch.manual_seed(0)
    small = FEW if preset == "paper" else dict(width=8, encoder_layers=1, neighbours=5)
    network = awake(ApuSmog(replace(PRESETS[preset], learned_weights=True, **small)))
    encoded = encode(network, patch)
    mixture = network.mixture(encoded)
    counts = network.allot(mixture, 50)
    assert counts.sum(dim=1).tolist() == [50, 50] and counts.unique().numel() > 1
    heavy = Mixture(mixture.mean, mixture.cholesky, torch.full((2, 20), -20.0))
    heavy.log_weight[:, 3] = 0.0
    counts = network.allot(heavy, 50)
    samples = network.sample(heavy, torch.randn(2, 50, 2), counts)
    assert (network.anchor_of(encoded, samples, counts) == 3).all()
    out = network.decode(encoded, samples, counts)
    assert out.fine.shape == (2, 50, 3)
    if preset == "shape":  # an anchored output is near its anchor
        away = (out.coarse - patch[:, 3:4]).norm(dim=-1) / encoded.spacing[:, 3]
        assert away.max() < 3


def test_weights_learn_where_samples_are_missing():
    """Two pieces of surface, one with many samples and one with few, all of them on it."""
    generator = torch.Generator().manual_seed(0)
    pieces = torch.rand(2, 200, 3, generator=generator) * torch.tensor([1.0, 1.0, 0.0])
    pieces[1] += 5.0
    weight = torch.tensor([[30 / 32, 2 / 32]]).log().requires_grad_()
    mixture = Mixture(torch.zeros(1, 2, 3), torch.zeros(1, 2, 2, 2), weight)
    counts = mixture.allot(32)
    assert counts.tolist() == [[30, 2]]
    outputs = torch.cat((pieces[0, :30], pieces[1, :2]))[None]
    share = drawn_share(mixture, counts)
    assert (share == 1).all()  # no more than a gradient
    projection_loss(outputs, pieces.view(1, 400, 3), share=share).backward()
    many, few = weight.grad[0].tolist()
    assert few < 0 and few < 3 * many  # more there, and rather there


def test_learned_weights_have_a_gradient_in_training(patch):
    torch.manual_seed(0)
    network = awake(ApuSmog(replace(PAPER, learned_weights=True, **FEW)))
    total, _ = surface_loss(network, training_batch(network, patch), TrainConfig())
    total.backward()
    assert network.mixture_head.xi[-1].weight.grad[-1].abs().sum() > 0
    assert network.mixture(encode(network, patch)).log_weight.exp().sum(dim=1).tolist() == (
        pytest.approx([1, 1])
    )


# --- 3.3 -----------------------------------------------------------------------------------------


def as_torch(attention: nn.Module) -> dict[str, torch.Tensor]:
    """Weights of our attention under the names of nn.MultiheadAttention."""
    parts = (attention.query, attention.key, attention.value)
    return {
        "in_proj_weight": torch.cat([p.weight for p in parts]),
        "in_proj_bias": torch.cat([p.bias for p in parts]),
        "out_proj.weight": attention.out.weight,
        "out_proj.bias": attention.out.bias,
    }


def test_the_encoder_layer_is_that_of_pytorch():
    config = replace(PAPER, width=16, encoder_hidden=8)
    ours = awake(EncoderLayer(config))
    theirs = nn.TransformerEncoderLayer(16, 4, 8, 0.0, batch_first=True, norm_first=True).eval()
    state = {f"self_attn.{n}": v for n, v in as_torch(ours.attention).items()}
    for mine, name in ((ours.feed[0], "linear1"), (ours.feed[2], "linear2")):
        state |= {f"{name}.{n}": v for n, v in mine.state_dict().items()}
    for name in ("norm1", "norm2"):
        state |= {f"{name}.{n}": v for n, v in getattr(ours, name).state_dict().items()}
    theirs.load_state_dict(state)
    x = torch.randn(2, 9, 16)
    torch.testing.assert_close(ours(x, ours.project(x), None, None), theirs(x))


def test_the_decoder_layer_adds_codes_to_queries_and_keys_but_not_to_values():
    config = replace(PAPER, width=16, decoder_hidden=8)
    ours = awake(DecoderLayer(config))
    itself, cross = (nn.MultiheadAttention(16, 4, batch_first=True).eval() for _ in range(2))
    itself.load_state_dict(as_torch(ours.itself))
    cross.load_state_dict(as_torch(ours.cross))
    x, memory = torch.randn(2, 9, 16), torch.randn(2, 5, 16)
    code, places = torch.randn(2, 9, 16), torch.randn(2, 5, 16)
    y = ours.norm0(x)
    step = x + itself(y + code, y + code, y)[0]
    step = step + cross(ours.norm1(step) + code, memory + places, memory)[0]
    expected = step + ours.feed(ours.norm2(step))
    torch.testing.assert_close(ours(x, memory, code, places), expected)


def test_every_layer_of_the_transformer_has_its_say(patch):
    for name in ("encoder", "decoder", "refine"):
        network = paper()
        noise = torch.randn(2, 40, 2, generator=torch.Generator().manual_seed(2))
        encoded = encode(network, patch)
        samples = network.sample(network.mixture(encoded), noise)
        whole = network.decode(encode(network, patch), samples).fine
        part = getattr(network, name)
        for layer in list(part):
            setattr(network, name, nn.ModuleList(other for other in part if other is not layer))
            assert (network.decode(encode(network, patch), samples).fine - whole).abs().max() > 1e-3


# --- 3.4 -----------------------------------------------------------------------------------------


def test_the_refinement_sees_the_backbone_at_the_nearest_input_point_and_coarse_places(patch):
    network = paper()
    block, given = network.refine[0], {}
    block.register_forward_pre_hook(
        lambda _, args: given.update(zip(("features", "offsets", "near"), args, strict=True))
    )
    encoded = encode(network, patch)
    samples = network.sample(network.mixture(encoded), torch.randn(2, 80, 2))
    out = network.decode(encoded, samples)
    for b in range(2):
        coarse, points = out.coarse[b], patch[b]
        radius = (points - points.mean(dim=0)).norm(dim=1).max()
        next_to = torch.cdist(coarse, points).argmin(dim=1)
        torch.testing.assert_close(given["features"][b], encoded.features[b][next_to])
        assert not given["features"].requires_grad  # as in the released code
        near = given["near"][b]
        assert near.shape == (80, 16)  # 4r
        expected = (coarse[near] - coarse[:, None]) / radius
        torch.testing.assert_close(given["offsets"][b], expected, atol=1e-5, rtol=1e-4)
    x = block.enter(given["features"][0])
    layer = slow_equation_1(block.layer, x, given["offsets"][0], given["near"][0])
    move = block.residual(torch.relu(given["features"][0] + block.leave(layer)))
    radius = (patch[0] - patch[0].mean(dim=0)).norm(dim=1).max()
    expected = out.coarse[0] + radius * move
    torch.testing.assert_close(out.fine[0], expected, atol=1e-4, rtol=1e-3)
