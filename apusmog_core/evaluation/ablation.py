# SPDX-License-Identifier: Apache-2.0
"""The ablation table of the paper: five rows, each trained with the same budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .shapes import evaluate_shapes
from .tables import Row

if TYPE_CHECKING:
    from ..config import TrainConfig
    from ..data.pugan import Shape


# --- ablation ------------------------------------------------------------------------------------


def ablation_runs(config: TrainConfig, patches: int) -> dict[str, TrainConfig]:
    """The full model and the five rows of the paper's ablation table, each at the same budget."""
    steps = max(1, round(patches / config.batch))
    config = replace(config, steps=steps, warmup=min(config.warmup, steps // 10))
    network = config.network
    runs = {
        "full model": config,
        "uniform sphere": replace(config, model=replace(network, uniform_sphere=True)),
        "N/4 components": replace(config, model=replace(network, component_share=0.25)),
        "no refinement": replace(config, model=replace(network, refinements=0)),
        "no reconstruction": replace(config, lambda_reconstruction=0.0),
        "ACD for upsampling": replace(config, lambda_reconstruction=0.0, loss="acd"),
    }
    folder = Path(config.out) / "ablation"
    return {
        name: replace(run, out=str(folder / name.lower().replace(" ", "_").replace("/", "")))
        for name, run in runs.items()
    }


def evaluate_ablation(
    config: TrainConfig,
    patches: int,
    shapes: list[Shape],
    progress: Callable[[Iterable, str], Iterable] = lambda items, unit: items,
) -> list[Row]:
    """Train every run of the ablation and score it on the shapes at ratio 4: one mean row each."""
    from ..training.loop import train
    from ..upsampler import Upsampler

    rows = []
    for name, run in ablation_runs(config, patches).items():
        up = Upsampler.load(train(run), device=run.device, seed=run.seed)
        scored = evaluate_shapes(progress(shapes, "shape"), {name: up.upsample})
        rows.append(scored[-1] | {"patches": run.steps * run.batch})
    return rows
