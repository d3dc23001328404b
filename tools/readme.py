# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.readme` writes the table of the node's parameters into README.md."""

from __future__ import annotations

from pathlib import Path

from apusmog_core.config import NodeConfig
from apusmog_core.settings import Setting, settings

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- parameters -->\n", "<!-- /parameters -->\n"


def table() -> str:
    """Every parameter of the node as a Markdown table."""
    rows = [
        f"| `{item.name}` | `{_shown(item.default)}` | {_allowed(item)} | {item.help} |"
        for item in settings(NodeConfig)
    ]
    return "\n".join(["| name | default | allowed | meaning |", "|---|---|---|---|", *rows, ""])


def with_table(text: str) -> str:
    """The text with the present table between the two markers."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{README}: no {BEGIN.strip()} before {END.strip()}")
    return before + BEGIN + table() + END + after


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
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
