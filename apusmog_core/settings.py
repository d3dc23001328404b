# SPDX-License-Identifier: Apache-2.0
"""What a setting is: how it is declared, checked, named and read from YAML."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

LONGEST_FILE = 100_000  # bytes of settings: more is another kind of file
MOST_BRACKETS = 1000  # deep nesting takes YAML time that grows with its square
SHORT = reprlib.Repr()  # values in messages
SHORT.maxstring = SHORT.maxother = 100


def setting(default: Any, help: str, low=None, high=None, choices: tuple = ()) -> Any:
    """A dataclass field that knows what it means and which values are allowed."""
    return field(
        default=default, metadata=dict(help=help, low=low, high=high, choices=tuple(choices))
    )


def group(cls: type) -> Any:
    return field(default_factory=cls)


def override(attribute: str) -> Any:
    """An optional group: None, or a changed copy of what `attribute` of the configuration gives."""
    return field(default=None, metadata={"overrides": attribute})


# --- validation, dotted names, YAML --------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One leaf of a configuration tree, under its dotted name."""

    name: str
    type: type
    default: Any
    help: str
    low: float | None
    high: float | None
    choices: tuple

    def check(self, value: Any) -> Any:
        """The value as this setting's type, or a ValueError that says what is allowed."""
        if self.type is tuple and isinstance(value, list | tuple):
            return tuple(self._element().check(inner) for inner in value)
        if self.type is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < 2**1000 else math.inf
        if not isinstance(value, self.type) or (self.type is int and isinstance(value, bool)):
            shown = SHORT.repr(value)
            raise ValueError(f"{self.name}: {shown} is not of type {self.type.__name__}")
        if self.type is float and not math.isfinite(value):
            raise ValueError(f"{self.name}: {value} is not a finite number")
        if self.low is not None and value < self.low:
            raise ValueError(f"{self.name}: {value} is below the least value, {self.low:g}")
        if self.high is not None and value > self.high:
            raise ValueError(f"{self.name}: {value} is above the greatest value, {self.high:g}")
        if self.choices and value not in self.choices:
            shown = SHORT.repr(value)
            raise ValueError(f"{self.name}: {shown} is not one of {', '.join(self.choices)}")
        return value

    def _element(self) -> Setting:
        """What each value of a tuple must be: of the type of the default's."""
        return dataclasses.replace(self, type=type(self.default[0]))


def settings(config: Any, prefix: str = "") -> Iterator[Setting]:
    """All leaves of a configuration (an instance or a class), depth first, with dotted names."""
    for entry in dataclasses.fields(config):
        name = prefix + entry.name
        if entry.default_factory is not dataclasses.MISSING:
            yield from settings(entry.default_factory(), name + ".")
        elif "help" in entry.metadata:
            m = entry.metadata
            kind = type(entry.default)
            yield Setting(name, kind, entry.default, m["help"], m["low"], m["high"], m["choices"])


def value_of(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def validate(config: Any) -> None:
    for item in settings(config):
        item.check(value_of(config, item.name))


def flatten(config: Any) -> dict[str, Any]:
    """{dotted name: value} of every leaf."""
    return {item.name: value_of(config, item.name) for item in settings(config)}


def with_values(config: T, values: dict[str, Any]) -> T:
    """A copy with dotted names replaced, all at once; ValueError names what is wrong."""
    known = {item.name: item for item in settings(config)}
    for name in values:
        if name not in known:
            raise ValueError(f"unknown setting {SHORT.repr(name)}; known: {', '.join(known)}")
    checked = {name: known[name].check(value) for name, value in values.items()}
    return _replace(config, checked)


def _replace(config: T, values: dict[str, Any]) -> T:
    direct = {name: value for name, value in values.items() if "." not in name}
    for head in {name.split(".")[0] for name in values if "." in name}:
        inner = {n[len(head) + 1 :]: v for n, v in values.items() if n.startswith(head + ".")}
        direct[head] = _replace(getattr(config, head), inner)
    return dataclasses.replace(config, **direct)


def from_dict(cls: type[T], tree: dict[str, Any]) -> T:
    """A configuration from nested dictionaries, as YAML gives them."""
    tree = dict(tree)
    overridden = [f for f in dataclasses.fields(cls) if "overrides" in f.metadata]
    changes = {f: tree.pop(f.name, None) for f in overridden}
    config = with_values(cls(), dict(_dotted(tree)))
    for f, change in changes.items():
        if not isinstance(change, dict | type(None)):
            raise ValueError(f"{f.name}: expected settings, found {SHORT.repr(change)}")
        if change:
            base = getattr(config, f.metadata["overrides"])
            values = dict(_dotted(change))
            config = dataclasses.replace(config, **{f.name: with_values(base, values)})
    return config


def _dotted(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of the leaves of nested dictionaries."""
    for key, value in tree.items():
        if not isinstance(key, str):
            raise ValueError(f"{prefix}{SHORT.repr(key)}: the name of a setting is text")
        if isinstance(value, dict) and value:
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain dictionaries, the inverse of `from_dict`."""
    tree = dataclasses.asdict(config)
    return {k: v for k, v in tree.items() if v is not None}


def load_yaml(cls: type[T], path: str | Path) -> T:
    """A configuration from a YAML file; ValueError names the file and what is wrong in it."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(LONGEST_FILE + 1)
        if len(text) > LONGEST_FILE:
            raise ValueError(f"more than {LONGEST_FILE} bytes are no settings")
        tree = parse_yaml(text.decode()) or {}
        if not isinstance(tree, dict):
            raise ValueError(f"expected settings, found {type(tree).__name__}")
        return from_dict(cls, tree)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def parse_yaml(text: str) -> Any:
    """The plain values of a YAML text without aliases, which could stand for any number of them."""
    import yaml

    if text.count("[") + text.count("{") > MOST_BRACKETS:
        raise ValueError(f"not readable as YAML (more than {MOST_BRACKETS} brackets)")
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ValueError("YAML aliases (*name) are not read; write the values out")
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"not readable as YAML ({error})") from error
    except (TypeError, OverflowError) as error:  # of odd numbers and keys
        raise ValueError(f"not readable as settings ({error})") from error
