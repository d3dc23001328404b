# SPDX-License-Identifier: Apache-2.0
"""Weights that ship, by name, and weights in files: a configuration and a state, nothing else."""

from __future__ import annotations

import os
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig
from ..files import written_whole
from ..model.network import ApuSmog
from ..sensor.network import RayNetwork
from ..settings import from_dict, to_dict

FOLDER = Path(__file__).parent
SUFFIX = ".pt"
MOST_VALUES = 100_000  # in a file; a checkpoint has some hundreds
PLAIN = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device)


def shipped() -> list[str]:
    """Names that `load_network` knows."""
    return sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}"))


def find(name: str | Path) -> Path:
    """The file behind a shipped name or a path; ValueError says what there is and how to train."""
    for path in (Path(name), FOLDER / f"{name}{SUFFIX}"):
        with suppress(OSError, ValueError):  # too long for a name, or a zero byte in it
            if path.is_file():
                return path
    names = ", ".join(shipped()) or "none"
    raise ValueError(
        f"weights {str(name)[:200]!r}: no such file, and not among the shipped ones ({names}); "
        "train your own with: apusmog train config/train/NAME.yaml"
    )


def read(name: str | Path) -> dict[str, Any]:
    """The stored dictionary: model, state, card."""
    path = find(name)
    stored = load(path)
    wrong = [part for part in ("model", "state") if not isinstance(stored.get(part), dict)]
    if wrong or not isinstance(stored.setdefault("card", {}), dict):
        raise ValueError(f"{path}: not APU-SMOG weights (no {', '.join(wrong) or 'card'} in it)")
    return stored


def build_network(config: ModelConfig) -> ApuSmog | RayNetwork:
    """A network with random weights, of the sensor's sphere or of the paper's."""
    return RayNetwork(config) if config.domain == "sensor" else ApuSmog(config)


def load(path: str | Path) -> dict[str, Any]:
    """A dictionary that `store` wrote: plain values and finite tensors, as many as fit the file.

    Every loader of weights and checkpoints goes through here.
    """
    try:
        size = os.path.getsize(path)
        with zipfile.ZipFile(path) as entries:
            if sum(entry.file_size for entry in entries.infolist()) > size:
                raise ValueError("compressed")  # PyTorch does not: it could expand without end
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged file may fail anywhere in PyTorch's reader
        raise ValueError(f"{path}: not APU-SMOG weights ({type(error).__name__})") from error
    if not isinstance(stored, dict):
        raise ValueError(f"{path}: not APU-SMOG weights ({type(stored).__name__})")
    try:
        _check_content(stored, size)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: not APU-SMOG weights ({error})") from error
    return stored


def _check_content(stored: dict, size: int) -> None:
    """ValueError where there is more than `size` bytes can hold, or what `store` never stores."""
    left, waiting = MOST_VALUES, [("", stored)]
    while waiting:
        name, value = waiting.pop()
        left -= 1
        if left < 0:
            raise ValueError(f"more than {MOST_VALUES} values")
        if isinstance(value, dict):
            if not all(isinstance(key, str | int) for key in value):
                raise ValueError(f"{name[:80]}: a key that is no name")
            waiting += [(str(key), inner) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(name, inner) for inner in value]
        elif isinstance(value, Tensor):
            size -= value.numel() * value.element_size()
            if size < 0:
                raise ValueError("tensors larger than the file")
            if not torch.isfinite(value).all():
                raise ValueError(f"{name[:80]}: weights that are not finite")
        elif not isinstance(value, PLAIN):
            raise ValueError(f"{name[:80]}: {type(value).__name__}")


def load_network(name: str | Path) -> ApuSmog:
    """A network with stored weights, in float32 on the CPU."""
    stored = read(name)
    try:
        config, state = from_dict(ModelConfig, stored["model"]), stored["state"]
        if not all(isinstance(key, str) and isinstance(v, Tensor) for key, v in state.items()):
            raise ValueError("the state is not one of named tensors")
        with torch.device("meta"):  # takes no memory
            expected = sum(v.numel() for v in build_network(config).state_dict().values())
        if expected != sum(v.numel() for v in state.values()):
            raise ValueError(f"the state has not the {expected} values of its model")
        network = build_network(config)
        network.load_state_dict({k: v.float() for k, v in state.items()})
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{find(name)}: weights of another version ({error})") from error
    return network


def save(network: ApuSmog, path: str | Path, card: dict[str, Any], half: bool = True) -> None:
    """Weights and what is to be known of them, written in one step."""
    state = {
        k: v.half() if half and v.is_floating_point() else v
        for k, v in network.state_dict().items()
    }
    store({"model": to_dict(network.config), "state": state, "card": card}, Path(path))


def store(content: dict[str, Any], path: Path) -> None:
    """A file of PyTorch, written in one step: there is the old one, or all of the new."""
    with written_whole(path) as place:
        try:
            torch.save(content, place)
        except RuntimeError as error:  # as PyTorch calls a full disk
            raise OSError(f"{path}: could not be written ({error})") from error
