# SPDX-License-Identifier: Apache-2.0
"""Weights that ship, by name, and weights in files: a configuration and a state, nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ..config import ModelConfig
from ..model import ApuSmog
from ..sensor.network import RayNetwork
from ..settings import from_dict, to_dict

FOLDER = Path(__file__).parent
SUFFIX = ".pt"


def shipped() -> list[str]:
    """Names that `load_network` knows."""
    return sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}"))


def find(name: str | Path) -> Path:
    """The file behind a shipped name or a path; ValueError says what there is and how to train."""
    for path in (Path(name), FOLDER / f"{name}{SUFFIX}"):
        if path.is_file():
            return path
    names = ", ".join(shipped()) or "none"
    raise ValueError(
        f"weights {str(name)!r}: no such file, and not among the shipped ones ({names}); "
        "train your own with: apusmog train config/train/NAME.yaml"
    )


def read(name: str | Path) -> dict[str, Any]:
    """The stored dictionary: model, state, card."""
    path = find(name)
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        stored["model"], stored["state"]
    except Exception as error:
        raise ValueError(f"{path}: not APU-SMOG weights ({type(error).__name__})") from error
    return stored


def build_network(config: ModelConfig) -> ApuSmog | RayNetwork:
    """A network with random weights, of the sensor's sphere or of the paper's."""
    return RayNetwork(config) if config.domain == "sensor" else ApuSmog(config)


def load_network(name: str | Path) -> ApuSmog:
    """A network with stored weights, in float32 on the CPU."""
    stored = read(name)
    try:
        network = build_network(from_dict(ModelConfig, stored["model"]))
        network.load_state_dict({k: v.float() for k, v in stored["state"].items()})
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{find(name)}: weights of another version ({error})") from error
    return network


def save(network: ApuSmog, path: str | Path, card: dict[str, Any], half: bool = True) -> None:
    """Weights and what is to be known of them, written in one step."""
    state = {k: v.half() if half else v for k, v in network.state_dict().items()}
    store({"model": to_dict(network.config), "state": state, "card": card}, Path(path))


def store(content: dict[str, Any], path: Path) -> None:
    """A file of PyTorch, written in one step: there is the old one, or all of the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    torch.save(content, partial)
    os.replace(partial, path)
