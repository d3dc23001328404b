# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of `compiled.py` on blocks (channels, LANES), without branches in the inner loops, so
that one instruction serves the same channel of several anchors."""

from __future__ import annotations

import numpy as np

from ..compute import machine_code

LANES = 192  # anchors that are worked on at once: many, since every loop over them has a price


@machine_code
def block(channels):
    return np.zeros((channels, LANES), np.float32)


@machine_code
def linear(layer, x, y):
    """y = W x + b; two outputs and four inputs at a time keep the processor's units busy."""
    weight, bias = layer.weight, layer.bias
    for o in range(0, weight.shape[0], 2):
        for lane in range(LANES):
            y[o, lane] = bias[o]
            y[o + 1, lane] = bias[o + 1]
        for i in range(0, weight.shape[1], 4):
            a0, a1, a2, a3 = weight[o, i], weight[o, i + 1], weight[o, i + 2], weight[o, i + 3]
            b0, b1 = weight[o + 1, i], weight[o + 1, i + 1]
            b2, b3 = weight[o + 1, i + 2], weight[o + 1, i + 3]
            for lane in range(LANES):
                x0, x1, x2, x3 = x[i, lane], x[i + 1, lane], x[i + 2, lane], x[i + 3, lane]
                y[o, lane] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
                y[o + 1, lane] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3


@machine_code
def perceptron(layers, x, hidden, y):
    linear(layers[0], x, hidden)
    for c in range(layers[0].weight.shape[0]):
        for lane in range(LANES):  # ReLU; max() in place becomes a branch, for one at a time
            hidden[c, lane] = np.float32(0.5) * (hidden[c, lane] + abs(hidden[c, lane]))
    linear(layers[1], hidden, y)


@machine_code
def add(x, y):
    """x += y, for the channels of x."""
    for c in range(x.shape[0]):
        for lane in range(LANES):
            x[c, lane] += y[c, lane]


@machine_code
def normalise(x, y):
    """Layer norm without gain and shift."""
    width = x.shape[0]
    share = np.float32(1 / width)
    mean, scale = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    for c in range(width):
        for lane in range(LANES):
            mean[lane] += share * x[c, lane]
    for c in range(width):
        for lane in range(LANES):
            away = x[c, lane] - mean[lane]
            scale[lane] += share * away * away
    for lane in range(LANES):
        scale[lane] = np.float32(1) / np.sqrt(scale[lane] + np.float32(1e-5))
    for c in range(width):
        for lane in range(LANES):
            y[c, lane] = (x[c, lane] - mean[lane]) * scale[lane]


@machine_code
def exponential(x):
    """e^x for x <= 2 without a branch or a call, so that it is done for many at once."""
    x = max(x, np.float32(-80)) * np.float32(1 / 64)
    p = np.float32(1 / 720) * x + np.float32(1 / 120)
    p = p * x + np.float32(1 / 24)
    p = p * x + np.float32(1 / 6)
    p = p * x + np.float32(0.5)
    p = p * x + np.float32(1)
    p = p * x + np.float32(1)
    p = p * p
    p = p * p
    p = p * p
    p = p * p
    p = p * p
    return p * p


@machine_code
def sine_and_cosine(x):
    """sin(pi x) and cos(pi x), from the Taylor series of half the angle within a turn."""
    turn = x - np.float32(2) * np.floor(np.float32(0.5) * x + np.float32(0.5))  # [-1, 1)
    h = turn * np.float32(np.pi / 2)
    u = h * h
    s = np.float32(-1 / 39916800) * u + np.float32(1 / 362880)
    s = s * u + np.float32(-1 / 5040)
    s = s * u + np.float32(1 / 120)
    s = s * u + np.float32(-1 / 6)
    s = (s * u + np.float32(1)) * h
    c = np.float32(1 / 479001600) * u + np.float32(-1 / 3628800)
    c = c * u + np.float32(1 / 40320)
    c = c * u + np.float32(-1 / 720)
    c = c * u + np.float32(1 / 24)
    c = c * u + np.float32(-0.5)
    c = c * u + np.float32(1)
    return np.float32(2) * s * c, np.float32(1) - np.float32(2) * s * s


