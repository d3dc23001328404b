# SPDX-License-Identifier: Apache-2.0
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from apusmog_core import cli, export, weights
from apusmog_core.config import PRESETS, ModelConfig
from apusmog_core.settings import from_dict

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

PORTS = {
    "sensor": "offsets neighbours context cloud rays anchors depth log_scale hit".split(),
    "canonical": ["points", "neighbours", "noise", "fine"],
}
SIZES = [(40, 4), (90, 1), (150, 7)]  # points and queries, none of them those of the trace


def shaken(config: ModelConfig, path):
    """A network whose weights are all at work; untrained, its last layers are zero."""
    torch.manual_seed(0)
    network = weights.build_network(config)
    with torch.no_grad():
        for p in network.parameters():
            p += 0.1 * torch.randn_like(p)
    weights.save(network, path, {"note": "shaken"}, half=False)
    return network


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(PRESETS["lidar"], id="lidar"),
        pytest.param(replace(PRESETS["shape"], width=32, decoder_layers=1), id="shape"),
    ],
)
def test_onnx_runtime_gives_the_same_points_for_any_size_and_query_count(config, tmp_path, capsys):
    network = shaken(config, tmp_path / "weights.pt")
    out = tmp_path / "deep" / "network.onnx"
    assert cli.main(["export", str(tmp_path / "weights.pt"), "--onnx", str(out)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{out}: written\n  inputs\n")
    assert [file.name for file in out.parent.iterdir()] == ["network.onnx"]
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    module = export.exportable(network)
    assert [i.name for i in session.get_inputs()] == list(module.inputs)
    ports = PORTS[config.domain]
    assert re.findall(r"^    (\w+) +\(", said, re.M) == ports == [*module.inputs, *module.outputs]
    for points, queries in SIZES:
        inputs = export.example_inputs(config, points, queries)
        expected = module(**inputs)
        expected = expected if isinstance(expected, tuple) else (expected,)
        found = session.run(list(module.outputs), {k: v.numpy() for k, v in inputs.items()})
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_allclose(b, a.numpy(), atol=1e-4)
    stored = session.get_modelmeta().custom_metadata_map
    assert from_dict(ModelConfig, json.loads(stored["config"])) == config
    assert json.loads(stored["card"]) == {"note": "shaken"}


def test_a_file_that_is_not_onnx_by_name_is_refused(tmp_path, capsys):
    shaken(PRESETS["lidar"], tmp_path / "weights.pt")
    assert cli.main(["export", str(tmp_path / "weights.pt"), "--onnx", str(tmp_path / "a.pt")]) == 2
    assert "a.pt: ONNX files end in .onnx" in capsys.readouterr().err
