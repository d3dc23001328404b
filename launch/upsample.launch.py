# SPDX-License-Identifier: Apache-2.0
"""Upsample a topic, or a recording: `ros2 launch apusmog_ros upsample.launch.py --show-args`."""

from pathlib import Path

from ament_index_python.packages import PackageNotFoundError, get_package_prefix
from launch.actions import DeclareLaunchArgument, OpaqueFunction
from launch.conditions import IfCondition
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node

from launch import LaunchDescription

CONFIG = Path(__file__).resolve().parents[1] / "config"
OUTPUTS = ("dense", "objects", "scene", "boxes")

ARGUMENTS = {
    "topic": ("points", "PointCloud2 topic to upsample; a recording is played to it"),
    "ratio": ("", "output points for each measured point, any number > 0; empty: as in config"),
    "weights": ("", "a shipped name or a checkpoint file; empty: as in config"),
    "device": ("", "auto, cpu, cuda or cuda:N; empty: as in config"),
    "config": (str(CONFIG / "upsample.yaml"), "parameter file of the node"),
    "bag": ("", "a rosbag2, a ROS 1 bag or a KITTI folder to play; empty: play nothing"),
    "rate": ("1.0", "speed of the recording; 2 is twice as fast as recorded"),
    "loop": ("false", "play the recording again and again"),
    "rviz": ("false", "show input, dense objects and boxes in RViz"),
    "namespace": ("", "namespace of all nodes"),
}


def generate_launch_description() -> LaunchDescription:
    declared = [
        DeclareLaunchArgument(name, default_value=default, description=description)
        for name, (default, description) in ARGUMENTS.items()
    ]
    return LaunchDescription([*declared, OpaqueFunction(function=_nodes)])


def _nodes(context) -> list[Node]:
    given = {name: LaunchConfiguration(name).perform(context) for name in ARGUMENTS}
    changed = {name: given[name] for name in ("weights", "device") if given[name]}
    if given["ratio"]:
        changed["ratio"] = _number("ratio", given["ratio"])
    common = dict(namespace=given["namespace"], output="screen")
    points = ("points", given["topic"])
    nodes = [
        Node(
            **_program("upsample_node", "apusmog-upsample-node"),
            **common,
            name="upsampler",
            parameters=[given["config"], changed],
            remappings=[points],
        )
    ]
    if given["bag"]:
        # stamped anew, so that ages are right and RViz needs no simulated time
        replay = {"path": given["bag"], "rate": _number("rate", given["rate"]), "stamps": "now"}
        replay["loop"] = given["loop"].lower() in ("true", "1")
        nodes.append(
            Node(
                **_program("replay_node", "apusmog-replay"),
                **common,
                name="replay",
                parameters=[replay],
                remappings=[points],
            )
        )
    nodes.append(
        Node(
            package="rviz2",
            executable="rviz2",
            **common,
            arguments=["-d", str(CONFIG / "upsample.rviz")],
            remappings=[
                ("/points", given["topic"]),
                *((f"/upsampler/{name}", f"upsampler/{name}") for name in OUTPUTS),
            ],
            condition=IfCondition(given["rviz"]),
        )
    )
    return nodes


def _program(executable: str, script: str) -> dict:
    """The executable of the ROS package, or after a bare pip install the script on the path."""
    try:
        if (Path(get_package_prefix("apusmog_ros")) / "lib/apusmog_ros" / executable).exists():
            return dict(package="apusmog_ros", executable=executable)
    except (PackageNotFoundError, OSError):  # the latter where no ROS is sourced
        pass
    return dict(executable=script)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}:={text} is not a number") from None
