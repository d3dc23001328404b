# SPDX-License-Identifier: Apache-2.0
"""The spherical mixture of Gaussians (section 3.2): one bivariate Gaussian for each input point."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from .attention import gather, mlp

# standard deviation before training: radians, nearly all directions; grid steps of the sensor
INITIAL_SPREAD = {"canonical": 1.2, "sensor": 0.35}


@dataclass
class Mixture:
    """K Gaussians in azimuth and elevation, with w_i = 1/K unless weights are learned."""

    mean: Tensor  # canonical: unit vectors (B, K, 3); sensor: grid steps from the ray (B, K, 2)
    cholesky: Tensor  # (B, K, 2, 2), lower triangular
    log_weight: Tensor  # (B, K); canonical: sums to one after exp
    limit: float = 0.0  # deviations within which samples stay; 0: no limit

    @property
    def covariance(self) -> Tensor:
        return self.cholesky @ self.cholesky.mT

    def displace(self, noise: Tensor) -> Tensor:
        """Standard normal noise (B, K, s, 2) -> displacements in azimuth and elevation."""
        step = noise @ self.cholesky.mT
        if not self.limit:
            return step
        most = self.limit * self.cholesky.norm(dim=-1)[:, :, None]  # (B, K, 1, 2)
        return step.clamp(-most, most)

    def allot(self, count: int) -> Tensor:
        """How many of `count` samples each component gets (B, K): its weight's share, rounded.

        The released code draws the components instead; the shares are the same, their noise is not.
        """
        edges = count * self.log_weight.detach().double().exp().cumsum(dim=-1)
        edges[:, -1] = count
        return (edges + 0.5).long().diff(dim=-1, prepend=edges.new_zeros(len(edges), 1).long())

    def draw(self, noise: Tensor, counts: Tensor | None = None) -> Tensor:
        """Standard normal noise (B, M, 2) -> samples (B, M, 3), component by component.

        counts (B, K) says how many each has, M in all; without, all have the same.
        """
        if counts is None:
            return self.sample(noise.unflatten(1, (self.mean.shape[1], -1))).flatten(1, 2)
        own = component_of(counts)
        factor = gather(self.cholesky.flatten(2), own).unflatten(2, (2, 2))
        one_each = Mixture(gather(self.mean, own), factor, self.log_weight, self.limit)
        return one_each.sample(noise[:, :, None])[:, :, 0]

    def sample(self, noise: Tensor) -> Tensor:
        """Reparameterised samples (B, K, s, 3) on the sphere, or (B, K, s, 2) in grid steps."""
        step = self.displace(noise)
        if self.mean.shape[-1] == 2:
            return self.mean[:, :, None] + step
        azimuth, elevation = to_angles(self.mean)
        return to_cartesian(
            azimuth[:, :, None] + step[..., 0], elevation[:, :, None] + step[..., 1]
        )


def component_of(counts: Tensor) -> Tensor:
    """Component (B, M) of each sample, of counts (B, K) that all sum up to M."""
    every = torch.arange(counts.shape[1], device=counts.device)
    return torch.stack([every.repeat_interleave(row) for row in counts])


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
    first, low, second = factor_entries(raw, form, spread)
    return torch.stack((first, torch.zeros_like(first), low, second), dim=-1).unflatten(-1, (2, 2))


def factor_entries(raw: Tensor, form: str, spread: float) -> tuple[Tensor, Tensor, Tensor]:
    """Entries (...) of the factor: the first, the low and the second."""
    if form == "clamp":
        return clamped_entries(raw, spread)
    log_sigma = raw[..., :2].clamp(-6.0, 2.0) + math.log(spread)
    first, second = log_sigma.exp().unbind(-1)
    if form == "rotation":  # Sigma = R D R^T, then its closed-form factor
        cos, sin = torch.cos(raw[..., 2]), torch.sin(raw[..., 2])
        var_a = (cos * first) ** 2 + (sin * second) ** 2
        var_b = (sin * first) ** 2 + (cos * second) ** 2
        cross = cos * sin * (first**2 - second**2)
        low = cross / var_a.sqrt()
        return var_a.sqrt(), low, (var_b - low**2).clamp_min(1e-12).sqrt()
    correlation = torch.tanh(raw[..., 2]) * 0.999
    return first, correlation * second, (1 - correlation**2).sqrt() * second


def clamped_entries(raw: Tensor, spread: float) -> tuple[Tensor, Tensor, Tensor]:
    """The supplement's: |sigma_tp| <= sigma_t sigma_p, by a clamp.

    Deviations are the released code's: exp(raw / 2), shifted to `spread` at zero, at least .05.
    """
    sigma = (raw[..., :2].clamp(max=4.0) / 2).exp() - (1 - spread)
    first, second = sigma.clamp_min(0.05).unbind(-1)
    bound = first * second - 1e-6
    low = torch.clamp(raw[..., 2], -bound, bound) / first
    return first, low, (second**2 - low**2).clamp_min(1e-12).sqrt()


class MixtureHead(nn.Module):
    """xi of eq. (3): features -> mean, covariance and weight of each component."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.mean_size = 2 if config.domain == "sensor" else 3
        self.spread = config.spread or INITIAL_SPREAD[config.domain]
        hidden = config.xi_hidden or config.width
        self.xi = mlp(config.width, hidden, self.mean_size + 4, norm=config.mlp_norm)

    def forward(self, features: Tensor) -> Mixture:
        """features (B, K, D) -> Mixture of K components."""
        mean, spread, weight = self.raw(features)
        factor = cholesky_factor(spread, self.config.covariance, self.spread)
        if self.config.domain != "sensor":  # there they say how many returns to expect
            weight = weight.log_softmax(-1)
        return Mixture(mean, factor, weight, self.config.sample_limit)

    def raw(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """features (B, K, D) -> means (B, K, 2 or 3), what the factors are made of (B, K, 3), and
        ln of the weights (B, K), which are not normalised."""
        raw = self.xi(features).float()  # half precision has no angles near the poles
        mean, spread, weight = raw.split((self.mean_size, 3, 1), dim=-1)
        if self.config.domain == "sensor":
            mean = torch.tanh(mean)  # a component stays within one grid step of its own ray
        else:
            mean = F.normalize(mean, dim=-1, eps=1e-6)
        if not self.config.learned_weights:
            weight = torch.zeros_like(weight)
        return mean, spread, weight[..., 0]
