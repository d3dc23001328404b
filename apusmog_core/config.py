# SPDX-License-Identifier: Apache-2.0
"""Every setting, as frozen dataclasses: YAML, ROS parameters and command line are views of it."""

from __future__ import annotations

from dataclasses import dataclass

from .compute import PRECISIONS, check_device
from .settings import group, override, setting, validate

# --- the network ---------------------------------------------------------------------------------


HEADS = 4


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of the network; each name is a symbol or a sentence of the paper."""

    domain: str = setting(
        "canonical",
        "sphere that carries the mixture: learned (the paper), or the sensor's own, where a "
        "sample is a viewing ray",
        choices=("canonical", "sensor"),
    )
    width: int = setting(64, "feature size D", low=8, high=1024)
    neighbours: int = setting(16, "k of the point transformer layer", low=1, high=128)
    heads: int = setting(HEADS, "attention heads, where attention is global", low=1, high=32)
    encoder_layers: int = setting(1, "Transformer encoder layers", low=0, high=8)
    decoder_layers: int = setting(2, "Transformer decoder layers", low=1, high=8)
    encoder_hidden: int = setting(64, "hidden size of the encoder's MLP", low=8, high=4096)
    decoder_hidden: int = setting(128, "hidden size of the decoder's MLP", low=8, high=4096)
    attention: str = setting(
        "local",
        "what encoder and decoder attend to: the whole patch, or the anchor's neighbours",
        choices=("global", "local"),
    )
    query_self_attention: bool = setting(False, "queries attend to each other (quadratic in r)")
    output: str = setting(
        "pointing",
        "decoder output: a position (the paper), an offset from the anchor, or attention weights "
        "over the neighbours' coordinates plus a bounded offset",
        choices=("absolute", "anchored", "pointing"),
    )
    frame: str = setting(
        "local",
        "what eq. 1 knows: coordinates in the patch (the paper), or offsets in local spacings, so "
        "that neither the cut of a patch nor its density matters",
        choices=("patch", "local"),
    )
    eta_hidden: int = setting(0, "hidden size of eta, the position code; 0 means D", low=0)
    gamma_hidden: int = setting(0, "hidden size of gamma, the weights of eq. 1; 0 means D", low=0)
    xi_hidden: int = setting(0, "hidden size of xi, the mixture's MLP; 0 means D", low=0)
    mlp_norm: str = setting(
        "none",
        "batch norm in MLPs (released code), or none: outputs depend on their own cloud alone",
        choices=("batch", "none"),
    )
    query_code: str = setting(
        "octaves",
        "Fourier code: random directions and an MLP (released code), or octaves, which is smaller",
        choices=("random", "octaves"),
    )
    covariance: str = setting(
        "tanh",
        "how covariances stay valid: clamped (the paper), or by forms with gradients everywhere",
        choices=("clamp", "tanh", "rotation"),
    )
    spread: float = setting(
        0.0,
        "deviation before training; 0: 1.2 radians (an anchored query goes in all directions), or "
        ".35 grid steps of the sensor",
        low=0.0,
        high=2.0,
    )
    sample_limit: float = setting(
        0.0, "samples stay within this many deviations, as in the released code; 0: anywhere", low=0
    )
    learned_weights: bool = setting(False, "learn the mixture weights (the paper's future work)")
    component_share: float = setting(1.0, "components per input point", low=0.01, high=1.0)
    uniform_sphere: bool = setting(False, "sample the sphere uniformly (FoldingNet-like ablation)")
    frequencies: int = setting(6, "Fourier frequencies of the query code", low=1, high=16)
    refinements: int = setting(1, "passes of the refinement block", low=0, high=4)
    refine_from: str = setting(
        "encoder",
        "features that the refinement sees: the backbone's at the nearest input point (the paper), "
        "or the encoder's at the anchor, which know more and need no search",
        choices=("backbone", "encoder"),
    )
    refine_neighbours: int = setting(
        0, "k of the refinement; 0 means 4r, as in the paper", low=0, high=128
    )
    refine_width: int = setting(0, "feature size of the refinement; 0 means D", low=0, high=1024)
    choice: str = setting(
        "relaxed",
        "how candidates become the output: farthest points of what the patches gave (the paper), "
        "or chosen from three times as many and the input, then relaxed, which is more even",
        choices=("farthest", "relaxed"),
    )

    def __post_init__(self):
        validate(self)
        if self.attention == "local" and self.heads != HEADS:
            raise ValueError(f"heads {self.heads}: attention 'local' has no heads; leave it out")
        if self.attention == "global" and self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.domain == "sensor" and (self.attention, self.output) != ("local", "pointing"):
            raise ValueError("domain 'sensor' needs attention 'local' and output 'pointing'")
        if self.domain == "sensor" and self.component_share != 1:
            raise ValueError("domain 'sensor' needs a component for each point: component_share 1")


PRESETS: dict[str, ModelConfig] = {
    "paper": ModelConfig(  # to the letter; what the others change says why in its line above
        width=128,
        neighbours=32,
        attention="global",
        query_self_attention=True,
        output="absolute",
        frame="patch",
        covariance="clamp",
        refine_from="backbone",
        choice="farthest",
        # of these the paper does not speak; they are the released code's
        eta_hidden=3,
        gamma_hidden=16,
        xi_hidden=64,
        mlp_norm="batch",
        query_code="random",
        spread=0.275,
        sample_limit=2.0,
    ),
    "shape": ModelConfig(
        width=32,
        encoder_layers=3,
        encoder_hidden=32,
        decoder_hidden=64,
        refine_neighbours=8,
        refine_width=16,
    ),
    "lidar": ModelConfig(
        domain="sensor",
        learned_weights=True,
        refinements=0,
        width=16,
        neighbours=9,  # see sensor/view.py
        encoder_layers=0,
        encoder_hidden=32,
        decoder_hidden=32,
        decoder_layers=1,
    ),
}


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
    max: float = setting(75.0, "farthest range of an object point, metres", low=0.1, high=1000.0)


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


@dataclass(frozen=True)
class ClusterConfig:
    tolerance: float = setting(0.5, "points closer than this join, metres", low=0.02, high=10.0)
    adaptive: float = setting(
        0.01, "added to the tolerance for each metre of range, metres", low=0.0, high=0.1
    )
    min_points: int = setting(
        16,
        "fewest points of an object; far ones may have fewer where rings are known",
        low=1,
        high=100_000,
    )
    max_points: int = setting(6000, "most points of an instance", low=1, high=10_000_000)
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
        0.0, "new points below are left out; 0: the exact count", low=0.0, high=1.0
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
