# SPDX-License-Identifier: Apache-2.0
"""One package for both worlds: `pip install .` without ROS, `colcon build` with it."""

import re
from glob import glob
from pathlib import Path

from setuptools import find_packages, setup

NAME = "apusmog_ros"
HERE = Path(__file__).resolve().parent  # `colcon build --symlink-install` runs a link to this file
VERSION = re.search(r'__version__ = "(.+?)"', (HERE / "apusmog_core/__init__.py").read_text())[1]

# open3d-cpu exists only for x86-64 Linux; elsewhere (Jetson, macOS) open3d is the CPU build.
OPEN3D = [
    "open3d-cpu>=0.19; sys_platform == 'linux' and platform_machine == 'x86_64'",
    "open3d>=0.19; sys_platform != 'linux' or platform_machine != 'x86_64'",
]
LIDAR = [*OPEN3D, "pypatchworkpp>=1.0", "matplotlib>=3.7"]  # simulator, meshes, ground, pictures
TRAIN = [*OPEN3D, "h5py>=3.8", "tensorboard>=2.14"]
ONNX = ["onnx>=1.16", "onnxruntime>=1.18", "onnxscript>=0.5"]
ROS = [  # for machines without ROS 2; a sourced ROS brings its own
    "ros-jazzy-rclpy",
    "ros-jazzy-rmw-fastrtps-cpp",
    "ros-jazzy-sensor-msgs",
    "ros-jazzy-visualization-msgs",
    "ros-jazzy-diagnostic-msgs",
]

setup(
    name=NAME,
    version=VERSION,
    description="Sparse LiDAR objects made dense by any real ratio: APU-SMOG for ROS 2",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The APU-SMOG for ROS 2 developers",
    maintainer="The APU-SMOG for ROS 2 developers",
    maintainer_email="apusmog@example.com",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["apusmog_core*", "apusmog_ros*"]),
    package_data={
        "apusmog_core": ["py.typed", "sample_clouds.npz"],
        "apusmog_core.show": ["page.html"],
        "apusmog_core.weights": ["*"],
        "apusmog_ros": ["*.xml"],
    },
    data_files=[
        ("share/ament_index/resource_index/packages", [f"resource/{NAME}"]),
        (f"share/{NAME}", ["package.xml"]),
        # what `ros2 run` and the launch file start; not on the path of pip's users
        (f"lib/{NAME}", ["resource/upsample_node", "resource/replay_node"]),
        (f"share/{NAME}/launch", glob("launch/*.launch.py")),
        (f"share/{NAME}/config", glob("config/*.*")),
        (f"share/{NAME}/config/train", glob("config/train/*.yaml")),
    ],
    install_requires=[
        "numpy>=1.24",
        "scipy>=1.10",
        "torch>=2.2",
        "numba>=0.59",
        "fpsample>=0.3.3,<1",  # 1.0 chooses the same points but has no wheels
        "pyyaml>=6.0",
        "rosbags>=0.10",
        "shtab>=1.6",  # completion in the shell
        "tqdm>=4.64",
    ],
    extras_require={
        "lidar": LIDAR,
        "train": TRAIN,
        "onnx": ONNX,
        "ros": ROS,
        "dev": [*LIDAR, *TRAIN, *ONNX, "pytest>=7.4", "hypothesis>=6.100", "ruff>=0.6"],
    },
    entry_points={
        "console_scripts": [
            "apusmog = apusmog_core.cli:main",
            "apusmog-upsample-node = apusmog_ros.running:upsample_node",
            "apusmog-replay = apusmog_ros.running:replay_node",
        ]
    },
    zip_safe=False,
)
