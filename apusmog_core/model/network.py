# SPDX-License-Identifier: Apache-2.0
"""APU-SMOG: features, mixture, Transformer and refinement, put together (figure 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..geometry import nearest_between, nearest_in_batch
from .attention import PointTransformerLayer, gather, mlp, normed
from .refine import BackboneRefinement, Refinement
from .smog import Mixture, MixtureHead, component_of, uniform_on_sphere
from .transformer import (
    DecoderLayer,
    EncoderLayer,
    FourierCode,
    PointingHead,
    RandomFourierCode,
    Tokens,
)


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
    """Points in, any number of points out; lengths are relative to the patch or to the spacing."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        width, norm = config.width, config.mlp_norm
        self.patch = config.frame == "patch"
        self.whole = config.attention == "global"
        self.extract = PointTransformerLayer(
            3 if self.patch else 1, width, config.eta_hidden, config.gamma_hidden, norm
        )
        # the released code's end of the backbone, and its way from encoder to decoder
        ends = norm == "batch"
        self.extracted = nn.Sequential(*normed(width, norm), nn.ReLU()) if ends else nn.Identity()
        self.bridge = (
            nn.Sequential(mlp(*4 * [width], norm=norm), *normed(width, norm), nn.ReLU())
            if ends
            else nn.Identity()
        )
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.mixture_head = MixtureHead(config)
        self.random_code = config.query_code == "random"
        self.query = (
            RandomFourierCode(3, width)
            if self.random_code
            else FourierCode(3, config.frequencies, width)
        )
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.norm = nn.LayerNorm(width)
        needs_tokens = config.attention == "local" or config.output == "pointing"
        self.tokens = Tokens(width) if needs_tokens else None
        if config.output == "pointing":
            self.head = PointingHead(width, 3)
            # how far a sample leads, in spacings, and how few neighbours it then listens to
            self.prior_reach = nn.Parameter(torch.tensor(0.7))
            self.prior_sharpness = nn.Parameter(torch.tensor(6.0))
        elif config.output == "absolute":
            self.head = mlp(width, width // 2, width // 4, 3, norm=norm)
        else:
            self.head = mlp(width, width, 3)
        self.refine = nn.ModuleList(
            BackboneRefinement(config)
            if config.refine_from == "backbone"
            else Refinement(width, config.refine_width or width)
            for _ in range(config.refinements)
        )

    # --- encoder side, once for each input point ---

    def encode(self, points: Tensor, neighbours: Tensor, chunk: int = 0) -> Encoded:
        """points (B, N, 3), neighbours (B, N, k) itself first."""
        rows = slices(points.shape[1], chunk)
        spacing = self._spacing(points, neighbours)
        encoded = Encoded(points, spacing, neighbours)
        x = self._inputs(points, spacing, neighbours)
        # keys and values of eq. 1 are the neighbours'; where a point knows nothing but how dense
        # it lies, they add nothing to the position code, and its own cost less
        around = self.extract.project(x) if self.patch else None
        parts = []
        for r in rows:
            offsets = self._offsets(encoded, r)
            parts.append(self.extract(x[:, r], around, offsets, neighbours[:, r]))
        encoded.features = memory = self.extracted(cat(parts))
        for layer in self.encoder:
            around, parts = layer.project(memory), []
            for r in rows:
                offsets = self._offsets(encoded, r)
                parts.append(layer(memory[:, r], around, offsets, neighbours[:, r]))
            memory = cat(parts)
        encoded.memory = memory = self.bridge(memory)
        encoded.tokens = None if self.tokens is None else self.tokens.project(memory)
        return encoded

    def _spacing(self, points: Tensor, neighbours: Tensor) -> Tensor:
        """Unit of lengths (B, N, 1): the patch's radius, or the distance to a few neighbours."""
        if self.patch:
            return self._radius(points).expand(-1, points.shape[1], -1)
        few = neighbours[..., 1:7] if neighbours.shape[-1] > 1 else neighbours
        near = (gather(points, few) - points[:, :, None]).norm(dim=-1)
        mean = near.mean(dim=-1, keepdim=True)
        typical = mean.mean(dim=1, keepdim=True)  # duplicate points have no spacing of their own
        return mean.maximum(0.1 * typical).clamp_min(1e-9)

    def _inputs(self, points, spacing, neighbours) -> Tensor:
        """What eq. (1) is given of each point (B, N, 3 or 1)."""
        if self.patch:
            return (points - points.mean(dim=1, keepdim=True)) / spacing
        return torch.log(gather(spacing, neighbours[..., 1:7]).mean(dim=2) / spacing)

    def _radius(self, points: Tensor) -> Tensor:
        """Largest distance from the mean (B, 1, 1)."""
        away = points - points.mean(dim=1, keepdim=True)
        return away.norm(dim=-1).amax(dim=1)[:, None, None].clamp_min(1e-9)

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

    def allot(self, mixture: Mixture, count: int) -> Tensor | None:
        """How many of `count` samples each component gets (B, K); None if all get the same."""
        even = count % mixture.mean.shape[1] == 0 and not self.config.learned_weights
        return None if even else mixture.allot(count)

    def sample(self, mixture: Mixture, noise: Tensor, counts: Tensor | None = None) -> Tensor:
        """Noise (B, M, 2) -> samples on the sphere (B, M, 3), `counts` (B, K) of each component."""
        if self.config.uniform_sphere:
            return uniform_on_sphere(noise)
        return mixture.draw(noise, counts)

    # --- decoder side, once for each sample ---

    def decode(
        self,
        encoded: Encoded,
        samples: Tensor,
        counts: Tensor | None = None,
        refine: bool = True,
        chunk: int = 0,
        search: Callable[[Tensor, int], Tensor] = nearest_in_batch,
    ) -> Decoded:
        """samples (B, M, 3), in the order of their components -> M points, coarse and refined.

        `search` gives the neighbours (B, M, k) of coarse points.
        """
        every = torch.arange(encoded.points.shape[1], device=samples.device)
        anchors = every[self.anchors()]
        if self.config.output == "absolute":
            coarse = self._decode_patch(encoded, samples)
        else:
            coarse = self._decode_anchored(encoded, samples, counts, anchors, chunk)
        fine = coarse
        if refine and len(self.refine):
            k = self.config.refine_neighbours or 4 * max(1, round(samples.shape[1] / len(every)))
            if self.config.refine_from == "encoder":
                own = self.anchor_of(encoded, samples, counts)
            for block in self.refine:
                near = search(fine, k)
                if self.config.refine_from == "backbone":
                    fine = self._refine_by_backbone(block, encoded, fine, near)
                else:
                    fine = self._refine(block, encoded, fine, own, near, chunk)
        return Decoded(coarse, fine)

    def anchor_of(self, encoded: Encoded, samples: Tensor, counts: Tensor | None) -> Tensor:
        """Input point (B, M) whose component each sample is of."""
        every = torch.arange(encoded.points.shape[1], device=samples.device)
        anchors = every[self.anchors()]
        if counts is not None:
            return anchors[component_of(counts)]
        each = anchors[:, None].expand(-1, samples.shape[1] // len(anchors))
        return each.reshape(1, -1).expand(len(samples), -1)

    def _refine_by_backbone(self, block, encoded: Encoded, coarse: Tensor, near: Tensor) -> Tensor:
        """Section 3.4: features of the nearest input points, positions of the coarse ones.

        No gradient goes into these features, as in the released code.
        """
        own = nearest_between(coarse, encoded.points, 1)[:, :, 0]
        unit = gather(encoded.spacing, own)
        offsets = (gather(coarse, near) - coarse[:, :, None]) / unit[:, :, None]
        return coarse + unit * block(gather(encoded.features.detach(), own), offsets, near)

    def _refine(self, block, encoded: Encoded, coarse, own, near, chunk: int) -> Tensor:
        """One pass over coarse points (B, M, 3), whose features are those of their anchors."""
        projected = block.project(encoded.memory)
        parts = []
        for r in slices(own.shape[1], chunk):
            spacing = gather(encoded.spacing, own[:, r])
            offsets = (gather(coarse, near[:, r]) - coarse[:, r, None]) / spacing[:, :, None]
            anchors = gather(own[..., None], near[:, r])[..., 0]
            move = block(encoded.memory, projected, own[:, r], offsets, anchors)
            parts.append(coarse[:, r] + spacing * move)
        return cat(parts)

    def _decode_patch(self, encoded: Encoded, samples: Tensor) -> Tensor:
        """samples (B, M, 3) of the whole patch -> places (B, M, 3), as in the paper."""
        code = self._code(samples, encoded)
        places = self._places(encoded)
        x = torch.zeros_like(code)  # 3DETR's: a query is nothing but where it lies
        for layer in self.decoder:
            x = layer(x, encoded.memory, code, places)
        centre = encoded.points.mean(dim=1, keepdim=True)
        return centre + self.head(self.norm(x)) * self._radius(encoded.points)

    def _decode_anchored(self, encoded, samples, counts, anchors: Tensor, chunk: int) -> Tensor:
        """samples (B, M, 3) -> (B, M, 3), each near the anchor of its component."""
        if counts is None:
            padded, place = samples.unflatten(1, (len(anchors), -1)), None
        else:
            padded, place = pad(samples, counts)
        rows = slices(len(anchors), chunk)
        coarse = cat([self._decode(encoded, padded[:, r], anchors[r]) for r in rows])
        return coarse if place is None else gather(coarse, place)

    def _decode(self, encoded: Encoded, samples: Tensor, anchors: Tensor) -> Tensor:
        """samples (B, K, s, 3) of the given anchors (K,) -> (B, K * s, 3), not refined."""
        near = encoded.neighbours[:, anchors]
        tokens = None
        if self.tokens is not None:
            offsets = self._offsets(encoded, anchors)
            tokens = self.tokens(encoded.tokens, offsets, near)
        x = encoded.memory[:, anchors][:, :, None]  # the query knows its anchor
        code = self._code(samples.flatten(1, 2), encoded).view(*samples.shape[:3], -1)
        if self.whole:
            x, code = (x + torch.zeros_like(code)).flatten(1, 2), code.flatten(1, 2)
            for layer in self.decoder:
                x = layer(x, encoded.memory, code, self._places(encoded))
            x = x.view(*samples.shape[:3], -1)
        else:
            x = code + x
            for layer in self.decoder:
                x = layer(x, tokens)
        x = self.norm(x)
        anchored = self.config.output == "anchored"
        step = self.head(x) if anchored else self._point(x, samples, tokens, offsets)
        at, spacing = encoded.points[:, anchors], encoded.spacing[:, anchors]
        return (at[:, :, None] + step * spacing[:, :, None]).flatten(1, 2)

    def _code(self, samples: Tensor, encoded: Encoded) -> Tensor:
        return self.query(samples, self._box(encoded)) if self.random_code else self.query(samples)

    def _places(self, encoded: Encoded) -> Tensor | float:
        """Codes (B, N, D) of where the points lie, for the keys of the decoder."""
        if not (self.random_code and self.patch):
            return 0.0
        x = self._inputs(encoded.points, encoded.spacing, encoded.neighbours)
        return self.query.raw(x, self._box(encoded))

    def _box(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        x = (encoded.points - encoded.points.mean(dim=1, keepdim=True)) / self._radius(
            encoded.points
        )
        return x.amin(dim=1, keepdim=True), x.amax(dim=1, keepdim=True)

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
        return self.decode(encoded, self.sample(mixture, noise.flatten(1, 2))), mixture


def pad(samples: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """samples (B, M, 3) of counts (B, K) -> (B, K, s, 3), and where each is in (K * s) (B, M)."""
    own = component_of(counts)
    most = int(counts.max())
    first = gather((counts.cumsum(dim=1) - counts)[..., None], own)[..., 0]
    place = own * most + torch.arange(own.shape[1], device=own.device) - first
    padded = samples.new_zeros(len(samples), counts.shape[1] * most, 3)
    padded = padded.scatter(1, place[..., None].expand(-1, -1, 3), samples)
    return padded.unflatten(1, (-1, most)), place


def slices(count: int, chunk: int) -> list[slice]:
    if not chunk:
        return [slice(None)]  # without a number, so that an exported network takes any count
    return [slice(start, min(start + chunk, count)) for start in range(0, max(count, 1), chunk)]


def cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def parameter_count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())
