# SPDX-License-Identifier: Apache-2.0
"""Configuration dataclasses as ROS parameters: declared, described, checked and read back."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable
from typing import TypeVar

import yaml
from rcl_interfaces.msg import (
    FloatingPointRange,
    IntegerRange,
    ParameterDescriptor,
    SetParametersResult,
)
from rclpy.node import Node
from rclpy.parameter import Parameter

from apusmog_core.config import NodeConfig
from apusmog_core.settings import Setting, settings, value_of, with_values

T = TypeVar("T")

_INT64 = 2**63 - 1
_HEADER = """\
# SPDX-License-Identifier: Apache-2.0
# Every parameter of upsample_node with its default; written by `python -m apusmog_ros.parameters`.
# A qos parameter is fixed when the node starts, any other can be set while it runs.
"""


def declare(node: Node, defaults: T, fixed: tuple[str, ...] = ()) -> T:
    """Declare every setting as a parameter; the configuration with what the user has set.

    Those whose names begin with one of `fixed` cannot be set later.
    """
    for item in settings(defaults):
        about = descriptor(item, read_only=item.name.startswith(fixed))
        node.declare_parameter(item.name, value_of(defaults, item.name), about)
    names = [item.name for item in settings(defaults)]
    given = {name: node.get_parameter(name).value for name in names}
    config = _checked(with_values, defaults, given)
    as_floats = [n for n in names if type(value_of(config, n)) is not type(given[n])]
    node.set_parameters([Parameter(n, value=value_of(config, n)) for n in as_floats])
    return config


def descriptor(item: Setting, read_only: bool = False) -> ParameterDescriptor:
    """What `ros2 param describe` tells about a setting."""
    result = ParameterDescriptor(
        name=item.name,
        description=item.help,
        additional_constraints=f"one of: {', '.join(item.choices)}" if item.choices else "",
        dynamic_typing=item.type is float,  # so that 4 is as good as 4.0
        read_only=read_only,
    )
    if item.low is None and item.high is None:
        return result
    low = -math.inf if item.low is None else item.low
    high = math.inf if item.high is None else item.high
    if item.type is float:
        result.floating_point_range = [FloatingPointRange(from_value=low, to_value=high)]
    else:
        bounds = max(low, -_INT64), min(high, _INT64)
        result.integer_range = [
            IntegerRange(from_value=int(bounds[0]), to_value=int(bounds[1]), step=1)
        ]
    return result


def typed(parameters: Iterable[Parameter], config: object) -> list[Parameter]:
    """The parameters, integers given for a float setting as floats: what is used is reported."""
    floats = {item.name for item in settings(config) if item.type is float}
    return [
        Parameter(p.name, value=float(p.value))
        if p.name in floats and p.type_ == Parameter.Type.INTEGER
        else p
        for p in parameters
    ]


def on_change(
    node: Node, config: Callable[[], T], accept: Callable[[T], None]
) -> Callable[[list[Parameter]], SetParametersResult]:
    """Check parameters set together as one new configuration, and give it to `accept`.

    Whatever the settings or `accept` raise refuses all of them with its reason.
    """

    def callback(parameters: list[Parameter]) -> SetParametersResult:
        current = config()
        known = {item.name for item in settings(current)}
        values = {p.name: p.value for p in parameters if p.name in known}
        try:
            if values:
                accept(_checked(with_values, current, values))
        except Exception as error:
            return SetParametersResult(successful=False, reason=str(error))
        return SetParametersResult(successful=True)

    node.add_on_set_parameters_callback(callback)
    return callback


def _checked(check: Callable, *given):
    """What a check returns; whatever it raises as a ValueError."""
    try:
        return check(*given)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def as_yaml(config: object = None) -> str:
    """The parameter file of upsample_node, each setting with its meaning and its range."""
    config = config or NodeConfig()
    lines = ["/**:", "  ros__parameters:"]
    groups: set[str] = set()
    for item in settings(config):
        head, _, leaf = item.name.rpartition(".")
        if head and head not in groups:
            groups.add(head)
            lines.append(f"    {head}:")
        indent = "      " if head else "    "
        comment = textwrap.wrap(item.help + _range_text(item), 90)
        lines += [f"{indent}# {line}" for line in comment]
        lines.append(f"{indent}{leaf}: {_scalar(value_of(config, item.name))}")
    return _HEADER + "\n".join(lines) + "\n"


def _range_text(item: Setting) -> str:
    if item.choices:
        return f" ({', '.join(item.choices)})"
    if item.low is None and item.high is None:
        return ""
    low, high = (f"{b:g}" if isinstance(b, float) else f"{b}" for b in (item.low, item.high))
    return f" (at least {low})" if item.high is None else f" ({low} to {high})"


def _scalar(value: object) -> str:
    return yaml.safe_dump(value).split("\n")[0]


if __name__ == "__main__":
    print(as_yaml(), end="")
