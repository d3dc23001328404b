# SPDX-License-Identifier: Apache-2.0
"""Preset `paper` for tests: small, with weights that hide nothing."""

from dataclasses import replace

import torch
from torch import nn

from apusmog_core.config import PRESETS
from apusmog_core.geometry import nearest_in_batch
from apusmog_core.model.network import ApuSmog

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


def encode(network: ApuSmog, points: torch.Tensor):
    return network.encode(points, nearest_in_batch(points, network.config.neighbours))


def two_patches() -> torch.Tensor:
    return torch.randn(2, 20, 3, generator=torch.Generator().manual_seed(1))


def training_batch(network: ApuSmog, points: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    count = 4 * points.shape[1]
    return {
        "points": points,
        "neighbours": nearest_in_batch(points, network.config.neighbours),
        "target": torch.randn(len(points), count, 3, generator=generator),
        "noise": torch.randn(len(points), count, 2, generator=generator),
    }
