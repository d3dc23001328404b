# SPDX-License-Identifier: Apache-2.0
"""The sensor's network as machine code for CPUs: what `network.py` does, many anchors at once.

PyTorch spends most of its time on a network this small between operations. Here a block of anchors
stays in the cache. Arrays are (channels, LANES), so that one instruction serves the same channel of
several anchors; weights are padded to suit `linear`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from ..compute import machine_code
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
from .network import LARGEST_SHIFT, LOG_SCALE, RAY_REACH, RayNetwork


class Linear(NamedTuple):
    weight: np.ndarray  # (outputs, inputs), padded to multiples of two and four
    bias: np.ndarray  # (outputs,)


class EncoderWeights(NamedTuple):
    """The view around a point, the whole object, eq. (1), and what a point tells rays."""

    embed: tuple[Linear, Linear]
    whole: Linear
    query: Linear  # beta
    key: Linear  # psi
    value: Linear  # alpha
    position: tuple[Linear, Linear]  # eta
    gamma: tuple[Linear, Linear]
    token: Linear


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
    sharpness: np.ndarray  # (2,)


class CompiledRays(NamedTuple):
    """What the decoder needs to know of the measured points; see `EncodedRays`."""

    neighbours: np.ndarray  # (N, k)
    offsets: np.ndarray  # (N, k, 4), last how the position codes see the depth
    features: np.ndarray  # (N, D)
    tokens: np.ndarray  # (N, D)
    components: np.ndarray  # (N, 6)


def supports(network: RayNetwork) -> bool:
    """Whether the machine code can do all that a network does."""
    config = network.config
    plain = config.covariance == "tanh" and not config.query_self_attention
    hidden = (config.encoder_hidden, config.decoder_hidden, config.xi_hidden)
    return plain and all(size % 4 == 0 for size in (config.width, *hidden))


class CompiledRayNetwork:
    """Stands in for a `RayNetwork` where nothing is to be learned: arrays in, arrays out."""

    def __init__(self, network: RayNetwork):
        if not supports(network):
            raise ValueError("this network has parts that the machine code does not know")
        self.width, self.learned = network.config.width, network.config.learned_weights
        self._encoder, self._decoder = encoder_weights(network), decoder_weights(network)
        self._mixture, self._spread = pack_mlp(network.mixture_head.xi), network.mixture_head.spread

    def encode(
        self, offsets: np.ndarray, neighbours: np.ndarray, context: np.ndarray, cloud: np.ndarray
    ) -> CompiledRays:
        """As `RayNetwork.encode`."""
        seen = with_seen_depth(offsets)
        features, tokens = _encode(self._encoder, self.width, seen, neighbours, context, cloud)
        components = _components(self._mixture, features, self._spread, self.learned)
        return CompiledRays(neighbours, seen, features, tokens, components)

    def decode(
        self, encoded: CompiledRays, rays: np.ndarray, anchors: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Depth, ln(median error) and intensity (A, s), as `RayNetwork.decode` gives them."""
        return _decode(self._decoder, *encoded, rays, anchors)


# --- weights -------------------------------------------------------------------------------------


def encoder_weights(network: RayNetwork) -> EncoderWeights:
    layer = network.extract
    return EncoderWeights(
        pack_mlp(network.embed),
        pack_linear(network.whole),
        pack_linear(layer.beta),
        pack_linear(layer.psi),
        pack_linear(layer.alpha),
        pack_mlp(layer.eta),
        pack_mlp(layer.gamma),
        pack_linear(network.tokens.feature),
    )