@machine_code
def tangent(x):
    """tanh(x)."""
    t = exponential(np.float32(-2) * abs(x))
    return np.copysign((np.float32(1) - t) / (np.float32(1) + t), x)


@machine_code
def inverse_sinh(x):
    """asinh(x) = ln(|x| + sqrt(x^2 + 1)) with the sign of x; ln by exponent and mantissa."""
    y = np.abs(x)
    y = y + np.sqrt(y * y + np.float32(1))
    bits = np.float32(y).view(np.int32)
    exponent = np.int32(bits - np.int32(0x3F3504F3)) >> np.int32(23)  # mantissa from sqrt(1/2) on
    mantissa = np.int32(bits - (exponent << np.int32(23))).view(np.float32)
    t = (mantissa - np.float32(1)) / (mantissa + np.float32(1))
    u = t * t
    series = np.float32(1 / 5) + u * (np.float32(1 / 7) + u * np.float32(1 / 9))
    series = np.float32(1) + u * (np.float32(1 / 3) + u * series)
    ln = np.float32(2) * t * series + np.float32(exponent) * np.float32(np.log(2))
    return np.copysign(ln, x)


@machine_code
def largest(x):
    """Of each column of x (k, columns)."""
    top, other = x[0].copy(), np.empty(x.shape[1], np.float32)
    for j in range(1, x.shape[0]):
        for i in range(x.shape[1]):  # not in place, as in `perceptron`
            other[i] = max(top[i], x[j, i])
        top, other = other, top
    return top


@machine_code
def softmax(x):
    """In place, over the rows of x (k, columns)."""
    count, columns = x.shape
    top, total = largest(x), np.zeros(columns, np.float32)
    for j in range(count):
        for i in range(columns):
            x[j, i] = exponential(x[j, i] - top[i])
            total[i] += x[j, i]
    for i in range(columns):
        total[i] = np.float32(1) / total[i]
    for j in range(count):
        for i in range(columns):
            x[j, i] *= total[i]


@machine_code
def attend(x, values, result):
    """Mean of values (k, columns) with the softmax of x (k, columns) as weights -> (columns,)."""
    top, total = largest(x), np.zeros(x.shape[1], np.float32)
    result[:] = 0
    for j in range(x.shape[0]):
        for i in range(x.shape[1]):
            weight = exponential(x[j, i] - top[i])
            total[i] += weight
            result[i] += weight * values[j, i]
    for i in range(x.shape[1]):
        result[i] /= total[i]


@machine_code
def scores(query, tokens, result):
    """query (D, LANES) times each of tokens (k, D, LANES) -> (k, LANES), added to the result."""
    for j in range(tokens.shape[0]):
        for c in range(0, tokens.shape[1], 4):
            for lane in range(LANES):
                result[j, lane] += (
                    query[c, lane] * tokens[j, c, lane]
                    + query[c + 1, lane] * tokens[j, c + 1, lane]
                    + query[c + 2, lane] * tokens[j, c + 2, lane]
                    + query[c + 3, lane] * tokens[j, c + 3, lane]
                )


@machine_code
def weighted(weights, tokens, result):
    """Sum of tokens (k, D, LANES) with weights (k, LANES) -> (D, LANES)."""
    result[:] = 0
    for j in range(tokens.shape[0]):
        for c in range(tokens.shape[1]):
            for lane in range(LANES):
                result[c, lane] += weights[j, lane] * tokens[j, c, lane]


@machine_code
def fourier(ray, code, scale):
    """The query code's inputs: x, then sin and cos of pi x at octaves, as in `FourierCode`.

    ray (2, LANES) in steps -> code (2 + 4 f, LANES); octaves by the double angle.
    """
    octaves = (code.shape[0] - 2) // 4
    for axis in range(2):
        sine, cosine = 2 + axis * octaves, 2 + (2 + axis) * octaves
        for lane in range(LANES):
            x = ray[axis, lane] * scale
            code[axis, lane] = x
            code[sine, lane], code[cosine, lane] = sine_and_cosine(x)
        for f in range(1, octaves):
            for lane in range(LANES):
                s, c = code[sine + f - 1, lane], code[cosine + f - 1, lane]
                code[sine + f, lane] = np.float32(2) * s * c
                code[cosine + f, lane] = np.float32(1) - np.float32(2) * s * s
