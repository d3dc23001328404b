# SPDX-License-Identifier: Apache-2.0
"""Networks as ONNX files, for clouds of any size and any number of queries for each point."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from . import weights
from .config import ModelConfig
from .files import check_output, written_whole
from .model.network import ApuSmog
from .sensor.network import RayNetwork, hit_probability
from .sensor.view import CONTEXT
from .settings import to_dict

OPSET = 18


class ExportedRays(nn.Module):
    """LiDAR networks: where rays around the points of all objects of a scan end."""

    inputs = {
        "offsets": {0: "n"},
        "neighbours": {0: "n"},
        "context": {0: "n"},
        "cloud": {0: "n"},
        "rays": {0: "a", 1: "s"},
        "anchors": {0: "a"},
    }
    outputs = {"depth": "(a, s)", "log_scale": "(a, s)", "hit": "(a, s)"}

    def __init__(self, network: RayNetwork):
        super().__init__()
        self.network = network

    def forward(
        self,
        offsets: Tensor,
        neighbours: Tensor,
        context: Tensor,
        cloud: Tensor,
        rays: Tensor,
        anchors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """offsets (n, k, 3), neighbours (n, k) and context (n, c) of an `ObjectGraph`, the object
        0.. of each point (n,); rays (a, s, 2) in columns and rings from their anchors (a,), rows
        of the points -> depth in ring steps, ln of its median error, and the chance that the
        ray meets the object, each (a, s). `ray_points` makes points of them."""
        encoded = self.network.encode(offsets, neighbours, context, cloud)
        out = self.network.decode(encoded, rays, anchors)
        return out.depth, out.log_scale, hit_probability(out.log_intensity)


class ExportedSurface(nn.Module):
    """Networks for clouds without a viewpoint: normal noise becomes points on the surface."""

    inputs = {"points": {1: "n"}, "neighbours": {1: "n"}, "noise": {1: "K", 2: "s"}}
    outputs = {"fine": "(1, K * s, 3)"}

    def __init__(self, network: ApuSmog):
        super().__init__()
        self.network = network

    def forward(self, points: Tensor, neighbours: Tensor, noise: Tensor) -> Tensor:
        """points (1, n, 3), neighbours (1, n, k) itself first, noise (1, K, s, 2) of the K
        components, one a point unless configured otherwise -> fine (1, K * s, 3)."""
        return self.network(points, neighbours, noise)[0].fine


def exportable(network: ApuSmog | RayNetwork) -> ExportedSurface | ExportedRays:
    """The network as a function of tensors alone."""
    kind = ExportedRays if network.config.domain == "sensor" else ExportedSurface
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
    check_output(out, weights.find(name))
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
    with written_whole(out) as place:
        program.save(place, external_data=False)


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
    make = _example_rays if config.domain == "sensor" else _example_cloud
    return make(config, points, queries, generator)


def _example_rays(config, points: int, queries: int, generator) -> dict[str, Tensor]:
    """Points of several objects, and rays of half of the points."""
    anchors = torch.arange(0, points, 2)
    own = torch.arange(points)[:, None]
    others = torch.randint(points, (points, config.neighbours - 1), generator=generator)
    return {
        "offsets": torch.randn(points, config.neighbours, 3, generator=generator),
        "neighbours": torch.cat((own, others), dim=1),
        "context": torch.randn(points, CONTEXT, generator=generator),
        "cloud": torch.arange(points) // 30,
        "rays": 2 * torch.rand(len(anchors), queries, 2, generator=generator) - 1,
        "anchors": anchors,
    }


def _example_cloud(config, points: int, queries: int, generator) -> dict[str, Tensor]:
    cloud = torch.rand(1, points, 3, generator=generator)
    apart = torch.cdist(cloud, cloud)
    components = len(range(0, points, max(1, round(1 / config.component_share))))
    return {
        "points": cloud,
        "neighbours": apart.topk(config.neighbours, largest=False).indices,
        "noise": torch.randn(1, components, queries, 2, generator=generator),
    }
