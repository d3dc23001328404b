# SPDX-License-Identifier: Apache-2.0
"""Upsample a topic, or a recording: `ros2 launch apusmog_ros upsample.launch.py --show-args`."""

import re
from pathlib import Path

from ament_index_python.packages import PackageNotFoundError, get_package_prefix
from launch.actions import (
    DeclareLaunchArgument,
    LogInfo,
    OpaqueFunction,
    RegisterEventHandler,
    Shutdown,
)
from launch.event_handlers import OnProcessIO
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node

from launch import LaunchDescription

CONFIG = Path(__file__).resolve().parents[1] / "config"
OUTPUTS = ("dense", "objects", "scene", "boxes")
FRAME = re.compile(rb"scans are in frame '([^']*)'")  # what the node logs with its first scan

BOOLEAN = ("true", "false", "True", "False", "1", "0")
ARGUMENTS = {  # name: default, what it is, what it may be
    "topic": ("points", "PointCloud2 topic to upsample; a recording is played to it"),
    "ratio": ("", "output points for each measured point, any number > 0; empty: as in config"),
    "min_confidence": ("", "0: the exact count; 0.8: sure points only, as detectors want them"),
    "weights": ("", "a shipped name or a checkpoint file; empty: as in config"),
    "device": ("", "auto, cpu, cuda or cuda:N; empty: as in config"),
    "target_frame": ("", "frame of the output, which needs tf2_ros; empty: as in config"),
    "reliability": (
        "",
        "reliability asked of the sensor; empty: as in config",
        ("", "auto", "best_effort", "reliable"),
    ),
    "config": (str(CONFIG / "upsample.yaml"), "parameter file of the node"),
    "bag": ("", "a rosbag2, a ROS 1 bag or a KITTI folder to play; empty: play nothing"),
    "rate": ("1.0", "speed of the recording; 2 is twice as fast as recorded"),
    "loop": ("false", "play the recording again and again", BOOLEAN),
    "rviz": ("false", "show input, dense objects and boxes in RViz", BOOLEAN),
    "use_sim_time": ("false", "take time from /clock; a recording then publishes it", BOOLEAN),
    "name": ("upsampler", "name of the node, and of its outputs: NAME/dense and so on"),
    "namespace": ("", "namespace of all nodes"),
}


def generate_launch_description() -> LaunchDescription:
    declared = [
        DeclareLaunchArgument(
            name, default_value=default, description=text, choices=allowed[0] if allowed else None
        )
        for name, (default, text, *allowed) in ARGUMENTS.items()
    ]
    return LaunchDescription([*declared, OpaqueFunction(function=_nodes)])


def _nodes(context) -> list:
    """All nodes, or one error before any of them has started."""
    given = {name: LaunchConfiguration(name).perform(context) for name in ARGUMENTS}
    sim_time, rviz = _boolean(given["use_sim_time"]), _boolean(given["rviz"])
    for name in ("config", "bag"):
        if given[name] and not Path(given[name]).exists():
            raise RuntimeError(f"{name}:={given[name]}: no such file or folder")
    if given["config"] and Path(given["config"]).is_dir():  # launch would only warn
        raise RuntimeError(f"config:={given['config']}: a folder; name a file")
    if not given["name"]:
        raise RuntimeError("name:= is empty: give the node a name, or leave the argument out")
    if rviz:
        _require_rviz()
    common = dict(namespace=given["namespace"], output="screen")
    upsampler = _upsampler(given, sim_time, common)
    nodes = [upsampler]
    if given["bag"]:
        nodes.append(_replay(given, sim_time, common))
    if rviz:
        nodes += _rviz(given, sim_time, common, upsampler)
    return nodes


def _upsampler(given: dict, sim_time: bool, common: dict) -> Node:
    changed = {"use_sim_time": sim_time}
    changed |= {n: given[n] for n in ("weights", "device", "target_frame") if given[n]}
    changed |= {n: _number(n, given[n]) for n in ("ratio", "min_confidence") if given[n]}
    if given["reliability"]:
        changed["qos.input_reliability"] = given["reliability"]
    return Node(
        **_program("upsample_node", "apusmog-upsample-node"),
        **common,
        name=given["name"],
        parameters=[*([given["config"]] if given["config"] else []), changed],
        remappings=[("points", given["topic"])],
        on_exit=Shutdown(reason="the upsampler has ended"),  # else a recording plays to nobody
    )


def _replay(given: dict, sim_time: bool, common: dict) -> Node:
    # without simulated time stamped anew, so that ages are right and RViz shows it
    stamps = {"stamps": "original" if sim_time else "now", "clock": sim_time}
    played = {"path": given["bag"], "rate": _number("rate", given["rate"])}
    return Node(
        **_program("replay_node", "apusmog-replay"),
        **common,
        name="replay",
        parameters=[{**played, **stamps, "loop": _boolean(given["loop"])}],
        remappings=[("points", given["topic"])],
        on_exit=_end_if_failed,
    )


def _end_if_failed(event, context) -> list:
    """A recording that cannot be played ends all; one that was played to its end does not."""
    return [Shutdown(reason="the recording could not be played")] if event.returncode else []


def _rviz(given: dict, sim_time: bool, common: dict, upsampler: Node) -> list:
    """RViz in the frame of the output: at once if it is known, else with the first scan."""
    outputs = [(f"/upsampler/{name}", f"{given['name']}/{name}") for name in OUTPUTS]

    def show(frame: str) -> Node:
        return Node(
            package="rviz2",
            executable="rviz2",
            **common,
            arguments=["-d", str(CONFIG / "upsample.rviz"), "-f", frame],
            parameters=[{"use_sim_time": sim_time}],
            remappings=[("/points", given["topic"]), *outputs],
        )

    if given["target_frame"]:
        return [show(given["target_frame"])]
    started = []

    def look(event):
        if (found := FRAME.search(event.text)) and not started:
            started.append(show(found[1].decode()))
            return started
        return None

    wait = RegisterEventHandler(
        OnProcessIO(target_action=upsampler, on_stdout=look, on_stderr=look)
    )
    return [wait, LogInfo(msg="RViz starts with the first scan, in its frame")]


def _require_rviz() -> None:
    try:
        get_package_prefix("rviz2")
    except (PackageNotFoundError, OSError):  # the latter where no ROS is sourced
        raise RuntimeError(
            "rviz:=true, but rviz2 is not installed: sudo apt install ros-$ROS_DISTRO-rviz2"
        ) from None


def _program(executable: str, script: str) -> dict:
    """The executable of the ROS package, or after a bare pip install the script on the path."""
    try:
        if (Path(get_package_prefix("apusmog_ros")) / "lib/apusmog_ros" / executable).exists():
            return dict(package="apusmog_ros", executable=executable)
    except (PackageNotFoundError, OSError):  # the latter where no ROS is sourced
        pass
    return dict(executable=script)


def _boolean(text: str) -> bool:
    return text.lower() in ("true", "1")


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise RuntimeError(f"{name}:={text} is not a number") from None
