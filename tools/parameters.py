# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.parameters` writes docs/parameters.md: every parameter of the two nodes."""

from __future__ import annotations

from pathlib import Path

from apusmog_core.config import NodeConfig, ReplayConfig
from apusmog_core.settings import Setting, settings

PAGE = Path(__file__).parents[1] / "docs" / "parameters.md"

TEXT = """# Parameters

`python -m tools.parameters` writes this page from the dataclasses in
[config.py](../apusmog_core/config.py). Do not edit it.

- In ROS, `ros2 param set` changes one, [config/upsample.yaml](../config/upsample.yaml) sets all. A
  change takes effect with the next scan. A bad value is refused with the reason; nothing changes.
- The parameters of `qos` are fixed when the node starts.
- A change of `weights`, `device` or `precision` loads a network in the background. The old one runs
  until then.
- Without ROS, all but `fields`, `target_frame`, `transform_patience`, `qos` and `diagnostics` are
  settings of `apusmog scan` and `apusmog view` (`--set cluster.min_points=8`) and of
  `PipelineConfig`.

## Node `upsampler`

{upsampler}
## Node `replay`

{replay}"""


def page() -> str:
    """The whole page as Markdown."""
    return TEXT.format(upsampler=table(NodeConfig), replay=table(ReplayConfig))


def table(config: type) -> str:
    """Every setting of a dataclass as a Markdown table."""
    rows = [
        f"| `{item.name}` | `{_shown(item.default)}` | {_allowed(item)} | {item.help} |"
        for item in settings(config)
    ]
    return "\n".join(["| name | default | allowed | meaning |", "|---|---|---|---|", *rows, ""])


def _shown(value: object) -> str:
    """As it is written in YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    return "''" if value == "" else str(value)


def _allowed(item: Setting) -> str:
    if item.choices:
        return ", ".join(f"`{choice}`" for choice in item.choices)
    if item.type is bool:
        return "`true`, `false`"
    return "" if item.low is None else f"{item.low:,.10g} to {item.high:,.10g}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
