# SPDX-License-Identifier: Apache-2.0
"""Preset `paper`, held to the equations: slow loops, the sizes of section 4.1, both passes."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from apusmog_core import Upsampler
from apusmog_core.config import PRESETS, TrainConfig
from apusmog_core.geometry import nearest_in_batch
from apusmog_core.model.attention import PointTransformerLayer
from apusmog_core.model.losses import drawn_share, projection_loss, surface_loss
from apusmog_core.model.network import ApuSmog, parameter_count
from apusmog_core.model.smog import Mixture, MixtureHead
from apusmog_core.model.transformer import DecoderLayer, EncoderLayer
from apusmog_core.settings import load_yaml

PAPER = PRESETS["paper"]
FEW = dict(width=16, neighbours=5, encoder_hidden=8, decoder_hidden=8, xi_hidden=8, gamma_hidden=4)


def awake(module: nn.Module, seed: int = 0) -> nn.Module:
    """With weights and statistics that are nothing special, so that nothing hides behind them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator)
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer += 0.2 * torch.randn(buffer.shape, generator=generator)
            elif name.endswith("running_var"):
                buffer *= 0.1 + 0.2 * torch.rand(buffer.shape, generator=generator)
    return module.eval()


def paper(**changes) -> ApuSmog:
    torch.manual_seed(0)
    return awake(ApuSmog(replace(PAPER, **{**FEW, **changes})))


@pytest.fixture
def patch():
    return torch.randn(2, 20, 3, generator=torch.Generator().manual_seed(1))


def encode(network: ApuSmog, points: torch.Tensor):
    return network.encode(points, nearest_in_batch(points, network.config.neighbours))


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


# --- 3.5 -----------------------------------------------------------------------------------------


def training_batch(network: ApuSmog, points: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    count = 4 * points.shape[1]
    return {
        "points": points,
        "neighbours": nearest_in_batch(points, network.config.neighbours),
        "target": torch.randn(len(points), count, 3, generator=generator),
        "noise": torch.randn(len(points), count, 2, generator=generator),
    }


def slow_projection(x: torch.Tensor, z: torch.Tensor) -> float:
    """L_Pi of two clouds, both directions, alpha = 1000 and four neighbours."""
    total = 0.0
    for a, b in ((x, z), (z, x)):
        for point in a.double():
            squared = (b.double() - point).square().sum(dim=1)
            value, index = squared.sort()
            weights = (-1e3 * (value[:4] - value[0])).exp()
            mean = (weights[:, None] * b[index[:4]].double()).sum(dim=0) / weights.sum()
            total += (point - mean).square().sum().item() / len(a)
    return total


def slow_acd(x: torch.Tensor, z: torch.Tensor) -> float:
    squared = torch.cdist(x.double(), z.double()).square()
    return max(squared.amin(dim=1).mean().item(), squared.amin(dim=0).mean().item())


def test_the_total_loss_of_the_paper_is_its_equation_10(patch):
    network = paper()
    batch = training_batch(network, patch)
    config = load_yaml(TrainConfig, "config/train/paper.yaml")
    total, parts = surface_loss(network, batch, config)
    encoded = encode(network, patch)
    mixture = network.mixture(encoded)
    up = network.decode(encoded, mixture.sample(batch["noise"].view(2, 20, 4, 2)).flatten(1, 2))
    again = network.decode(encoded, mixture.mean)
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
    encoded = encode(network, patch)
    mixture = network.mixture(encoded)
    up = network.decode(encoded, mixture.sample(batch["noise"].view(2, 20, 4, 2)).flatten(1, 2))
    means = network.decode(encoded, mixture.mean).coarse
    again = sum(slow_acd(means[b], patch[b]) for b in range(2)) / 2
    assert parts["reconstruction"].item() == pytest.approx(0.02 * again, rel=1e-4)
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
                value, index = (z[b].double() - point).square().sum(dim=1).sort()
                weights = (-1e3 * (value[:4] - value[0])).exp()
                mean = (weights[:, None] * z[b][index[:4]].double()).sum(dim=0) / weights.sum()
                off.append((point - mean).square().sum().item())
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