def decoder_weights(network: RayNetwork) -> DecoderWeights:
    head = network.head
    return DecoderWeights(
        pack_mlp(network.tokens.position),
        pack_linear(network.query.project),
        tuple(layer_weights(layer) for layer in network.decoder),
        pack_linear(head.query, network.norm, head.scale),
        pack_linear(head.offset, network.norm),
        network.sharpness.detach().abs().numpy(),
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
def with_seen_depth(offsets):
    """Offsets (N, k, 4), and last how the position codes see the depth: edges are many steps."""
    count, k, _ = offsets.shape
    result = np.empty((count, k, 4), np.float32)
    for i in range(count):
        for j in range(k):
            for c in range(3):
                result[i, j, c] = offsets[i, j, c]
            result[i, j, 3] = inverse_sinh(offsets[i, j, 2])
    return result


@machine_code
def lane_of(start, lane, count):
    """Row of a lane; lanes beyond the last row repeat it."""
    return min(start + lane, count - 1)


@machine_code
def see_offset(offsets, row, j, lane, seen):
    """An offset as the position codes see it."""
    seen[0, lane] = offsets[row, j, 0]
    seen[1, lane] = offsets[row, j, 1]
    seen[2, lane] = offsets[row, j, 3]


@machine_code
def load_block(rows, start, x):
    """Rows (N, C) from `start` on into a block."""
    for lane in range(LANES):
        row = lane_of(start, lane, len(rows))
        for c in range(rows.shape[1]):
            x[c, lane] = rows[row, c]


@machine_code
def store_block(x, start, rows):
    """A block into rows (N, C) from `start` on."""
    for lane in range(min(LANES, len(rows) - start)):
        for c in range(rows.shape[1]):
            rows[start + lane, c] = x[c, lane]


@machine_code
def _embed(weights, width, context, cloud):
    """What each point sees around it and of its whole object: (N, D)."""
    count = len(context)
    x = np.empty((count, width), np.float32)
    wide, inner = weights.embed[0].weight.shape[1], weights.embed[0].weight.shape[0]
    inputs, hidden, y = block(wide), block(max(inner, width)), block(width)
    for start in range(0, count, LANES):
        load_block(context, start, inputs)
        perceptron(weights.embed, inputs, hidden, y)
        store_block(y, start, x)
    whole = np.zeros((cloud[-1] + 1, width), np.float32)  # greatest of each channel, or zero
    for i in range(count):
        for c in range(width):
            whole[cloud[i], c] = max(whole[cloud[i], c], x[i, c])
    told = np.empty_like(whole)
    for start in range(0, len(whole), LANES):
        load_block(whole, start, hidden)
        linear(weights.whole, hidden[:width], y)
        store_block(y, start, told)
    for i in range(count):
        for c in range(width):
            x[i, c] += told[cloud[i], c]
    return x


@machine_code
def _encode(weights, width, offsets, neighbours, context, cloud):
    """offsets (N, k, 4), neighbours (N, k), context (N, C), cloud (N,) -> features, tokens."""
    count, k = neighbours.shape
    inputs = _embed(weights, width, context, cloud)
    features, tokens = np.empty_like(inputs), np.empty_like(inputs)
    keys, values = np.empty_like(inputs), np.empty_like(inputs)
    x, y, query, seen = block(width), block(width), block(width), block(4)
    key, value = block(width), block(width)
    hidden = block(max(weights.gamma[0].weight.shape[0], weights.position[0].weight.shape[0]))
    for start in range(0, count, LANES):
        load_block(inputs, start, x)
        linear(weights.key, x, y)
        store_block(y, start, keys)
        linear(weights.value, x, y)
        store_block(y, start, values)
    shape, columns = (k, width, LANES), width * LANES
    delta, gamma = np.empty(shape, np.float32), np.empty(shape, np.float32)
    for start in range(0, count, LANES):
        load_block(inputs, start, x)
        linear(weights.query, x, query)
        for j in range(k):
            for lane in range(LANES):
                see_offset(offsets, lane_of(start, lane, count), j, lane, seen)
            perceptron(weights.position, seen, hidden, delta[j])
            for lane in range(LANES):
                other = neighbours[lane_of(start, lane, count), j]
                for c in range(width):
                    key[c, lane], value[c, lane] = keys[other, c], values[other, c]
            for c in range(width):
                for lane in range(LANES):
                    x[c, lane] = delta[j, c, lane] + (query[c, lane] - key[c, lane])
                    delta[j, c, lane] += value[c, lane]
            perceptron(weights.gamma, x, hidden, gamma[j])
        attend(gamma.reshape(k, columns), delta.reshape(k, columns), y.reshape(columns))
        store_block(y, start, features)
        linear(weights.token, y, x)
        store_block(x, start, tokens)
    return features, tokens


@machine_code
def _components(weights, features, spread, learned):
    """features (N, D) -> (N, 6): eq. (3): mean, 1 / first, low, 1 / second, ln(w_i N_i(mean))."""
    count, width = features.shape
    x, hidden, raw = block(width), block(weights[0].weight.shape[0]), block(6)
    table = np.empty((count, 6), np.float32)
    for start in range(0, count, LANES):
        load_block(features, start, x)
        perceptron(weights, x, hidden, raw)
        for lane in range(min(LANES, count - start)):
            row = table[start + lane]
            row[0], row[1] = tangent(raw[0, lane]), tangent(raw[1, lane])
            first = spread * math.exp(min(max(raw[2, lane], -6), 2))
            second = spread * math.exp(min(max(raw[3, lane], -6), 2))
            correlation = 0.999 * tangent(raw[4, lane])
            low, last = correlation * second, math.sqrt(1 - correlation**2) * second
            row[2], row[3], row[4] = 1 / first, low, 1 / last
            row[5] = (raw[5, lane] if learned else 0.0) - math.log(2 * math.pi * first * last)
    return table


@machine_code
def _hidden_size(weights):
    feed = weights.layers[0].feed[0].weight.shape[0]
    return max(weights.position[0].weight.shape[0], feed)


@machine_code
def _decode(weights, neighbours, offsets, features, tokens_of, components, rays, anchors):
    """rays (A, s, 2) of anchors (A,) -> depth, ln of its scale, and intensity (A, s)."""
    k, width = offsets.shape[1], features.shape[1]
    count, per = rays.shape[:2]
    depth, log_scale = np.empty((count, per), np.float32), np.empty((count, per), np.float32)
    intensity = np.empty((count, per), np.float32)
    seen, ray, near, raw = block(4), block(2), block(k), block(2)
    own, x, y, z = block(width), block(width), block(width), block(width)
    code, hidden = block(weights.code.weight.shape[1]), block(_hidden_size(weights))
    away = np.empty((k, 3, LANES), np.float32)
    tokens = np.empty((k, width, LANES), np.float32)
    mixture = np.empty((k, 6, LANES), np.float32)
    expected = np.empty(LANES, np.float32)
    along, up = weights.sharpness[0], weights.sharpness[1]
    for start in range(0, count, LANES):
        for lane in range(LANES):
            row = anchors[lane_of(start, lane, count)]
            for c in range(width):
                own[c, lane] = features[row, c]
        for j in range(k):
            for lane in range(LANES):
                row = anchors[lane_of(start, lane, count)]
                see_offset(offsets, row, j, lane, seen)
                for c in range(3):
                    away[j, c, lane] = offsets[row, j, c]
            perceptron(weights.position, seen, hidden, tokens[j])
            for lane in range(LANES):
                row = anchors[lane_of(start, lane, count)]
                other = neighbours[row, j]
                for c in range(width):
                    tokens[j, c, lane] += tokens_of[other, c]
                for c in range(6):
                    mixture[j, c, lane] = components[other, c]
                mixture[j, 0, lane] += away[j, 0, lane]
                mixture[j, 1, lane] += away[j, 1, lane]
                if j > 0 and other == row:  # a missing neighbour repeats the point itself
                    mixture[j, 5, lane] = np.float32(-80)
        for q in range(per):
            for lane in range(LANES):
                row = lane_of(start, lane, count)
                ray[0, lane], ray[1, lane] = rays[row, q, 0], rays[row, q, 1]
            _intensity(mixture, ray, expected)
            fourier(ray, code, np.float32(1 / RAY_REACH))
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
            for j in range(k):
                for lane in range(LANES):
                    u, v = away[j, 0, lane], away[j, 1, lane]
                    across = along * u * (np.float32(2) * ray[0, lane] - u)
                    near[j, lane] = across + up * v * (np.float32(2) * ray[1, lane] - v)
            scores(z, tokens, near)
            softmax(near)
            linear(weights.offset, y, raw)
            for lane in range(LANES):
                raw[0, lane] = np.float32(LARGEST_SHIFT) * tangent(raw[0, lane])
            for j in range(k):
                for lane in range(LANES):
                    raw[0, lane] += near[j, lane] * away[j, 2, lane]
            for lane in range(min(LANES, count - start)):
                depth[start + lane, q] = raw[0, lane]
                log_scale[start + lane, q] = min(max(raw[1, lane], LOG_SCALE[0]), LOG_SCALE[1])
                intensity[start + lane, q] = expected[lane]
    return depth, log_scale, intensity


@machine_code
def _intensity(mixture, ray, expected):
    """Sum of w_j N_j (eq. 2) at a ray (2, LANES) over components (k, 6, LANES) -> (LANES,)."""
    expected[:] = 0
    for j in range(mixture.shape[0]):
        for lane in range(LANES):
            u = (ray[0, lane] - mixture[j, 0, lane]) * mixture[j, 2, lane]
            v = ray[1, lane] - mixture[j, 1, lane] - mixture[j, 3, lane] * u
            v = v * mixture[j, 4, lane]
            power = mixture[j, 5, lane] - np.float32(0.5) * (u * u + v * v)
            expected[lane] += exponential(min(power, np.float32(3.4)))
