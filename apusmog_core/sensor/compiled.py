# SPDX-License-Identifier: Apache-2.0
"""The sensor's network as machine code for CPUs: what `network.py` does, many anchors at once.

PyTorch spends most of its time on a network this small between operations. Here a block of anchors
stays in the cache from its coordinates to its answers. Arrays are (channels, LANES), so that one
instruction serves the same channel of several anchors; weights are padded to suit `linear`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..compute import machine_code
from ..model.network import ApuSmog, Decoded, Encoded
from ..model.smog import INITIAL_SPREAD
from .kernels import (
    LANES,
    add,
    attend,
    block,
    exponential,
    fourier,
    inverse_sinh,
    linear,
    normalise,
    perceptron,
    scores,
    softmax,
    tangent,
    weighted,
)


class Linear(NamedTuple):
    weight: np.ndarray  # (outputs, inputs), padded to multiples of two and four
    bias: np.ndarray  # (outputs,)


class EncoderWeights(NamedTuple):
    """Eq. (1), where a point knows its neighbours by position alone, and what it then tells."""

    query: Linear  # beta - psi
    value: Linear  # alpha
    position: tuple[Linear, Linear]  # eta
    gamma: tuple[Linear, Linear]
    told: Linear


class LayerWeights(NamedTuple):
    query: Linear  # with the norm before it and the scale of the scores
    out: Linear
    feed: tuple[Linear, Linear]  # with the norm before it


class DecoderWeights(NamedTuple):
    position: tuple[Linear, Linear]  # of the tokens
    code: Linear  # Fourier
    layers: tuple[LayerWeights, ...]
    query: Linear  # of the pointing head, with the norm before it and the scale
    offset: Linear
    sharpness: float


def supports(network: ApuSmog) -> bool:
    """Whether the machine code knows all that a network has."""
    config = network.config
    switches = config.query_self_attention or config.encoder_layers or config.covariance != "tanh"
    uneven = config.width % 4 or config.decoder_hidden % 4
    return config.domain == "sensor" and not switches and not uneven


class CompiledApuSmog:
    """Stands in for an `ApuSmog` on the sensor's sphere where nothing is to be learned."""

    def __init__(self, network: ApuSmog):
        if not supports(network):
            raise ValueError("not a network of the sensor's domain as `supports` asks for")
        self.network = network
        self._encoder, self._decoder = encoder_weights(network), decoder_weights(network)
        self._mixture = pack_mlp(network.mixture_head.xi)

    def encode(self, points: Tensor, neighbours: Tensor, context: Tensor, chunk: int = 0):
        """As `ApuSmog.encode`, for one patch: points (1, N, 3), neighbours (1, N, k)."""
        flat = points[0].numpy()
        offsets = relative(flat, neighbours[0].numpy())
        width = self.network.config.width
        features, told = (np.empty((len(flat), width), np.float32) for _ in range(2))
        _encode(self._encoder, offsets, context[0].numpy(), features, told)
        features, told, offsets = (torch.from_numpy(a)[None] for a in (features, told, offsets))
        return Encoded(points, None, neighbours, offsets, features, features, told)

    def components(self, encoded: Encoded) -> Tensor:
        """As `ApuSmog.components`."""
        table = _components(self._mixture, encoded.features[0].numpy(), INITIAL_SPREAD["sensor"])
        if self.network.config.learned_weights:
            weight = table[:, 6]
            table[:, 5] += weight - np.logaddexp.reduce(weight) + np.log(len(weight))
        return torch.from_numpy(table[:, :6])[None]

    def decode_at(self, encoded: Encoded, samples: Tensor, anchors: Tensor, chunk: int = 0):
        """As `ApuSmog.decode_at`, for one patch: samples (1, K, s, 2) of anchors (K,)."""
        names = ("points", "offsets", "neighbours", "memory", "told")
        given = [getattr(encoded, name)[0].numpy() for name in names]
        rays, chosen = samples[0].numpy(), anchors.numpy()
        coarse = np.empty((*rays.shape[:2], 3), np.float32)
        log_scale, hit = np.empty(rays.shape[:2], np.float32), np.empty(rays.shape[:2], np.float32)
        _decode(self._decoder, *given, rays, chosen, coarse, log_scale, hit)
        coarse, log_scale, hit = (torch.from_numpy(a) for a in (coarse, log_scale, hit))
        coarse = coarse.flatten(0, 1)[None]
        return Decoded(coarse, coarse, log_scale.flatten()[None], hit.flatten()[None])


# --- weights -------------------------------------------------------------------------------------


