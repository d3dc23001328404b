# SPDX-License-Identifier: Apache-2.0
"""The ablation table of the paper: the full model and five ablations of the same budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .shapes import evaluate_shapes
from .tables import Row

if TYPE_CHECKING:
    from ..config import TrainConfig
    from ..data.pugan import Shape

ROWS = 6
FEWEST_STEPS = 500  # where the budget has fewer patches, batches get smaller
SMALLEST_BATCH = 4
TIMED_STEPS = 3
RESERVE = 0.8  # share of the hours that is planned for: machines have other work


def ablation_runs(config: TrainConfig, patches: int) -> dict[str, TrainConfig]:
    """The full model and the five rows of the paper's ablation table, each at the same budget.

    All are scored as in the paper: farthest points of what the patches gave, without the measured
    points and without relaxation.
    """
    batch = min(config.batch, max(SMALLEST_BATCH, patches // FEWEST_STEPS))
    steps = max(1, round(patches / batch))
    folder = Path(config.out) / "ablation"
    network = replace(config.network, choice="farthest")
    config = replace(
        config,
        model=network,
        steps=steps,
        batch=batch,
        warmup=min(config.warmup, steps // 10),
        data=replace(config.data, cache=config.data.cache or str(folder / "cache")),
    )
    runs = {
        "full model": config,
        "uniform sphere": replace(config, model=replace(network, uniform_sphere=True)),
        "N/4 components": replace(config, model=replace(network, component_share=0.25)),
        "no refinement": replace(config, model=replace(network, refinements=0)),
        "no reconstruction": replace(config, lambda_reconstruction=0.0),
        "ACD for upsampling": replace(config, lambda_reconstruction=0.0, loss="acd"),
    }
    return {
        name: replace(run, out=str(folder / name.lower().replace(" ", "_").replace("/", "")))
        for name, run in runs.items()
    }


def affordable_patches(config: TrainConfig, hours: float, shapes: list[Shape]) -> int:
    """Patches for each row, so that training and scoring all of them takes about `hours`."""
    from ..training.loop import LossModule, Processes, Run
    from ..upsampler import Upsampler

    run = ablation_runs(config, SMALLEST_BATCH * FEWEST_STEPS)["full model"]
    with Processes(run.device) as processes:
        timed = Run(run, processes, resume=False, start_from=None)
        forward = LossModule(timed.network, timed.loss, run)
        timed.advance(forward)  # the first one is slow
        start = time.perf_counter()
        for _ in range(TIMED_STEPS):
            timed.advance(forward)
        a_patch = (time.perf_counter() - start) / TIMED_STEPS / run.batch
    start = time.perf_counter()
    evaluate_shapes(shapes[:1], {"timed": Upsampler(timed.network, run.device).upsample})
    scoring = (time.perf_counter() - start) * len(shapes)
    return max(1, int((RESERVE * hours * 3600 / ROWS - scoring) / a_patch))


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
        start = time.perf_counter()
        up = Upsampler.load(train(run), device=run.device, seed=run.seed)
        minutes = (time.perf_counter() - start) / 60
        scored = evaluate_shapes(progress(shapes, "shape"), {name: up.upsample})
        rows.append(scored[-1] | {"patches": run.steps * run.batch, "minutes": round(minutes, 1)})
    return rows
