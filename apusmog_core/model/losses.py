# SPDX-License-Identifier: Apache-2.0
"""What training on surfaces minimises: the losses of section 3.5."""

from __future__ import annotations

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from ..config import TrainConfig
from .attention import gather
from .network import ApuSmog


def nearest_between(x: Tensor, z: Tensor, k: int) -> Tensor:
    """Indices (B, X, k) of the k nearest points of z (B, Z, 3) for each of x (B, X, 3)."""
    k = min(k, z.shape[1])
    if x.is_cuda:
        with torch.no_grad():
            return torch.cdist(x, z).topk(k, largest=False).indices
    pairs = zip(x.detach().numpy(), z.detach().numpy(), strict=True)
    found = [cKDTree(b).query(a, k=np.arange(1, k + 1))[1] for a, b in pairs]
    return torch.from_numpy(np.stack(found))


def project(x: Tensor, z: Tensor, alpha: float, neighbours: int) -> Tensor:
    """Pi(x, Z): mean of the nearest points of z, with weights exp(-alpha |x - z_k|^2)."""
    near = gather(z, nearest_between(x, z, neighbours))  # (B, X, k, 3)
    distance = (x[:, :, None] - near).square().sum(-1)
    # softmax is the normalised exp, and stays finite where every exp underflows
    weights = torch.softmax(-alpha * distance, dim=-1)
    return (weights[..., None] * near).sum(dim=2)


def projection_distance(x: Tensor, z: Tensor, alpha: float, neighbours: int) -> Tensor:
    """d_Pi(X, Z): mean squared distance to the projection."""
    return (x - project(x, z, alpha, neighbours)).square().sum(-1).mean()


def projection_loss(x: Tensor, z: Tensor, alpha: float = 1e3, neighbours: int = 4) -> Tensor:
    """L_Pi(X, Z), both directions."""
    return projection_distance(x, z, alpha, neighbours) + projection_distance(
        z, x, alpha, neighbours
    )


def one_way(x: Tensor, z: Tensor) -> Tensor:
    """Mean squared distance of each x to its nearest z, for each patch (B,)."""
    near = gather(z, nearest_between(x, z, 1))[:, :, 0]
    return (x - near).square().sum(-1).mean(dim=1)


def chamfer(x: Tensor, z: Tensor) -> Tensor:
    return (one_way(x, z) + one_way(z, x)).mean()


def augmented_chamfer(x: Tensor, z: Tensor) -> Tensor:
    """L_ACD(X, Z): the worse of the two directions."""
    return torch.maximum(one_way(x, z), one_way(z, x)).mean()


def surface_loss(network: ApuSmog, batch: dict[str, Tensor], config: TrainConfig):
    """The weighted sum of coarse, refined and reconstruction loss on surface patches."""
    encoded = network.encode(batch["points"], batch["neighbours"])
    mixture = network.mixture(encoded)
    # one sample more, without noise: the means, for the reconstruction
    noise = torch.cat((torch.zeros_like(batch["noise"][:, :, :1]), batch["noise"]), dim=2)
    samples = network.sample(mixture, noise)
    out = network.decode(encoded, samples)
    per = noise.shape[2]
    coarse, fine = (t.unflatten(1, (-1, per)) for t in (out.coarse, out.fine))
    loss = upsampling_loss(config)
    inside = batch["points"][:, network.anchors()].norm(dim=-1) < config.interior
    inside = inside[:, :, None].expand(-1, -1, per - 1).flatten(1)
    new = [t[:, :, 1:].flatten(1, 2) for t in (coarse, fine)]
    parts = {"fine": loss(new[1], batch["target"], inside) * config.lambda_fine}
    if len(network.refine):
        parts["coarse"] = loss(new[0], batch["target"], inside) * config.lambda_coarse
    if config.lambda_reconstruction:
        means = augmented_chamfer(coarse[:, :, 0], batch["points"])
        parts["reconstruction"] = means * config.lambda_reconstruction
    if config.lambda_drift:
        away = (fine[:, :, 1:].mean(dim=2) - batch["points"][:, network.anchors()]) / (
            encoded.spacing[:, network.anchors()]
        )
        parts["drift"] = drift(away) * config.lambda_drift
    return sum(parts.values()), parts


def drift(away: Tensor) -> Tensor:
    """Squared mean (B, K, 3) -> () of the moves from anchors to their outputs.

    Patches are turned at random, so that the truth has no favourite direction. Along the surface
    the other losses hardly notice one, but it shifts the whole cloud.
    """
    return away.mean(dim=(0, 1)).square().sum()


def upsampling_loss(config: TrainConfig):
    """A loss of output, target and the mask of outputs that count; only one looks at the mask."""
    alpha, k = config.projection_alpha, config.projection_neighbours
    if config.loss == "interior":
        return lambda x, z, inside: interior_loss(x, z, inside, config.interior, alpha, k)
    if config.loss == "projection":
        return lambda x, z, _: projection_loss(x, z, alpha, k)
    whole = augmented_chamfer if config.loss == "acd" else chamfer
    return lambda x, z, _: whole(x, z)


def interior_loss(
    x: Tensor, z: Tensor, inside: Tensor, radius: float, alpha: float, neighbours: int
) -> Tensor:
    """Off the surface, and not covering it, where the patch's border is out of sight.

    At its border a patch knows no neighbours and the target ends elsewhere: a network that works
    on whole clouds would learn there to reach beyond the points it sees.
    """
    off = (x - project(x, z, alpha, neighbours)).square().sum(-1)
    middle = (z.norm(dim=-1) < 0.85 * radius).float()
    near = gather(x, nearest_between(z, x, 1))[:, :, 0]
    bare = (z - near).square().sum(-1)
    counted = inside.float()
    precise = (off * counted).sum() / counted.sum().clamp_min(1)
    return 2 * precise + (bare * middle).sum() / middle.sum().clamp_min(1)
