# SPDX-License-Identifier: Apache-2.0
"""What training on surfaces minimises: both forward passes and the losses of section 3.5."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import TrainConfig
from ..geometry import nearest_between
from .attention import gather
from .network import ApuSmog
from .smog import Mixture, component_of


def project(x: Tensor, z: Tensor, alpha: float, neighbours: int) -> Tensor:
    """Pi(x, Z): mean of the nearest points of z, with weights exp(-alpha |x - z_k|^2)."""
    near = gather(z, nearest_between(x, z, neighbours))  # (B, X, k, 3)
    distance = (x[:, :, None] - near).square().sum(-1)
    # softmax is the normalised exp, and stays finite where every exp underflows
    weights = torch.softmax(-alpha * distance, dim=-1)
    return (weights[..., None] * near).sum(dim=2)


def projection_distance(
    x: Tensor, z: Tensor, alpha: float, neighbours: int, share: Tensor | float = 1.0
) -> Tensor:
    """d_Pi(X, Z): mean squared distance to the projection, of points that count `share` (B, X)."""
    return ((x - project(x, z, alpha, neighbours)).square().sum(-1) * share).mean()


def projection_loss(
    x: Tensor, z: Tensor, alpha: float = 1e3, neighbours: int = 4, share: Tensor | None = None
) -> Tensor:
    """L_Pi(X, Z), both directions."""
    if share is None:
        there, back = 1.0, 1.0
    else:
        there, back = share, sparser(share, x, z)
    return projection_distance(x, z, alpha, neighbours, there) + projection_distance(
        z, x, alpha, neighbours, back
    )


def sparser(share: Tensor, x: Tensor, z: Tensor) -> Tensor:
    """What the shares (B, X) of outputs do to the distance from each target (B, Z) to them.

    On a surface the squared distance to the next of m samples falls as 1 / m.
    """
    return 1 / gather(share[..., None], nearest_between(z, x, 1)[:, :, 0])[..., 0]


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
    """Section 3.5 on surface patches: two passes of the decoder, the weighted sum of three losses.

    The encoder's pass is the same for both, so that it is done once.
    """
    points, target, noise = batch["points"], batch["target"], batch["noise"]  # noise (B, M, 2)
    encoded = network.encode(points, batch["neighbours"])
    mixture = network.mixture(encoded)
    # upsampling: samples of the mixture, the coarse and the refined points against the target
    counts = network.allot(mixture, noise.shape[1])
    samples = network.sample(mixture, noise, counts)
    out = network.decode(encoded, samples, counts)
    own = network.anchor_of(encoded, samples, counts)
    loss = upsampling_loss(config)
    inside = gather(points, own).norm(dim=-1) < config.interior
    share = drawn_share(mixture, counts) if network.config.learned_weights else None
    parts = {"fine": loss(out.fine, target, inside, share) * config.lambda_fine}
    if len(network.refine):
        parts["coarse"] = loss(out.coarse, target, inside, share) * config.lambda_coarse
    # reconstruction: the means of the mixture, decoded, against the input
    if config.lambda_reconstruction:
        means = network.decode(encoded, mixture.mean, refine=False).coarse
        parts["reconstruction"] = augmented_chamfer(means, points) * config.lambda_reconstruction
    if config.lambda_drift:
        away = (out.fine - gather(points, own)) / gather(encoded.spacing, own)
        parts["drift"] = drift(away) * config.lambda_drift
    return sum(parts.values()), parts


def drawn_share(mixture: Mixture, counts: Tensor) -> Tensor:
    """One for each sample (B, M), with the gradient of its component's weight.

    Counts have no gradient. By this the weights learn from the loss as if each output were there
    as often as its weight says.
    """
    weight = mixture.log_weight
    return gather((weight - weight.detach()).exp()[..., None], component_of(counts))[..., 0]


def drift(away: Tensor) -> Tensor:
    """Squared mean (B, K, 3) -> () of the moves from anchors to their outputs.

    Patches are turned at random, so that the truth has no favourite direction. Along the surface
    the other losses hardly notice one, but it shifts the whole cloud.
    """
    return away.mean(dim=(0, 1)).square().sum()


def upsampling_loss(config: TrainConfig):
    """A loss of output, target, the mask of outputs that count, and their shares if learned."""
    alpha, k = config.projection_alpha, config.projection_neighbours
    if config.loss == "interior":
        return lambda x, z, inside, share: interior_loss(
            x, z, inside, config.interior, alpha, k, share
        )
    if config.loss == "projection":
        return lambda x, z, _, share: projection_loss(x, z, alpha, k, share)
    whole = augmented_chamfer if config.loss == "acd" else chamfer
    return lambda x, z, *_: whole(x, z)


def interior_loss(
    x: Tensor,
    z: Tensor,
    inside: Tensor,
    radius: float,
    alpha: float,
    neighbours: int,
    share: Tensor | None = None,
) -> Tensor:
    """Off the surface, and not covering it, where the patch's border is out of sight.

    At its border a patch knows no neighbours and the target ends elsewhere: a network that works
    on whole clouds would learn there to reach beyond the points it sees.
    """
    off = (x - project(x, z, alpha, neighbours)).square().sum(-1)
    middle = (z.norm(dim=-1) < 0.85 * radius).float()
    near = gather(x, nearest_between(z, x, 1))[:, :, 0]
    bare = (z - near).square().sum(-1)
    if share is not None:
        off, bare = off * share, bare * sparser(share, x, z)
    counted = inside.float()
    precise = (off * counted).sum() / counted.sum().clamp_min(1)
    return 2 * precise + (bare * middle).sum() / middle.sum().clamp_min(1)
