# SPDX-License-Identifier: Apache-2.0
"""Training: one loop for surface patches and for rays, exact to resume, in one process or many.

What a step computes, both forward passes of it, is in `model/losses.py` and `sensor/losses.py`.
"""

from __future__ import annotations

import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from .. import weights
from ..compute import autocast, keep_allocations, parse_device, parse_precision
from ..config import TrainConfig
from ..model.losses import surface_loss
from ..model.network import ApuSmog, parameter_count
from ..sensor.losses import ray_loss
from ..settings import flatten, to_dict

CHECKPOINT = "checkpoint.pt"


def train(
    config: TrainConfig,
    resume: bool = False,
    start_from: str | None = None,
    source: Source | None = None,
) -> Path:
    """Trains to the end of the schedule and returns the weights file in `config.out`.

    Batches come from `source`, or from the data that the configuration names.
    """
    with Processes(config.device) as processes:
        run = Run(config, processes, resume, start_from, source)
        run.loop()
        return run.finish()


class Processes:
    """This process among those that torchrun started, or alone."""

    def __init__(self, device: str):
        self.rank = int(os.environ.get("RANK", 0))
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        self.device = parse_device(device)
        if self.device.type == "cuda" and self.size > 1:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))

    def __enter__(self) -> Processes:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # NCCL works on the present device
        if self.size > 1:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        return self

    def __exit__(self, *_) -> None:
        if self.size > 1:
            dist.destroy_process_group()