def encoder_weights(network: ApuSmog) -> EncoderWeights:
    layer = network.extract
    query = pack(layer.beta.weight - layer.psi.weight, layer.beta.bias - layer.psi.bias)
    return EncoderWeights(
        query,
        pack_linear(layer.alpha),
        pack_mlp(layer.eta),
        pack_mlp(layer.gamma),
        pack_linear(network.tokens.feature),
    )


def decoder_weights(network: ApuSmog) -> DecoderWeights:
    head = network.head
    return DecoderWeights(
        pack_mlp(network.tokens.position),
        pack_linear(network.query.project),
        tuple(layer_weights(layer) for layer in network.decoder),
        pack_linear(head.query, network.norm, head.scale),
        pack_linear(head.offset, network.norm),
        float(network.prior_sharpness.abs()),
    )


def layer_weights(layer: nn.Module) -> LayerWeights:
    query = pack_linear(layer.cross.query, layer.norm1, layer.cross.scale)
    return LayerWeights(query, pack_linear(layer.cross.out), pack_mlp(layer.feed, layer.norm2))


def pack_mlp(mlp: nn.Sequential, norm: nn.LayerNorm | None = None) -> tuple[Linear, Linear]:
    return pack_linear(mlp[0], norm), pack_linear(mlp[2])


def pack_linear(layer: nn.Linear, norm: nn.LayerNorm | None = None, scale: float = 1.0) -> Linear:
    """The layer with gain and shift of the norm before it, and a factor after it, in one."""
    weight, bias = layer.weight, layer.bias
    if norm is not None:
        weight, bias = weight * norm.weight, bias + weight @ norm.bias
    return pack(scale * weight, scale * bias)


def pack(weight: Tensor, bias: Tensor) -> Linear:
    outputs, inputs = weight.shape
    padded = nn.functional.pad(weight.detach(), (0, -inputs % 4, 0, -outputs % 2))
    return Linear(
        padded.contiguous().numpy(), nn.functional.pad(bias.detach(), (0, -outputs % 2)).numpy()
    )


# --- the network ---------------------------------------------------------------------------------


@machine_code
def relative(points, neighbours):
    """p_j - p_i (N, k, 4), and last how the position codes see the depth: edges are many steps."""
    count, k = neighbours.shape
    offsets = np.empty((count, k, 4), np.float32)
    for i in range(count):
        for j in range(k):
            for c in range(3):
                offsets[i, j, c] = points[neighbours[i, j], c] - points[i, c]
    for i in range(count):
        for j in range(k):
            offsets[i, j, 3] = inverse_sinh(offsets[i, j, 2])
    return offsets


@machine_code
def lane_of(start, lane, count):
    """Row of a lane; lanes beyond the last row repeat it."""
    return min(start + lane, count - 1)


@machine_code
def look(offsets, row, j, lane, seen):
    """An offset as the position codes see it."""
    seen[0, lane] = offsets[row, j, 0]
    seen[1, lane] = offsets[row, j, 1]
    seen[2, lane] = offsets[row, j, 3]


@machine_code
def _encode(weights, offsets, context, features, told):
    """offsets (N, k, 4), context (N, 2) -> features and told (N, D): the point transformer."""
    count, k = offsets.shape[:2]
    width = features.shape[1]
    seen, own, hidden = block(4), block(4), block(weights.gamma[0].weight.shape[0])
    x, query, value = block(width), block(width), block(width)
    result, spread = block(width), block(width)
    delta = np.empty((k, width, LANES), np.float32)
    gamma = np.empty((k, width, LANES), np.float32)
    for start in range(0, count, LANES):
        for lane in range(LANES):
            row = lane_of(start, lane, count)
            own[0, lane], own[1, lane] = context[row, 0], context[row, 1]
        linear(weights.query, own, query)
        linear(weights.value, own, value)
        for j in range(k):
            for lane in range(LANES):
                look(offsets, lane_of(start, lane, count), j, lane, seen)
            perceptron(weights.position, seen, hidden, delta[j])
            for c in range(width):
                for lane in range(LANES):
                    x[c, lane] = delta[j, c, lane] + query[c, lane]
            perceptron(weights.gamma, x, hidden, gamma[j])
        columns = width * LANES
        attend(gamma.reshape(k, columns), delta.reshape(k, columns), result.reshape(columns))
        add(result, value)  # the weights sum to one
        linear(weights.told, result, spread)
        for lane in range(min(LANES, count - start)):
            for c in range(width):
                features[start + lane, c] = result[c, lane]
                told[start + lane, c] = spread[c, lane]


