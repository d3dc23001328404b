# SPDX-License-Identifier: Apache-2.0
"""The spherical mixture of Gaussians (section 3.2): one bivariate Gaussian for each input point."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from .attention import mlp

# standard deviation before training: radians, nearly all directions; grid steps of the sensor
INITIAL_SPREAD = {"canonical": 1.2, "sensor": 0.35}


@dataclass
class Mixture:
    """K Gaussians in azimuth and elevation, with w_i = 1/K unless weights are learned."""

    mean: Tensor  # canonical: unit vectors (B, K, 3); sensor: grid steps from the ray (B, K, 2)
    cholesky: Tensor  # (B, K, 2, 2), lower triangular
    log_weight: Tensor  # (B, K); canonical: sums to one after exp

    @property
    def covariance(self) -> Tensor:
        return self.cholesky @ self.cholesky.mT

    def displace(self, noise: Tensor) -> Tensor:
        """Standard normal noise (B, K, s, 2) -> displacements in azimuth and elevation."""
        return noise @ self.cholesky.mT

    def sample(self, noise: Tensor) -> Tensor:
        """Reparameterised samples (B, K, s, 3) on the sphere, or (B, K, s, 2) in grid steps."""
        step = self.displace(noise)
        if self.mean.shape[-1] == 2:
            return self.mean[:, :, None] + step
        azimuth, elevation = to_angles(self.mean)
        return to_cartesian(
            azimuth[:, :, None] + step[..., 0], elevation[:, :, None] + step[..., 1]
        )


def log_normal(offset: Tensor, first: Tensor, low: Tensor, second: Tensor) -> Tensor:
    """ln of the bivariate normal density at offsets (..., 2), by the entries of its factor L."""
    u = offset[..., 0] / first
    v = (offset[..., 1] - low * u) / second
    return -0.5 * (u * u + v * v) - torch.log(first * second) - math.log(2 * math.pi)


def to_angles(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors -> azimuth in (-pi, pi], elevation in [0, pi]; gradients finite at the poles."""
    x, y, z = vectors.unbind(-1)
    on_axis = (x.abs() + y.abs()) < 1e-6
    azimuth = torch.atan2(y, torch.where(on_axis, torch.ones_like(x), x))
    return azimuth, torch.acos(z.clamp(-1 + 1e-6, 1 - 1e-6))


def to_cartesian(azimuth: Tensor, elevation: Tensor) -> Tensor:
    """Angles -> unit vectors; azimuth wraps and elevation reflects at the poles by themselves."""
    ring = torch.sin(elevation)
    return torch.stack(
        (ring * torch.cos(azimuth), ring * torch.sin(azimuth), torch.cos(elevation)), dim=-1
    )


def uniform_on_sphere(noise: Tensor) -> Tensor:
    """Standard normal noise (..., 2) -> uniform unit vectors (..., 3), the FoldingNet-like row."""
    share = torch.special.ndtr(noise)
    return to_cartesian(2 * math.pi * share[..., 0], torch.acos(1 - 2 * share[..., 1]))


def cholesky_factor(raw: Tensor, form: str, spread: float = 1.0) -> Tensor:
    """Three raw outputs (..., 3) -> factor L of a positive semi-definite covariance L L^T."""
    log_sigma = raw[..., :2].clamp(-6.0, 2.0) + math.log(spread)
    first, second = log_sigma.exp().unbind(-1)
    zero = torch.zeros_like(first)
    if form == "rotation":  # Sigma = R D R^T, then its closed-form factor
        cos, sin = torch.cos(raw[..., 2]), torch.sin(raw[..., 2])
        var_a = (cos * first) ** 2 + (sin * second) ** 2
        var_b = (sin * first) ** 2 + (cos * second) ** 2
        cross = cos * sin * (first**2 - second**2)
        low = cross / var_a.sqrt()
        rows = (var_a.sqrt(), zero, low, (var_b - low**2).clamp_min(1e-12).sqrt())
    else:
        if form == "clamp":  # |sigma_tp| <= sigma_t sigma_p, as in the supplement
            bound = first * second * 0.999
            correlation = torch.clamp(raw[..., 2], -bound, bound) / (first * second)
        else:
            correlation = torch.tanh(raw[..., 2]) * 0.999
        rows = (first, zero, correlation * second, (1 - correlation**2).sqrt() * second)
    return torch.stack(rows, dim=-1).unflatten(-1, (2, 2))


class MixtureHead(nn.Module):
    """xi of eq. (3): features -> mean, covariance and weight of each component."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.mean_size = 2 if config.domain == "sensor" else 3
        self.xi = mlp(config.width, config.width, self.mean_size + 4)

    def forward(self, features: Tensor) -> Mixture:
        """features (B, K, D) -> Mixture of K components."""
        raw = self.xi(features)
        mean, spread, weight = raw.split((self.mean_size, 3, 1), dim=-1)
        if self.config.domain == "sensor":
            mean = torch.tanh(mean)  # a component stays within one grid step of its own ray
        else:
            mean = F.normalize(mean, dim=-1, eps=1e-6)
        if not self.config.learned_weights:
            weight = torch.zeros_like(weight)
        factor = cholesky_factor(spread, self.config.covariance, INITIAL_SPREAD[self.config.domain])
        weight = weight[..., 0]
        if self.config.domain != "sensor":  # there they say how many returns to expect
            weight = weight.log_softmax(-1)
        return Mixture(mean, factor, weight)
