# SPDX-License-Identifier: Apache-2.0
"""Residual refinement (section 3.4): a point transformer block moves the coarse points."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .attention import PointTransformerLayer, gather, mlp


class Refinement(nn.Module):
    """Point transformer block on the coarse coordinates, then a bounded residual."""

    def __init__(self, features: int, width: int):
        super().__init__()
        self.enter, self.leave = nn.Linear(features, width), nn.Linear(width, features)
        self.layer = PointTransformerLayer(width, width)
        self.residual = mlp(features, width, 3)
        nn.init.zeros_(self.residual[2].weight)
        nn.init.zeros_(self.residual[2].bias)

    def forward(
        self, coarse: Tensor, features: Tensor, spacing: Tensor, neighbours: Tensor, rows: slice
    ) -> Tensor:
        """coarse (B, M, 3), anchor features (B, M, D), spacing (B, M, 1) -> refined rows."""
        near, reach = neighbours[:, rows], spacing[:, rows]
        offsets = (gather(coarse, near) - coarse[:, rows, None]) / reach[:, :, None]
        x = self.enter(features)
        block = self.leave(self.layer(x[:, rows], x, offsets, near))
        moved = self.residual(features[:, rows] + torch.relu(block))
        return coarse[:, rows] + reach * torch.tanh(moved)
