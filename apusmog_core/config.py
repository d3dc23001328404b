# SPDX-License-Identifier: Apache-2.0
"""Every setting, as frozen dataclasses: YAML, ROS parameters and command line follow."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from .compute import PRECISIONS, check_device
from .model.presets import PRESETS, ModelConfig
from .settings import group, override, setting, validate

# --- training ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataConfig:
    """Where patches come from and how they are varied."""

    meshes: str = setting("", "folder of meshes for surface patches")
    hdf5: str = setting("", "PU1K or PU-GAN training file, as published")
    road: str = setting("", "folder of road meshes for the LiDAR simulator; empty: built-in shapes")
    cache: str = setting("", "folder for prepared patches; empty: beside the checkpoints")
    patches: int = setting(20000, "patches to prepare", low=1)
    points: int = setting(256, "input points of a surface patch", low=4, high=4096)
    ratios: tuple[float, ...] = setting((4.0,), "ratios to draw from, one for each step")
    target_factor: float = setting(
        1.0, "target points for each output point; 1 is the paper's", low=0.1, high=16.0
    )
    jitter: float = setting(
        0.0, "largest deviation of input noise: patch radii, or metres of range", low=0.0
    )
    jitter_chance: float = setting(0.5, "chance of noise on a surface patch", low=0.0, high=1.0)
    rotation: float = setting(1.0, "chance of turning a surface patch", low=0.0, high=1.0)
    mirror: float = setting(0.5, "chance of mirroring a surface patch", low=0.0, high=1.0)
    thinning: float = setting(0.0, "chance of thinning a patch unevenly", low=0.0, high=1.0)


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    preset: str = setting("shape", "network preset", choices=tuple(PRESETS))
    model: ModelConfig | None = override("network")  # changes of the preset
    data: DataConfig = group(DataConfig)
    out: str = setting("runs/shape", "folder for checkpoints and logs")
    steps: int = setting(100_000, "optimiser steps", low=1)
    batch: int = setting(64, "patches a step, over all processes", low=1)
    rate: float = setting(5e-4, "peak learning rate", low=0.0)
    rate_end: float = setting(1e-6, "learning rate at the end of the cosine", low=0.0)
    warmup: int = setting(500, "steps of linear warm-up", low=0)
    weight_decay: float = setting(0.1, "AdamW weight decay", low=0.0)
    decay_all: bool = setting(
        False, "decay biases and norms, too, as the released code; ours decay matrices alone"
    )
    clip: float = setting(0.1, "largest gradient norm", low=0.0)
    ema: float = setting(0.999, "decay of the averaged weights; 0 turns it off", low=0.0, high=1.0)
    loss: str = setting(
        "projection",
        "upsampling loss; interior: projection and coverage, away from the patch's border",
        choices=("projection", "acd", "chamfer", "interior"),
    )
    interior: float = setting(0.7, "share of a patch's radius that `interior` looks at", low=0.1)
    lambda_coarse: float = setting(0.01, "weight of the coarse loss (lambda 1)", low=0.0)
    lambda_fine: float = setting(0.01, "weight of the refined loss (lambda 2)", low=0.0)
    lambda_reconstruction: float = setting(1.0, "weight of the reconstruction (lambda 3)", low=0.0)
    lambda_drift: float = setting(
        0.0, "weight of the mean move of all outputs from their anchors, squared", low=0.0
    )
    projection_alpha: float = setting(1e3, "sharpness of the projection weights", low=0.0)
    projection_neighbours: int = setting(4, "neighbours in the projection", low=1)
    precision: str = setting("float32", "autocast type", choices=PRECISIONS)
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    workers: int = setting(
        1, "processes that prepare batches beside the step; 0: the step waits", low=0, high=64
    )
    seed: int = setting(0, "seed of everything random", low=0)
    checkpoint_seconds: float = setting(240.0, "seconds between checkpoints", low=1.0)

    def __post_init__(self):
        validate(self)
        if not self.data.ratios or min(self.data.ratios) <= 0:
            raise ValueError(f"data.ratios: {self.data.ratios} are not ratios above zero")

    @property
    def network(self) -> ModelConfig:
        return self.model or PRESETS[self.preset]


# --- one scan ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RangeConfig:
    min: float = setting(1.5, "nearest range of an object point, metres", low=0.0, high=1000.0)
    max: float = setting(200.0, "farthest range of an object point, metres", low=0.1, high=1000.0)


@dataclass(frozen=True)
class GroundConfig:
    method: str = setting(
        "auto",
        "how ground is found; auto: along the rings where known, else patchwork or grid",
        choices=("auto", "patchwork", "grid", "none"),
    )
    sensor_height: float = setting(
        0.0,
        "sensor above ground, metres; 0: height, roll and pitch are estimated",
        low=0.0,
        high=20.0,
    )
    roll: float = setting(
        0.0, "mounting roll, degrees, if sensor_height is set", low=-180.0, high=180.0
    )
    pitch: float = setting(
        0.0, "mounting pitch, degrees, if sensor_height is set", low=-90.0, high=90.0
    )
    cell: float = setting(0.5, "cell of the grid method, metres", low=0.05, high=10.0)
    thickness: float = setting(0.12, "points this close above ground are ground", low=0.0, high=2.0)

    def __post_init__(self):
        if self.method == "patchwork" and not importlib.util.find_spec("pypatchworkpp"):
            raise ValueError(
                "ground.method patchwork needs pip install pypatchworkpp; or choose auto or grid"
            )


@dataclass(frozen=True)
class ClusterConfig:
    tolerance: float = setting(0.5, "points closer than this join, metres", low=0.02, high=10.0)
    adaptive: float = setting(
        0.01, "added to the tolerance for each metre of range, metres", low=0.0, high=0.1
    )
    min_points: int = setting(
        16,
        "fewest points of an object; far ones may have fewer",
        low=1,
        high=100_000,
    )
    max_points: int = setting(20_000, "most points of an instance", low=1, high=10_000_000)
    min_height: float = setting(0.2, "least height, metres", low=0.0, high=50.0)
    max_height: float = setting(6.0, "greatest height, metres", low=0.1, high=100.0)
    max_extent: float = setting(15.0, "greatest horizontal extent, metres", low=0.1, high=500.0)
    large: str = setting(
        "pass", "what exceeds the limits is passed untouched, or split", choices=("pass", "split")
    )


@dataclass(frozen=True)
class PipelineConfig:
    """How one scan becomes a dense scan."""

    ratio: float = setting(4.0, "output points for each measured point", low=1e-3, high=256.0)
    density: float = setting(
        0.0,
        "aim at this many points per square metre, at most `ratio`; 0: the ratio for all",
        low=0.0,
        high=1e6,
    )
    min_confidence: float = setting(
        0.0,
        "new points below are left out, and those that only fill up the count; 0: the exact count",
        low=0.0,
        high=1.0,
    )
    spread: str = setting(
        "rings",
        "where new points go: on whole rings of a denser sensor, or as far apart across as along",
        choices=("rings", "even"),
    )
    calibrate: bool = setting(
        True, "learn the range bias of each laser from the scans; measured points stay as they are"
    )
    weights: str = setting("lidar", "a shipped name or a file")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    precision: str = setting("float32", "arithmetic of the network", choices=PRECISIONS)
    keep_measured: bool = setting(True, "measured points are part of the output, first")
    max_points_out: int = setting(
        500_000,
        "most points in the dense cloud; measured ones are thinned to it; 0: no limit",
        low=0,
        high=100_000_000,
    )
    time_budget_ms: float = setting(
        0.0, "most milliseconds for the network a scan; 0: no limit", low=0.0, high=60_000.0
    )
    seed: int = setting(0, "seed of the samples", low=0, high=2**31 - 1)
    range: RangeConfig = group(RangeConfig)
    ground: GroundConfig = group(GroundConfig)
    cluster: ClusterConfig = group(ClusterConfig)

    def __post_init__(self):
        validate(self)
        if self.range.min >= self.range.max:
            raise ValueError(f"range.min {self.range.min} must be below range.max {self.range.max}")
        for of in ("points", "height"):
            low, high = (getattr(self.cluster, f"{end}_{of}") for end in ("min", "max"))
            if low > high:
                raise ValueError(
                    f"cluster.min_{of} {low} must not be above cluster.max_{of} {high}"
                )
        check_device(self.device)


@dataclass(frozen=True)
class QosConfig:
    input_reliability: str = setting(
        "auto",
        "reliability asked of the sensor; auto is reliable if all its publishers offer that",
        choices=("auto", "best_effort", "reliable"),
    )
    output_reliability: str = setting(
        "reliable", "reliability offered to subscribers", choices=("best_effort", "reliable")
    )
    input_depth: int = setting(
        20, "scans that wait while the node is busy; the newest is worked on", low=1, high=1000
    )
    depth: int = setting(5, "queue depth of the outputs", low=1, high=1000)


@dataclass(frozen=True)
class DiagnosticsConfig:
    warn_age_ms: float = setting(200.0, "WARN when the median output is older", low=0.0, high=1e6)
    error_age_ms: float = setting(1000.0, "ERROR when the median is older", low=0.0, high=1e6)
    warn_dropped: float = setting(
        0.2, "WARN when a larger share of the scans is dropped", low=0.0, high=1.0
    )
    warn_lost: float = setting(
        0.05, "WARN when a larger share of the scans is lost on the way here", low=0.0, high=1.0
    )
    warn_silence: float = setting(
        2.0, "WARN when no scan has come for longer, seconds", low=0.0, high=3600.0
    )


@dataclass(frozen=True)
class NodeConfig(PipelineConfig):
    """The pipeline's settings and what only the node has."""

    fields: str = setting(
        "all",
        "fields of the output: all of the input's, instance, generated and confidence; or only "
        "x, y, z, intensity, instance and generated",
        choices=("all", "minimal"),
    )
    target_frame: str = setting("", "frame of the output; empty: the input's")
    transform_patience: float = setting(
        0.5, "longest wait for a transform to target_frame, seconds", low=0.0, high=10.0
    )
    qos: QosConfig = group(QosConfig)
    diagnostics: DiagnosticsConfig = group(DiagnosticsConfig)


@dataclass(frozen=True)
class ReplayConfig:
    """How recorded scans are played to a topic."""

    path: str = setting("", "a rosbag2, a ROS 1 bag, a KITTI folder or other scans")
    bag_topic: str = setting("", "topic in the bag; empty: the one with most clouds")
    frame: str = setting("velo_link", "frame of scans whose files do not tell it")
    rate: float = setting(1.0, "speed; 2 is twice as fast as recorded", low=0.01, high=1000.0)
    loop: bool = setting(False, "start again at the end")
    start: float = setting(0.0, "seconds to skip at the beginning", low=0.0, high=1e9)
    paused: bool = setting(False, "hold; set to false to go on")
    stamps: str = setting("original", "stamps of the scans", choices=("original", "now"))
    clock: bool = setting(False, "publish recorded time on /clock")
    wait: bool = setting(False, "hold until somebody subscribes")

    def __post_init__(self):
        validate(self)