class Run:
    """Everything that a checkpoint holds, and the loop over steps."""

    def __init__(
        self, config: TrainConfig, processes: Processes, resume: bool, start_from, source=None
    ):
        if config.batch % processes.size:
            raise ValueError(
                f"batch {config.batch} is not a multiple of {processes.size} processes"
            )
        keep_allocations()
        seed_everything(config.seed)
        self.config, self.processes = config, processes
        self.network = weights.build_network(config.network).to(processes.device)
        if start_from:
            begin_from(self.network, weights.load_network(start_from), start_from)
        self.average = weights.build_network(config.network).to(processes.device)
        self.average.load_state_dict(self.network.state_dict())
        self.optimiser = torch.optim.AdamW(
            parameter_groups(self.network, config.weight_decay, config.decay_all), lr=config.rate
        )
        self.scaler = torch.amp.GradScaler(enabled=config.precision == "float16")
        self.step, self.seconds = 0, 0.0
        self.waited = 0.0  # seconds, for batches
        self.path = Path(config.out) / CHECKPOINT
        if resume:
            self.load()
        elif self.path.is_file():
            raise ValueError(
                f"{self.path} is of an earlier run: --resume it, change `out`, or remove it"
            )
        source = source or open_source(config)
        self.batches = prepared_batches(source, range(self.step, config.steps), config, processes)
        self.loss = ray_loss if config.network.domain == "sensor" else surface_loss

    def loop(self) -> None:
        from tqdm import tqdm

        forward = LossModule(self.network, self.loss, self.config)
        if self.processes.size > 1:
            forward = nn.parallel.DistributedDataParallel(forward, find_unused_parameters=True)
        quiet = self.processes.rank > 0
        log = None if quiet else open_log(self.config.out)
        begun = saved = time.monotonic()
        before = self.seconds
        bar = tqdm(
            total=self.config.steps, initial=self.step, disable=quiet, unit="step", mininterval=2
        )
        with bar:
            while self.step < self.config.steps:
                parts = self.advance(forward)
                bar.update()
                if self.step % 50 == 0 and not quiet:
                    values = {name: float(value) for name, value in parts.items()}
                    waited = self.waited / (time.monotonic() - begun)
                    told = {n: f"{v:.4g}" for n, v in values.items()}
                    bar.set_postfix(told | {"waiting": f"{waited:.0%}"}, refresh=False)
                    for name, value in values.items():
                        log.add_scalar(f"loss/{name}", value, self.step)
                    log.add_scalar("rate", learning_rate(self.config, self.step), self.step)
                now = time.monotonic()
                self.seconds = before + now - begun
                if now - saved > self.config.checkpoint_seconds:
                    self.save()
                    saved = now
        self.save()

    def advance(self, forward: nn.Module) -> dict[str, Tensor]:
        """One optimiser step; the batch depends on seed and step alone."""
        config, device = self.config, self.processes.device
        begun = time.monotonic()
        batch = next(self.batches)
        self.waited += time.monotonic() - begun
        batch = {n: value.to(device, non_blocking=True) for n, value in batch.items()}
        for g in self.optimiser.param_groups:
            g["lr"] = learning_rate(config, self.step)
        with autocast(device, parse_precision(config.precision)):
            loss, parts = forward(batch)
        self.optimiser.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimiser)
        nn.utils.clip_grad_norm_(self.network.parameters(), config.clip or math.inf)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.step += 1
        self.update_average()
        return parts

    def update_average(self) -> None:
        """Exponential moving average, quick at first so that it does not remember the start."""
        decay = min(self.config.ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            mine, average = list(self.network.parameters()), list(self.average.parameters())
            torch._foreach_lerp_(average, mine, 1 - decay)
            for theirs, own in zip(self.average.buffers(), self.network.buffers(), strict=True):
                theirs.copy_(own)  # statistics of batch norms are averages already

    # --- checkpoints ---

    def save(self) -> None:
        if self.processes.rank:
            return
        state = {
            "model": to_dict(self.config.network),
            "network": self.network.state_dict(),
            "average": self.average.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "scaler": self.scaler.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }
        weights.store(state, self.path)

    def load(self) -> None:
        if not self.path.is_file():
            raise ValueError(f"{self.path}: no checkpoint to resume; train without --resume")
        state = weights.load(self.path)
        try:
            if state.get("model") != to_dict(self.config.network):
                raise ValueError("of another network; change `out`")
            for name in ("network", "average", "optimiser", "scaler"):
                getattr(self, name).load_state_dict(state[name])
            self.step, self.seconds = int(state["step"]), float(state["seconds"])
        except (LookupError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            raise ValueError(f"{self.path}: not a checkpoint of this run ({error})") from error

    def finish(self) -> Path:
        path = Path(self.config.out) / "weights.pt"
        if self.processes.rank == 0:
            weights.save(self.average, path, self.card())
        return path

    def card(self) -> dict[str, Any]:
        """What is to be known of the weights, plain values only."""
        return {
            "preset": self.config.preset,
            "seed": self.config.seed,
            "steps": self.step,
            "patches_seen": self.step * self.config.batch,
            "training_seconds": round(self.seconds),
            "parameters": parameter_count(self.network),
        }


def begin_from(network: ApuSmog, start: ApuSmog, name: str) -> None:
    """Takes over what `start` knows; layers that it lacks begin by changing nothing."""
    mine, its = network.config, start.config
    depth = {n: getattr(mine, n) for n in ("encoder_layers", "decoder_layers")}
    wanted, given = flatten(mine), flatten(replace(its, **depth))
    other = [n for n in wanted if given[n] != wanted[n]]
    other += [n for n, layers in depth.items() if getattr(its, n) > layers]
    if other:
        raise ValueError(f"{name}: a network of another shape than this run's: {', '.join(other)}")
    network.load_state_dict(start.state_dict(), strict=False)
    for part in ("encoder", "decoder"):  # of which the sensor's network has only the second
        for layer in getattr(network, part, [])[len(getattr(start, part, [])) :]:
            layer.change_nothing()


class LossModule(nn.Module):
    """Loss as a module, so that DistributedDataParallel sees the whole step."""

    def __init__(self, network: ApuSmog, loss: Callable, config: TrainConfig):
        super().__init__()
        self.network, self.loss, self.config = network, loss, config

    def forward(self, batch: dict[str, Tensor]):
        return self.loss(self.network, batch, self.config)


def parameter_groups(network: nn.Module, decay: float, decay_all: bool = False) -> list[dict]:
    """Weight decay on matrices only, unless on all."""
    matrices = [p for p in network.parameters() if p.dim() > 1]
    others = [p for p in network.parameters() if p.dim() <= 1]
    rest = decay if decay_all else 0.0
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": rest}]


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine to the end."""
    if step < config.warmup:
        return config.rate * (step + 1) / config.warmup
    share = (step - config.warmup) / max(1, config.steps - config.warmup)
    low = min(config.rate_end, config.rate)
    return low + (config.rate - low) * 0.5 * (1 + math.cos(math.pi * share))


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def open_log(folder: str):
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder)


# --- batches -------------------------------------------------------------------------------------

Source = Callable[[int, int, int], dict[str, Tensor]]  # step, rank, processes -> batch


def prepared_batches(
    source: Source, steps: range, config: TrainConfig, processes: Processes
) -> Iterator[dict[str, Tensor]]:
    """Batches of the steps in order, prepared by other processes while a step runs."""
    workers = config.workers if sys.platform == "linux" else 0  # elsewhere a source cannot be sent
    loader = DataLoader(
        Batches(source, processes.rank, processes.size),
        sampler=steps,
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
        pin_memory=processes.device.type == "cuda",
    )
    yield from loader


class Batches(Dataset):
    """The batch of this process at each step."""

    def __init__(self, source: Source, rank: int, size: int):
        self.source, self.place = source, (rank, size)

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        return self.source(step, *self.place)


def open_source(config: TrainConfig) -> Source:
    data = config.data
    cache = data.cache or str(Path(config.out) / "cache")
    if config.network.domain == "sensor":
        from .probes import prepare

        objects = prepare(data.patches, 1 + config.seed, data.road, cache)
        return lambda *place: ray_batch(objects, config, *place)
    from .patches import open_patches, patch_batch

    patches = open_patches(data, config.seed, cache)
    return lambda *place: patch_batch(patches, config, *place)


def ray_batch(objects, config: TrainConfig, step: int, rank: int, size: int) -> dict[str, Tensor]:
    rng = np.random.default_rng((config.seed, step))
    chosen = rng.integers(len(objects), size=config.batch)
    mine = chosen[rank::size]
    rng = np.random.default_rng((config.seed, step, rank))
    return objects.batch(mine, rng)