@machine_code
def _components(weights, features, spread):
    """features (N, D) -> (N, 7): eq. (3) as in `Mixture.table`, and the weight before its softmax.

    The sixth column is ln N_i at the mean, without the weight.
    """
    count, width = features.shape
    x, hidden, raw = block(width), block(weights[0].weight.shape[0]), block(6)
    sigma, spread = block(4), np.float32(spread)
    peak = -np.log(2 * np.pi * spread * spread)
    table = np.empty((count, 7), np.float32)
    for start in range(0, count, LANES):
        for lane in range(LANES):
            for c in range(width):
                x[c, lane] = features[lane_of(start, lane, count), c]
        perceptron(weights, x, hidden, raw)
        for c in (0, 1, 4):
            for lane in range(LANES):
                raw[c, lane] = tangent(raw[c, lane])
        for c in (2, 3):
            for lane in range(LANES):
                raw[c, lane] = min(max(raw[c, lane], np.float32(-6)), np.float32(2))
                sigma[c, lane] = spread * exponential(raw[c, lane])
        for lane in range(min(LANES, count - start)):
            row = table[start + lane]
            correlation = np.float32(0.999) * raw[4, lane]
            rest = 1 - correlation * correlation
            row[0], row[1], row[2] = raw[0, lane], raw[1, lane], sigma[2, lane]
            row[3], row[4] = correlation * sigma[3, lane], np.sqrt(rest) * sigma[3, lane]
            row[5] = peak - raw[2, lane] - raw[3, lane] - 0.5 * np.log(rest)
            row[6] = raw[5, lane]
    return table


@machine_code
def hidden_size(weights):
    feed = weights.layers[0].feed[0].weight.shape[0]
    return max(weights.position[0].weight.shape[0], feed)


@machine_code
def _decode(
    weights, points, offsets, neighbours, memory, told, rays, anchors, coarse, log_scale, hit
):
    """rays (K, s, 2) of anchors (K,) -> coarse (K, s, 3), log_scale and hit (K, s).

    points (N, 3), offsets (N, k, 4), neighbours (N, k), memory and told (N, D).
    """
    k, width = offsets.shape[1], memory.shape[1]
    count, per = rays.shape[:2]
    seen, ray, near, raw = block(4), block(2), block(k), block(4)
    own, x, y, z = block(width), block(width), block(width), block(width)
    code, hidden = block(weights.code.weight.shape[1]), block(hidden_size(weights))
    away = np.empty((k, 3, LANES), np.float32)
    tokens = np.empty((k, width, LANES), np.float32)
    for start in range(0, count, LANES):
        for lane in range(LANES):
            row = anchors[lane_of(start, lane, count)]
            for c in range(width):
                own[c, lane] = memory[row, c]
        for j in range(k):
            for lane in range(LANES):
                row = anchors[lane_of(start, lane, count)]
                look(offsets, row, j, lane, seen)
                for c in range(3):
                    away[j, c, lane] = offsets[row, j, c]
            perceptron(weights.position, seen, hidden, tokens[j])
            for lane in range(LANES):
                other = neighbours[anchors[lane_of(start, lane, count)], j]
                for c in range(width):
                    tokens[j, c, lane] += told[other, c]
        for q in range(per):
            for lane in range(LANES):
                row = lane_of(start, lane, count)
                ray[0, lane], ray[1, lane] = rays[row, q, 0], rays[row, q, 1]
            fourier(ray, code)
            linear(weights.code, code, x)
            add(x, own)
            for layer in weights.layers:
                normalise(x, y)
                linear(layer.query, y, z)
                near[:] = 0
                scores(z, tokens, near)
                softmax(near)
                weighted(near, tokens, y)
                linear(layer.out, y, z)
                add(x, z)
                normalise(x, y)
                perceptron(layer.feed, y, hidden, z)
                add(x, z)
            normalise(x, y)
            linear(weights.query, y, z)
            sharpness = np.float32(weights.sharpness)
            for j in range(k):
                for lane in range(LANES):
                    u, v = away[j, 0, lane], away[j, 1, lane]
                    across = ray[0, lane] * u + ray[1, lane] * v
                    near[j, lane] = sharpness * (np.float32(2) * across - u * u - v * v)
            scores(z, tokens, near)
            softmax(near)
            linear(weights.offset, y, raw)
            for lane in range(LANES):
                raw[0, lane] = np.float32(2) * tangent(raw[0, lane])
            for j in range(k):
                for lane in range(LANES):
                    raw[0, lane] += near[j, lane] * away[j, 2, lane]
            for lane in range(min(LANES, count - start)):
                row, at = start + lane, anchors[start + lane]
                coarse[row, q, 0] = points[at, 0] + ray[0, lane]
                coarse[row, q, 1] = points[at, 1] + ray[1, lane]
                coarse[row, q, 2] = points[at, 2] + raw[0, lane]
                log_scale[row, q], hit[row, q] = raw[1, lane], raw[2, lane]
