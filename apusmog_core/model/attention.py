# SPDX-License-Identifier: Apache-2.0
"""Local vector attention: the point transformer layer of eq. (1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def gather(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (B, N, C) at index (B, ...) -> (B, ..., C)."""
    batch, count, width = x.shape
    if batch > 1:
        start = torch.arange(batch, device=x.device) * count
        index = index + start.view(-1, *[1] * (index.dim() - 1))
    return x.reshape(-1, width).index_select(0, index.reshape(-1)).view(*index.shape, width)


class BatchNorm(nn.BatchNorm1d):
    """Batch norm of the last axis, whatever comes before it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view_as(x)


def normed(width: int, norm: str) -> list[nn.Module]:
    return [BatchNorm(width)] if norm == "batch" else []


def mlp(*sizes: int, norm: str = "none") -> nn.Sequential:
    """Linear layers of these sizes, with a ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip(sizes[:-2], sizes[1:-1], strict=True):
        layers += [nn.Linear(inputs, outputs), *normed(outputs, norm), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(*sizes[-2:]))


def clear(*layers: nn.Linear) -> None:
    """Layers that say nothing, until training."""
    for layer in layers:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)


class PointTransformerLayer(nn.Module):
    """Eq. (1): f_i = sum_j softmax(gamma(beta(x_i) - psi(x_j) + delta)) * (alpha(x_j) + delta)."""

    def __init__(self, inputs: int, width: int, eta: int = 0, gamma: int = 0, norm: str = "none"):
        """`eta` and `gamma` are the hidden sizes of the MLPs of these names, if not `width`."""
        super().__init__()
        self.alpha = nn.Linear(inputs, width)  # values
        self.beta = nn.Linear(inputs, width)  # queries
        self.psi = nn.Linear(inputs, width)  # keys
        self.gamma = mlp(width, gamma or width, width, norm=norm)
        self.eta = mlp(3, eta or width, width, norm=norm)

    def project(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, N, D) of a memory (B, N, C), once for all chunks of queries."""
        return self.psi(memory), self.alpha(memory)

    def forward(
        self,
        x: Tensor,
        memory: tuple[Tensor, Tensor] | None,
        offsets: Tensor,
        neighbours: Tensor,
    ) -> Tensor:
        """x (B, K, C) attends to a projected memory at neighbours (B, K, k) -> (B, K, D).

        offsets (B, K, k, 3) are the positions p_j - p_i that the position code sees, the paper's
        with the sign reversed. Without a memory the neighbours are known by position alone.
        """
        delta = self.eta(offsets)  # (B, K, k, D)
        if memory is None:
            key, value = (t[:, :, None] for t in self.project(x))
        else:
            key, value = (gather(t, neighbours) for t in memory)
        weights = self.gamma(delta + (self.beta(x)[:, :, None] - key)).softmax(dim=2)
        return (weights * (delta + value)).sum(dim=2)
