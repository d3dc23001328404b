# SPDX-License-Identifier: Apache-2.0
"""Weights, settings and names that somebody else wrote: refused by name, or harmless."""

import zipfile

import numpy as np
import pytest
import torch

from apusmog_core import cli, weights
from apusmog_core.config import PipelineConfig, TrainConfig
from apusmog_core.settings import load_yaml
from apusmog_core.show.page import Moment, write_page
from apusmog_core.surface.denoise import WEIGHTS as DENOISER
from apusmog_core.surface.denoise import load_denoiser

# --- weights --------------------------------------------------------------------------------------

LIDAR = torch.load(weights.find("lidar"), weights_only=True)
FIRST = next(iter(LIDAR["state"]))


def first_tensor(tensor) -> dict:
    return {"state": {**LIDAR["state"], FIRST: tensor}}


def laughs() -> dict:
    value = ["ha"] * 10
    for _ in range(9):
        value = [value] * 10
    return {"card": {"note": value}}


WEIGHTS = {
    "nan": first_tensor(LIDAR["state"][FIRST] * float("nan")),
    "infinite": first_tensor(LIDAR["state"][FIRST] + float("inf")),
    "no tensor": first_tensor(3),
    "expanded": first_tensor(torch.ones(1).expand(10**12)),
    "no state": {"state": [1]},
    "keys": {"state": {3: torch.ones(2)}},
    "no model": {"model": 3},
    "model keys": {"model": {3: 4}},
    "huge model": {"model": {**LIDAR["model"], "width": 1024, "decoder_hidden": 4096}},
    "no card": {"card": [3]},
    "endless card": laughs(),
}


@pytest.mark.parametrize("change", WEIGHTS)
def test_weights_that_no_network_can_have_are_refused(change, tmp_path):
    torch.save({**LIDAR, **WEIGHTS[change]}, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match="bad.pt: "):
        weights.load_network(tmp_path / "bad.pt")


def test_a_denoiser_with_weights_that_are_not_finite_is_refused(tmp_path):
    stored = weights.load(DENOISER)
    name = next(iter(stored["state"]))
    stored["state"][name] = stored["state"][name] * float("nan")
    torch.save(stored, tmp_path / "bad.pth")
    with pytest.raises(ValueError, match="bad.pth"):
        load_denoiser(tmp_path / "bad.pth")


def test_compressed_weights_are_refused_before_they_expand(tmp_path):
    torch.save({**LIDAR, "state": {"zeros": torch.zeros(10**6)}}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    with pytest.raises(ValueError, match="bomb.pt: not APU-SMOG weights"):
        weights.load_network(tmp_path / "bomb.pt")


def test_a_card_cannot_steer_the_terminal(tmp_path, capsys):
    torch.save({**LIDAR, "card": {"a\x1b[2J": "\x1b]0;title\x07\r\n"}}, tmp_path / "odd.pt")
    assert cli.main(["info", str(tmp_path / "odd.pt")]) == 0
    said = capsys.readouterr().out
    assert "\\x1b]0;title\\x07\\r\\n" in said and "\x1b" not in said


# --- settings and pages ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("a: &a [1]\nb: *a\n", "aliases"),
        ("[" * 50_000, "YAML"),
        ("3: 4\n", "3: the name of a setting is text"),
        ("model: 3\n", "model: expected settings"),
        ("model: {3: 4}\n", "3: the name"),
        ("steps: {}\n", "steps: {} is not of type int"),
        ("steps: 2001-99-99\n", "month"),
        ("rate: 0x" + "f" * 3000, "rate: inf is not a finite number"),
        ("data: {ratios: [a]}\n", "'a' is not of type float"),
        ("data: {ratios: []}\n", "are not ratios above zero"),
        ("# " + "x" * 200_000, "more than 100000 bytes"),
        ("\xff", "utf-8"),
    ],
)
def test_settings_that_cannot_be_are_an_error_that_names_the_file(text, complaint, tmp_path):
    (tmp_path / "run.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=f"run.yaml: .*{complaint}"):
        load_yaml(TrainConfig, tmp_path / "run.yaml")


@pytest.mark.parametrize("of", ["points", "height"])
def test_settings_that_contradict_each_other_are_refused(of):
    from apusmog_core.settings import with_values

    values = {f"cluster.min_{of}": 50, f"cluster.max_{of}": 10}
    with pytest.raises(ValueError, match=f"cluster.min_{of} 50.* must not be above cluster.max_"):
        with_values(PipelineConfig(), values)


def test_a_page_holds_any_name_and_any_coordinate(tmp_path):
    name = "</script><!--<script>\udcff\u2028"
    far = np.array([[-3e38, 0, 0], [3e38, 0, 0], [0, 1, 2]], np.float32)
    text = write_page([Moment(name, far)], tmp_path / "page.html").read_text("utf-8")
    data = text.split('type="application/json">')[1].split("</script>")[0]
    assert "<" not in data and "NaN" not in data and "Infinity" not in data
    import json

    assert json.loads(data)["moments"][0]["name"] == name
