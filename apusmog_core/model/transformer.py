# SPDX-License-Identifier: Apache-2.0
"""Transformer encoder and decoder (section 3.3), over a whole patch or over neighbourhoods."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from .attention import clear, gather, mlp


class FourierCode(nn.Module):
    """sin and cos of the sample at octaves of pi; inputs live on the fixed range [-1, 1]."""

    def __init__(self, inputs: int, frequencies: int, width: int):
        super().__init__()
        octaves = math.pi * 2.0 ** torch.arange(frequencies)
        self.register_buffer("octaves", octaves, persistent=False)
        self.project = nn.Linear(inputs * (2 * frequencies + 1), width)

    def forward(self, x: Tensor) -> Tensor:
        phase = (x[..., None] * self.octaves).flatten(-2)
        return self.project(torch.cat((x, phase.sin(), phase.cos()), dim=-1))


class RandomFourierCode(nn.Module):
    """sin and cos of the place along random directions, then an MLP: the released code's.

    Places are scaled to the box of the patch, samples and points alike.
    """

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.register_buffer("directions", torch.randn(inputs, width // 2))
        self.project = nn.Sequential(mlp(width, width, width), nn.ReLU())

    def raw(self, x: Tensor, box: tuple[Tensor, Tensor]) -> Tensor:
        """x (B, M, 3) in a box from low to high (B, 1, 3) -> (B, M, D), without the MLP."""
        low, high = box
        share = (x - low) / (high - low).clamp_min(1e-3)  # flat patches have no height
        phase = 2 * math.pi * share @ self.directions
        return torch.cat((phase.sin(), phase.cos()), dim=-1)

    def forward(self, x: Tensor, box: tuple[Tensor, Tensor]) -> Tensor:
        return self.project(self.raw(x, box))


class Attention(nn.Module):
    """Multi-head attention of queries (B, M, D) over a memory (B, N, D): the paper's."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, memory: Tensor, places: Tensor | float = 0.0) -> Tensor:
        """`places` (B, N, D) are codes of where the memory lies: keys know them, values do not."""
        projected = (self.query(x), self.key(memory + places), self.value(memory))
        split = [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in projected]
        return self.out(F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(-2))


def scaled(layer: nn.Linear, x: Tensor, scale: float) -> Tensor:
    """scale * layer(x), in one operation."""
    flat = torch.addmm(layer.bias, x.flatten(0, -2), layer.weight.T, beta=scale, alpha=scale)
    return flat.view(*x.shape[:-1], -1)


class LocalAttention(nn.Module):
    """Attention of the queries (B, K, s, D) of each anchor over the tokens of its neighbours.

    A token is key and value in one, so that all layers and the pointing head share them.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.query = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)
        self.scale = config.width**-0.5

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """x (B, K, s, D), tokens (B, K, k, D) -> (B, K, s, D)."""
        weights = (scaled(self.query, x, self.scale) @ tokens.mT).softmax(-1)
        return self.out(weights @ tokens)


class Tokens(nn.Module):
    """What a neighbour tells: its features and where it lies."""

    def __init__(self, width: int):
        super().__init__()
        self.feature = nn.Linear(width, width)
        self.position = mlp(3, width, width)

    def project(self, memory: Tensor) -> Tensor:
        """What all points tell (B, N, D), once for all chunks of queries."""
        return self.feature(memory)

    def forward(self, projected: Tensor, offsets: Tensor, neighbours: Tensor) -> Tensor:
        """projected (B, N, D), offsets (B, K, k, 3), neighbours (B, K, k) -> (B, K, k, D)."""
        return gather(projected, neighbours) + self.position(offsets)


class EncoderLayer(nn.Module):
    """Pre-norm self-attention and MLP, over the patch or over each point's neighbours."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.local = config.attention == "local"
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = LocalAttention(config) if self.local else Attention(config)
        self.tokens = Tokens(config.width) if self.local else None
        self.feed = mlp(config.width, config.encoder_hidden, config.width)

    def change_nothing(self) -> None:
        """What both parts of the layer add is zero, until training."""
        clear(self.attention.out, self.feed[-1])

    def project(self, memory: Tensor) -> Tensor:
        """What the points of a memory (B, N, D) show, once for all chunks of queries."""
        around = self.norm1(memory)
        return self.tokens.project(around) if self.local else around

    def forward(self, x: Tensor, around: Tensor, offsets: Tensor, neighbours: Tensor) -> Tensor:
        """Rows x (B, K, D) look around in a projected memory -> (B, K, D)."""
        y = self.norm1(x)
        if self.local:
            tokens = self.tokens(around, offsets, neighbours)
            x = x + self.attention(y[:, :, None], tokens)[:, :, 0]
        else:
            x = x + self.attention(y, around)
        return x + self.feed(self.norm2(x))


class DecoderLayer(nn.Module):
    """Pre-norm (optional) query self-attention, cross-attention and MLP."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.local = config.attention == "local"
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.cross = LocalAttention(config) if self.local else Attention(config)
        self.feed = mlp(config.width, config.decoder_hidden, config.width)
        self.norm0 = nn.LayerNorm(config.width) if config.query_self_attention else None
        self.itself = Attention(config) if config.query_self_attention else None

    def change_nothing(self) -> None:
        itself = [] if self.itself is None else [self.itself.out]
        clear(self.cross.out, self.feed[-1], *itself)

    def forward(
        self, x: Tensor, memory: Tensor, code: Tensor | float = 0.0, places: Tensor | float = 0.0
    ) -> Tensor:
        """x (B, M, D) over the patch (B, N, D), or x (B, K, s, D) over the tokens (B, K, k, D).

        `code` (B, M, D) is added to the queries and `places` (B, N, D) to the keys of each layer,
        as in 3DETR.
        """
        if self.itself is not None:
            y = self.norm0(x)
            flat = y.flatten(1, -2)  # queries of all anchors, where they are sorted by them
            x = x + self.itself(flat + code, flat, code).view_as(x)
        y = self.norm1(x)
        x = x + (self.cross(y, memory) if self.local else self.cross(y + code, memory, places))
        return x + self.feed(self.norm2(x))


class PointingHead(nn.Module):
    """Attention weights over the anchor's neighbours, plus an offset bounded by the spacing.

    Zero-initialised: before training the output is an interpolation of the neighbours given by
    `prior`, which knows only where the query lies among them.
    """

    def __init__(self, width: int, outputs: int):
        super().__init__()
        self.query = nn.Linear(width, width)
        self.offset = nn.Linear(width, outputs)
        self.scale = width**-0.5
        clear(self.query, self.offset)

    def forward(self, x: Tensor, tokens: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, K, s, D), tokens (B, K, k, D), prior (B, K, s, k) -> weights, raw offset."""
        weights = (scaled(self.query, x, self.scale) @ tokens.mT + prior).softmax(-1)
        return weights, self.offset(x)
