# SPDX-License-Identifier: Apache-2.0
"""The networks: sizes and switches, and those that have a name."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..settings import setting, validate

HEADS = 4
# What the network of the sensor's sphere reads; in all else it has no choice. Its nine neighbours
# are the places that `sensor/view.py` looks at.
SENSOR_READS = (
    "width",
    "encoder_hidden",
    "decoder_layers",
    "decoder_hidden",
    "query_self_attention",
    "xi_hidden",
    "covariance",
    "spread",
    "learned_weights",
    "frequencies",
)
SENSOR_HAS = {"domain": "sensor", "neighbours": 9, "encoder_layers": 0, "refinements": 0}


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
        if self.domain == "sensor":
            for entry in fields(self):
                only, value = SENSOR_HAS.get(entry.name, entry.default), getattr(self, entry.name)
                if entry.name not in SENSOR_READS and value != only:
                    raise ValueError(f"domain 'sensor' needs {entry.name} {only!r}, not {value!r}")


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
        **SENSOR_HAS,
        learned_weights=True,
        width=16,
        encoder_hidden=32,
        decoder_hidden=32,
        decoder_layers=1,
    ),
}
