# SPDX-License-Identifier: Apache-2.0
"""Residual refinement (section 3.4): a point transformer block moves the coarse points."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .attention import PointTransformerLayer, clear, mlp


class Refinement(nn.Module):
    """Point transformer block on the coarse coordinates, then a bounded residual."""

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
        """Moves (B, K, 3), in spacings and below one, of K points of the anchors `own` (K,).

        features (B, K, D), offsets to their neighbours (B, K, k, 3), whose anchors are (B, K, k).
        """
        x, memory = projected
        block = self.leave(self.layer(x[:, own], memory, offsets, anchors))
        return torch.tanh(self.residual(features + torch.relu(block)))
