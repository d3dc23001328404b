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
    weight = small_objects_first(batch["cloud"])
    parts = {
        "hit": outline_loss(answers.log_intensity, hit, weight),
        "depth": depth_loss(answers.depth - probes[..., 2], answers.log_scale, hit, weight),
    }
    return sum(parts.values()), parts


def small_objects_first(cloud: Tensor) -> Tensor:
    """Weight of each point (N, 1), one in the mean: an object counts as the root of its size.

    Else the few points of far objects, which need the network most, would hardly count.
    """
    ones = torch.ones_like(cloud, dtype=torch.float32)
    size = torch.zeros_like(ones).index_add(0, cloud, ones)[cloud]
    weight = size.rsqrt()
    return (weight / weight.mean())[:, None]


def outline_loss(log_intensity: Tensor, hit: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """-ln of the chance that rays do what they did: a Poisson process returns none, or some."""
    intensity = log_intensity.clamp(max=LARGEST_INTENSITY).exp()
    met = torch.log(-torch.expm1(-intensity.clamp_min(1e-6)))
    return (weight * torch.where(hit, -met, intensity)).mean()


def depth_loss(
    error: Tensor, log_scale: Tensor, hit: Tensor, weight: Tensor | float = 1.0
) -> Tensor:
    """-ln of a Laplace density, whose scale is the expected error, at rays that met the object."""
    scale = log_scale.clamp(*LOG_SCALE)
    cost = error.abs() * torch.exp(-scale) + scale
    counts = weight * hit
    return (cost * counts).sum() / counts.sum().clamp_min(1)
