# SPDX-License-Identifier: Apache-2.0
"""Text from files and messages, as a terminal or a log may show it."""

from __future__ import annotations

LONGEST = 300  # characters of a line in a log


def printable(text: str) -> str:
    """The text with control characters, and what no terminal can show, as escapes."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def log_line(text: str) -> str:
    """One printable line that is not too long."""
    return printable(text if len(text) <= LONGEST else text[:LONGEST] + " ...")
