# SPDX-License-Identifier: Apache-2.0
"""What the sensor's network learns: which rays meet the object, how far, and how sure it is."""

from __future__ import annotations

import torch
from torch import Tensor

from .network import LOG_SCALE, RayNetwork

LARGEST_INTENSITY = 3.4  # ln; more returns of one ray are as good as certain


def ray_loss(network: RayNetwork, batch: dict[str, Tensor], config=None):
    """Likelihood of rays around the points of LiDAR objects: the sum, and its parts."""
    encoded = network.encode(
        batch["offsets"], batch["neighbours"], batch["context"], batch["cloud"]
    )
    probes, hit = batch["probes"], batch["hit"]
    anchors = torch.arange(len(probes), device=probes.device)
    answers = network.decode(encoded, probes[..., :2], anchors)
    parts = {
        "hit": outline_loss(answers.log_intensity, hit),
        "depth": depth_loss(answers.depth - probes[..., 2], answers.log_scale, hit),
    }
    return sum(parts.values()), parts


def outline_loss(log_intensity: Tensor, hit: Tensor) -> Tensor:
    """-ln of the chance that rays do what they did: a Poisson process returns none, or some."""
    intensity = log_intensity.clamp(max=LARGEST_INTENSITY).exp()
    met = torch.log(-torch.expm1(-intensity.clamp_min(1e-6)))
    return torch.where(hit, -met, intensity).mean()


def depth_loss(error: Tensor, log_scale: Tensor, hit: Tensor) -> Tensor:
    """-ln of a Cauchy density, whose scale is the median error, at rays that met the object.

    Its tails are heavy: of two surfaces the likelier one is the answer, not a place between them.
    """
    scale = log_scale.clamp(*LOG_SCALE)
    cost = torch.log1p((error * torch.exp(-scale)) ** 2) + scale
    return (cost * hit).sum() / hit.sum().clamp_min(1)
