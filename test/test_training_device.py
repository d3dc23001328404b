# SPDX-License-Identifier: Apache-2.0
"""Training on a GPU: one step there, batches prepared beside it, the right device for NCCL."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from pretended_device import pretended_device

from apusmog_core.compute import PRECISIONS
from apusmog_core.config import PRESETS, DataConfig, TrainConfig
from apusmog_core.sensor.view import CONTEXT, NEIGHBOURS
from apusmog_core.training import loop
from apusmog_core.training.patches import StoredPatches, patch_batch

SMALL = {"width": 16, "encoder_hidden": 16, "decoder_hidden": 16}
LIKE = {"float32": 0.9999, "bfloat16": 0.95, "float16": 0.95}  # cosines of gradients


def ray_batch(step: int, *_) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(step)
    near = np.concatenate((np.arange(30)[:, None], rng.integers(30, size=(30, 8))), axis=1)
    arrays = {
        "offsets": rng.normal(size=(30, len(NEIGHBOURS), 3)).astype(np.float32),
        "neighbours": near,
        "context": rng.normal(size=(30, CONTEXT)).astype(np.float32),
        "cloud": np.arange(30) // 10,
        "probes": rng.uniform(-1, 1, (30, 6, 3)).astype(np.float32),
        "hit": rng.random((30, 6)) < 0.5,
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def setting(preset: str, folder, **rest) -> tuple[TrainConfig, loop.Source]:
    config = TrainConfig(
        model=replace(PRESETS[preset], **SMALL),
        data=DataConfig(points=32, ratios=(2.0,)),
        out=str(folder),
        steps=4,
        batch=2,
        warmup=0,
        **rest,
    )
    if preset == "lidar":
        return config, ray_batch
    clouds = np.random.default_rng(0).random((4, 64, 3))
    patches = StoredPatches(clouds[:, :32], clouds)
    return config, lambda *place: patch_batch(patches, config, *place)


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().cpu().flatten() for tensor in tensors])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_step_on_a_device_changes_every_weight_by_what_the_cpu_finds(
    preset, precision, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    gradients, moved, pinned = {}, {}, []

    def unpinned(*args, pin_memory, **kwargs):
        pinned.append(pin_memory)
        return torch.utils.data.DataLoader(*args, **kwargs)

    monkeypatch.setattr(loop, "DataLoader", unpinned)  # pinned memory needs a driver
    for device in ("cpu", "cuda"):
        config, source = setting(preset, tmp_path, precision=precision, device=device, workers=0)
        with pretended_device() as counted:
            with loop.Processes(device) as processes:
                run = loop.Run(config, processes, False, None, source)
                run.scaler._init_scale = 16.0  # from 65536 it would skip the first steps
                before = flat(run.network.parameters())
                counted.clear()
                run.advance(loop.LossModule(run.network, run.loss, config))
                assert {p.device.type for p in run.network.parameters()} == {device}
                if device == "cuda":
                    assert len(counted.uploads) <= 8  # the batch, and what the scaler sends
                    assert max(counted.downloads, default=0) <= 4  # at most the gradient's norm
                learned = [p.grad for p in run.network.parameters() if p.grad is not None]
                gradients[device] = flat(learned)
                moved[device] = flat(run.network.parameters()) - before
    assert pinned == [False, True]
    alike = torch.cosine_similarity
    assert alike(gradients["cpu"], gradients["cuda"], dim=0) > LIKE[precision]
    # the first step of Adam is little more than the sign of the gradient, which zero has not
    assert alike(moved["cpu"], moved["cuda"], dim=0) > 0.9
    assert moved["cuda"].abs().max() > 0.5 * config.rate


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_in_the_order_of_the_steps_from_other_processes(tmp_path, workers):
    config, _ = setting("lidar", tmp_path, workers=workers)

    def source(step: int, rank: int, size: int) -> dict[str, torch.Tensor]:
        return {"step": torch.tensor(step), "process": torch.tensor(os.getpid())}

    with loop.Processes("cpu") as processes:
        batches = list(loop.prepared_batches(source, range(3, 9), config, processes))
    assert [int(b["step"]) for b in batches] == list(range(3, 9))
    makers = {int(b["process"]) for b in batches}
    assert makers == {os.getpid()} if workers == 0 else os.getpid() not in makers


def test_each_process_has_its_gpu_before_nccl_begins(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(str(device)))
    monkeypatch.setattr(loop.dist, "init_process_group", calls.append)
    monkeypatch.setattr(loop.dist, "destroy_process_group", lambda: None)
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with loop.Processes("auto"):
        assert calls == ["cuda:1", "nccl"]
