# SPDX-License-Identifier: Apache-2.0
"""Networks as ONNX files, for clouds of any size and any number of queries for each point."""

from __future__ import annotations

import json
import logging
import os
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from . import weights
from .config import ModelConfig
from .model import ApuSmog
from .settings import to_dict

OPSET = 18


class RayNetwork(nn.Module):
    """LiDAR networks: where rays around the points end, all in steps of the sensor's grid."""

    inputs = {
        "points": {1: "n"},
        "neighbours": {1: "n"},
        "context": {1: "n"},
        "rays": {1: "n", 2: "s"},
    }
    outputs = {"coarse": "(1, n * s, 3)", "hit": "(1, n * s)", "log_scale": "(1, n * s)"}

    def __init__(self, network: ApuSmog):
        super().__init__()
        self.network = network

    def forward(
        self, points: Tensor, neighbours: Tensor, context: Tensor, rays: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """points (1, n, 3), neighbours (1, n, k) itself first, context (1, n, 2) of `grid_context`,
        rays (1, n, s, 2) from each point -> coarse (1, n * s, 3), hit and log_scale (1, n * s)."""
        out = self.network.decode(self.network.encode(points, neighbours, context), rays)
        return out.coarse, out.hit, out.log_scale


class SurfaceNetwork(nn.Module):
    """Networks for clouds seen from nowhere: normal noise becomes points on the surface."""

    inputs = {"points": {1: "n"}, "neighbours": {1: "n"}, "noise": {1: "K", 2: "s"}}
    outputs = {"fine": "(1, K * s, 3)"}

    def __init__(self, network: ApuSmog):
        super().__init__()
        self.network = network

    def forward(self, points: Tensor, neighbours: Tensor, noise: Tensor) -> Tensor:
        """points (1, n, 3), neighbours (1, n, k) itself first, noise (1, K, s, 2) of the K
        components, one a point unless configured otherwise -> fine (1, K * s, 3)."""
        return self.network(points, neighbours, noise)[0].fine


def exportable(network: ApuSmog) -> RayNetwork | SurfaceNetwork:
    """The network as a function of tensors alone."""
    kind = RayNetwork if network.config.domain == "sensor" else SurfaceNetwork
    return kind(network).eval().requires_grad_(False)


def export_onnx(name: str | Path, out: str | Path) -> None:
    """Write the weights, by shipped name or from a file, as one ONNX file.

    Its metadata hold the model's configuration (`config`, JSON) and the weights' card (`card`).
    The refinement searches its neighbours by all distances, so memory grows with the square of
    the output points: cut large clouds into patches. Where two of them are equally far to the last
    digit, ONNX Runtime may choose the other one, and that point moves by a little.
    """
    import onnxscript  # noqa: F401  torch.onnx needs it, and says so in many lines

    out = Path(out)
    if out.suffix != ".onnx":
        raise ValueError(f"{out}: ONNX files end in .onnx")
    stored = weights.read(name)
    module = exportable(weights.load_network(name))
    config = module.network.config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program = torch.onnx.export(
            module,
            kwargs=example_inputs(config, points=64, queries=3),
            input_names=list(module.inputs),
            output_names=list(module.outputs),
            dynamic_shapes=module.inputs,
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    program.model.doc_string = module.forward.__doc__
    program.model.metadata_props.update(
        config=json.dumps(to_dict(config)), card=json.dumps(stored.get("card", {}))
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    program.save(partial, external_data=False)
    os.replace(partial, out)


def describe_ports(name: str | Path) -> str:
    """Names and shapes of a network's inputs and outputs in the ONNX file."""
    module = exportable(weights.load_network(name))
    config = module.network.config
    lines = ["  inputs"]
    for port, value in example_inputs(config, points=64, queries=3).items():
        free = module.inputs[port]
        shape = ", ".join(free.get(axis, str(size)) for axis, size in enumerate(value.shape))
        lines.append(f"    {port:12}({shape}) {str(value.dtype).removeprefix('torch.')}")
    lines += ["  outputs", *(f"    {port:12}{shape}" for port, shape in module.outputs.items())]
    each = "rays of each" if config.domain == "sensor" else "samples of each of K components"
    return "\n".join([*lines, f"  n points, s {each}"])


def example_inputs(config: ModelConfig, points: int, queries: int) -> dict[str, Tensor]:
    """Random inputs by name, to trace a network with."""
    generator = torch.Generator().manual_seed(points)
    cloud = torch.rand(1, points, 3, generator=generator)
    apart = torch.cdist(cloud, cloud)
    inputs = {"points": cloud, "neighbours": apart.topk(config.neighbours, largest=False).indices}
    if config.domain == "sensor":
        inputs["context"] = torch.zeros(1, points, 2)
        inputs["rays"] = torch.rand(1, points, queries, 2, generator=generator) - 0.5
    else:
        components = len(range(0, points, max(1, round(1 / config.component_share))))
        inputs["noise"] = torch.randn(1, components, queries, 2, generator=generator)
    return inputs
