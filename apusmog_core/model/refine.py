# SPDX-License-Identifier: Apache-2.0
"""Residual refinement (section 3.4): a point transformer block moves the coarse points."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from .attention import PointTransformerLayer, clear, gather, mlp, normed


class BackboneRefinement(nn.Module):
    """The paper's: a point transformer block on the backbone's features, then a free residual."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        width, norm = config.width, config.mlp_norm
        self.enter = nn.Sequential(nn.Linear(width, width), *normed(width, norm), nn.ReLU())
        self.layer = PointTransformerLayer(
            width, width, config.eta_hidden, config.gamma_hidden, norm
        )
        self.leave = nn.Sequential(
            *normed(width, norm), nn.ReLU(), nn.Linear(width, width), *normed(width, norm)
        )
        self.residual = mlp(width, width // 2, 3, norm=norm)

    def forward(self, features: Tensor, offsets: Tensor, near: Tensor) -> Tensor:
        """Moves (B, M, 3) of coarse points.

        features (B, M, D) of the input point next to each, offsets to and indices of the coarse
        points around it (B, M, k, 3) and (B, M, k).
        """
        x = self.enter(features)
        block = self.leave(self.layer(x, self.layer.project(x), offsets, near))
        return self.residual(torch.relu(features + block))


class Refinement(nn.Module):
    """Ours: smaller, on the features of the anchors, and with a bounded residual."""

    def __init__(self, features: int, width: int):
        super().__init__()
        self.enter, self.leave = nn.Linear(features, width), nn.Linear(width, features)
        self.layer = PointTransformerLayer(width, width)
        self.residual = mlp(features, width, 3)
        clear(self.residual[-1])

    def project(self, features: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Queries, and keys and values, of the anchors' features (B, N, D)."""
        x = self.enter(features)
        return x, self.layer.project(x)

    def forward(
        self, features: Tensor, projected, own: Tensor, offsets: Tensor, anchors: Tensor
    ) -> Tensor:
        """Moves (B, M, 3), in spacings and below one, of M points of the anchors `own` (B, M).

        features (B, N, D), offsets to their neighbours (B, M, k, 3), whose anchors are (B, M, k).
        """
        x, memory = projected
        block = self.leave(self.layer(gather(x, own), memory, offsets, anchors))
        return torch.tanh(self.residual(gather(features, own) + torch.relu(block)))
