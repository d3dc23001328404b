# SPDX-License-Identifier: Apache-2.0
"""APU-SMOG on the sensor's sphere: a sample of the mixture is a viewing ray, its answer a depth.

All lengths are in the sensor's own steps: columns along a ring, rings, and for the depth ln(range)
in ring steps, so that a surface looks the same at any range and from any sensor.
Which rays are asked, which answers are kept, and their confidence: `lattice.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..model.attention import PointTransformerLayer, gather, mlp
from ..model.smog import MixtureHead, factor_entries
from ..model.transformer import DecoderLayer, FourierCode, PointingHead, Tokens
from .view import CONTEXT

LARGEST_SHIFT = 2.0  # ring steps by which the depth may leave what the neighbours span
RAY_REACH = 2.0  # steps that the code of a ray maps to [-1, 1]
LOG_SCALE = (-5.0, 4.0)  # range of ln(median depth error), in ring steps


@dataclass
class EncodedRays:
    """What the decoder needs to know of the measured points, N of all objects together."""

    neighbours: Tensor  # (N, k), each point's own index first
    offsets: Tensor  # (N, k, 4): columns, rings, depth as the position codes see it, and as it is
    features: Tensor  # (N, D)
    tokens: Tensor  # (N, D), what each point tells the rays around it
    components: Tensor  # (N, 6), see `components`


@dataclass
class RayAnswers:
    """For each ray (A, s)."""

    depth: Tensor  # ring steps from the anchor
    log_scale: Tensor  # ln of the median error of the depth, in ring steps
    log_intensity: Tensor  # ln of the mixture's intensity: how many returns of the object to expect


class RayNetwork(nn.Module):
    """Features by vector attention (eq. 1), mixture (eq. 2, 3), decoder; depth by pointing."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        width = config.width
        self.embed = mlp(CONTEXT, config.encoder_hidden, width)
        self.whole = nn.Linear(width, width)
        self.extract = PointTransformerLayer(width, width)
        self.mixture_head = MixtureHead(config)
        self.query = FourierCode(2, config.frequencies, width)
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.norm = nn.LayerNorm(width)
        self.tokens = Tokens(width)
        self.head = PointingHead(width, 2)
        self.sharpness = nn.Parameter(torch.tensor([0.5, 2.0]))  # columns, rings

    def encode(
        self,
        offsets: Tensor,
        neighbours: Tensor,
        context: Tensor,
        cloud: Tensor,
        objects: int | None = None,
    ) -> EncodedRays:
        """offsets (N, k, 3) to neighbours (N, k), context (N, C), object of each point (N,).

        Offsets may be (N, k, 4), as `see` gives them. Where the number of objects is given, a GPU
        need not be waited for.
        """
        x = self.embed(context)
        x = x + self.whole(pool_objects(x, cloud, objects))[cloud]
        seen = offsets if offsets.shape[-1] == 4 else see(offsets)
        around = (seen[None, ..., :3], neighbours[None])
        features = self.extract(x[None], self.extract.project(x[None]), *around)
        return EncodedRays(
            neighbours,
            seen,
            features[0],
            self.tokens.project(features)[0],
            self.components(features)[0],
        )

    def components(self, features: Tensor) -> Tensor:
        """(B, N, 6): mean in steps, the factor's first, low and second entry, ln of the weight.

        Weights are not normalised: their sum is how many returns the object should have.
        """
        head = self.mixture_head
        mean, spread, weight = head.raw(features)
        entries = factor_entries(spread, self.config.covariance, head.spread)
        return torch.cat((mean, *(t[..., None] for t in (*entries, weight))), dim=-1)

    def decode(self, encoded: EncodedRays, rays: Tensor, anchors: Tensor) -> RayAnswers:
        """rays (A, s, 2) in steps from their anchors (A,)."""
        offsets, near = encoded.offsets[anchors], encoded.neighbours[anchors]
        tokens = self.tokens(encoded.tokens[None], offsets[None, ..., :3], near[None])
        x = self.query(rays / RAY_REACH)[None] + encoded.features[anchors][None, :, None]
        for layer in self.decoder:
            x = layer(x, tokens)
        x = self.norm(x)
        # -sharpness |offset - ray|^2, but for what all neighbours share (the softmax drops it)
        where = offsets[..., :2]  # (A, k, 2)
        sharp = where * self.sharpness.abs()
        own = (where * sharp).sum(-1)[:, None]
        nearness = torch.baddbmm(own, rays, sharp.mT, beta=-1, alpha=2)  # (A, s, k)
        weights, raw = self.head(x, tokens, nearness[None])
        depth = (weights[0] @ offsets[..., 3:])[..., 0]
        depth = torch.add(depth, torch.tanh(raw[0, ..., 0]), alpha=LARGEST_SHIFT)
        log_scale = raw[0, ..., 1].clamp(*LOG_SCALE)
        return RayAnswers(depth, log_scale, self.log_intensity(encoded, rays, offsets, near))

    def log_intensity(
        self, encoded: EncodedRays, rays: Tensor, offsets: Tensor, near: Tensor
    ) -> Tensor:
        """ln of the sum of w_j N_j (eq. 2) over the neighbours (A, k), at rays (A, s, 2)."""
        component = gather(encoded.components[None], near[None])[0]  # (A, k, 6)
        centre = offsets[..., :2] + component[..., :2]
        across, up = (rays[:, :, None] - centre[:, None]).unbind(-1)  # (A, s, k)
        first, low, second, weight = component[..., 2:].unbind(-1)
        peak = weight - torch.log(first * second) - math.log(2 * math.pi)
        # missing neighbours repeat the point itself
        peak[:, 1:].masked_fill_(near[:, 1:] == near[:, :1], -math.inf)
        u = across / first[:, None]
        v = torch.addcmul(up, low[:, None], u, value=-1) / second[:, None]
        density = peak[:, None].addcmul(u, u, value=-0.5).addcmul(v, v, value=-0.5)
        return torch.logsumexp(density, dim=-1)


def see(offsets: Tensor) -> Tensor:
    """Offsets (N, k, 3) with the depth as the position codes see it, too: edges are many steps."""
    depth = offsets[..., 2:]
    return torch.cat((offsets[..., :2], torch.asinh(depth), depth), dim=-1)


def pool_objects(x: Tensor, cloud: Tensor, objects: int | None = None) -> Tensor:
    """Greatest of each channel over the points of each object, or zero: x (N, D), cloud (N,) ->
    (objects, D)."""
    if objects is None:
        objects = int(cloud[-1]) + 1 if len(cloud) else 0
    index = cloud[:, None].expand_as(x)
    return x.new_zeros(objects, x.shape[1]).scatter_reduce(0, index, x, "amax")


def hit_probability(log_intensity: Tensor) -> Tensor:
    """Chance that a ray meets the object: at least one return of a Poisson process."""
    return -torch.expm1(-log_intensity.clamp(max=math.log(30.0)).exp())
