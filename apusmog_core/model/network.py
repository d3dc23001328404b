# SPDX-License-Identifier: Apache-2.0
"""APU-SMOG: features, mixture, Transformer and refinement, put together (figure 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..geometry import nearest_in_batch
from .attention import PointTransformerLayer, gather, mlp
from .refine import Refinement
from .smog import Mixture, MixtureHead, uniform_on_sphere
from .transformer import DecoderLayer, EncoderLayer, FourierCode, PointingHead, Tokens


@dataclass
class Encoded:
    """What the decoder needs to know of the input points."""

    points: Tensor  # (B, N, 3)
    spacing: Tensor  # (B, N, 1), typical distance to the next point
    neighbours: Tensor  # (B, N, k), each point's own index first
    features: Tensor | None = None  # (B, N, D), from the point transformer layer
    memory: Tensor | None = None  # (B, N, D), from the Transformer encoder
    tokens: Tensor | None = None  # (B, N, D), what each point tells the queries around it


@dataclass
class Decoded:
    """One output point for each sample of each component."""

    coarse: Tensor  # (B, K * s, 3)
    fine: Tensor  # (B, K * s, 3), equal to coarse without refinement


class ApuSmog(nn.Module):
    """Points in, any number of points out; all lengths are relative to the local spacing."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        width = config.width
        self.extract = PointTransformerLayer(3 if config.attention == "global" else 1, width)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.mixture_head = MixtureHead(config)
        self.query = FourierCode(3, config.frequencies, width)
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.norm = nn.LayerNorm(width)
        needs_tokens = config.attention == "local" or config.output == "pointing"
        self.tokens = Tokens(width) if needs_tokens else None
        if config.output == "pointing":
            self.head = PointingHead(width, 3)
            # how far a sample leads, in spacings, and how few neighbours it then listens to
            self.prior_reach = nn.Parameter(torch.tensor(0.7))
            self.prior_sharpness = nn.Parameter(torch.tensor(6.0))
        else:
            self.head = mlp(width, width, 3)
        self.refine = nn.ModuleList(
            Refinement(width, config.refine_width or width) for _ in range(config.refinements)
        )

    # --- encoder side, once for each input point ---

    def encode(self, points: Tensor, neighbours: Tensor, chunk: int = 0) -> Encoded:
        """points (B, N, 3), neighbours (B, N, k) itself first."""
        rows = slices(points.shape[1], chunk)
        spacing = self._spacing(points, neighbours)
        encoded = Encoded(points, spacing, neighbours)
        x = self._inputs(points, spacing, neighbours)
        around = self.extract.project(x) if self.config.attention == "global" else None
        parts = []
        for r in rows:
            offsets = self._offsets(encoded, r)
            parts.append(self.extract(x[:, r], around, offsets, neighbours[:, r]))
        encoded.features = memory = cat(parts)
        for layer in self.encoder:
            around, parts = layer.project(memory), []
            for r in rows:
                offsets = self._offsets(encoded, r)
                parts.append(layer(memory[:, r], around, offsets, neighbours[:, r]))
            memory = cat(parts)
        encoded.memory = memory
        encoded.tokens = None if self.tokens is None else self.tokens.project(memory)
        return encoded

    def _spacing(self, points: Tensor, neighbours: Tensor) -> Tensor:
        """Mean distance to the nearest few neighbours (B, N, 1), never zero."""
        few = neighbours[..., 1:7] if neighbours.shape[-1] > 1 else neighbours
        near = (gather(points, few) - points[:, :, None]).norm(dim=-1)
        mean = near.mean(dim=-1, keepdim=True)
        typical = mean.mean(dim=1, keepdim=True)  # duplicate points have no spacing of their own
        return mean.maximum(0.1 * typical).clamp_min(1e-9)

    def _inputs(self, points, spacing, neighbours) -> Tensor:
        if self.config.attention == "global":  # patch coordinates, as in the paper
            return self._normalised(points)[0]
        return torch.log(gather(spacing, neighbours[..., 1:7]).mean(dim=2) / spacing)

    def _normalised(self, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        centre = points.mean(dim=1, keepdim=True)
        radius = (points - centre).norm(dim=-1).amax(dim=1)[:, None, None].clamp_min(1e-9)
        return (points - centre) / radius, centre, radius

    def _offsets(self, encoded: Encoded, rows) -> Tensor:
        """p_j - p_i in spacings (B, K, k, 3)."""
        points, spacing = encoded.points, encoded.spacing
        away = gather(points, encoded.neighbours[:, rows]) - points[:, rows, None]
        return away / spacing[:, rows, None]

    # --- the mixture ---

    def anchors(self) -> slice:
        """The points that carry a component: all, or an even share of them."""
        return slice(None, None, max(1, round(1 / self.config.component_share)))

    def mixture(self, encoded: Encoded) -> Mixture:
        rows = self.anchors()
        return self.mixture_head(encoded.features[:, rows])

    def sample(self, mixture: Mixture, noise: Tensor) -> Tensor:
        """Noise (B, K, s, 2) -> samples on the sphere (B, K, s, 3)."""
        return uniform_on_sphere(noise) if self.config.uniform_sphere else mixture.sample(noise)

    # --- decoder side, once for each sample ---

    def decode(self, encoded: Encoded, samples: Tensor, chunk: int = 0) -> Decoded:
        """samples (B, K, s, 3) of all K components -> K * s points, refined."""
        every = torch.arange(encoded.points.shape[1], device=samples.device)
        anchors = every[self.anchors()]
        rows = slices(anchors.shape[0], chunk)
        coarse = fine = cat([self._decode(encoded, samples[:, r], anchors[r]) for r in rows])
        repeat = anchors[:, None].expand(samples.shape[1:3]).flatten()
        k = self.config.refine_neighbours or 4 * samples.shape[2]
        for block in self.refine:
            fine = self._refine(block, encoded, fine, repeat, nearest_in_batch(fine, k), chunk)
        return Decoded(coarse, fine)

    def _refine(self, block, encoded: Encoded, coarse, anchor_of, near, chunk: int) -> Tensor:
        """One pass over coarse points (B, M, 3), whose features are those of their anchors (M,)."""
        projected = block.project(encoded.memory)
        parts = []
        for r in slices(anchor_of.shape[0], chunk):
            own = anchor_of[r]
            spacing = encoded.spacing[:, own]
            offsets = (gather(coarse, near[:, r]) - coarse[:, r, None]) / spacing[:, :, None]
            move = block(encoded.memory[:, own], projected, own, offsets, anchor_of[near[:, r]])
            parts.append(coarse[:, r] + spacing * move)
        return cat(parts)

    def _decode(self, encoded: Encoded, samples: Tensor, anchors: Tensor) -> Tensor:
        """samples (B, K, s, 3) of the given anchors (K,) -> (B, K * s, 3), not refined."""
        near = encoded.neighbours[:, anchors]
        tokens = None
        if self.tokens is not None:
            offsets = self._offsets(encoded, anchors)
            tokens = self.tokens(encoded.tokens, offsets, near)
        x = self.query(samples)
        if self.config.output != "absolute":  # the query knows its anchor
            x = x + encoded.memory[:, anchors][:, :, None]
        for layer in self.decoder:
            x = layer(x, tokens if self.config.attention == "local" else encoded.memory)
        x = self.norm(x)
        if self.config.output == "absolute":
            _, centre, radius = self._normalised(encoded.points)
            return (centre[:, None] + self.head(x) * radius[:, None]).flatten(1, 2)
        anchored = self.config.output == "anchored"
        step = self.head(x) if anchored else self._point(x, samples, tokens, offsets)
        at, spacing = encoded.points[:, anchors], encoded.spacing[:, anchors]
        return (at[:, :, None] + step * spacing[:, :, None]).flatten(1, 2)

    def _point(self, x: Tensor, samples: Tensor, tokens: Tensor, offsets: Tensor) -> Tensor:
        """Steps (B, K, s, 3) in spacings: weights over the neighbours' coordinates, and a shift."""
        target = self.prior_reach * samples
        # -sharpness |offset - target|^2, but for what all neighbours share (the softmax drops it)
        nearness = 2 * target @ offsets.mT - offsets.square().sum(-1)[:, :, None]  # (B, K, s, k)
        weights, raw = self.head(x, tokens, self.prior_sharpness.abs() * nearness)
        return weights @ offsets + torch.tanh(raw)

    def forward(self, points: Tensor, neighbours: Tensor, noise: Tensor) -> tuple[Decoded, Mixture]:
        """points (B, N, 3), noise (B, K, s, 2) -> K * s points a patch, and the mixture."""
        encoded = self.encode(points, neighbours)
        mixture = self.mixture(encoded)
        return self.decode(encoded, self.sample(mixture, noise)), mixture


def slices(count: int, chunk: int) -> list[slice]:
    if not chunk:
        return [slice(None)]  # without a number, so that an exported network takes any count
    return [slice(start, min(start + chunk, count)) for start in range(0, max(count, 1), chunk)]


def cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def parameter_count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())
