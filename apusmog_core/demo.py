# SPDX-License-Identifier: Apache-2.0
"""The first ten minutes: scans through the real node over DDS; a table, a picture and a page.

The upsample node and the replay node are processes of their own, as on a robot; this one watches,
records, and changes the ratio half-way through the node's parameter service.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from tqdm import tqdm

from apusmog_core.data import open_scans
from apusmog_core.view import Dense, Frame, picture, write_page

RATIOS = (4.0, 6.5)  # before and after the change
SPEED = 0.5  # of the recording: two CPU cores keep up, and dropped scans are holes in the page
FRAMES = 10  # of the simulated street
LONGEST = 50  # scans of a bag that are played, so that the demo of a long one ends
PAGE_FRAMES = 5  # scans in the page, which stays below 15 MB
PATIENCE = 60.0  # seconds without anything new that count as a failure
NAMESPACE = "/demo"
LIBRARIES = "libusb-1.0-0 libgl1 libegl1 libx11-6 libgomp1"


def demo(bag: str | Path | None = None, out: str | Path = "demo") -> int:
    """Play simulated scans, or a bag's or folder's, through the node; the exit code."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    scans = Path(bag) if bag else simulated_street(out / "street")
    count = min(len(open_scans(scans)), LONGEST)
    try:
        import rclpy
    except ImportError as error:
        raise ValueError(
            f"the demo runs a ROS 2 node ({error}): source a ROS 2 installation, "
            "or pip install '.[ros]'"
        ) from error
    # nothing of the demo leaves this machine, unless the user has said otherwise
    os.environ.setdefault("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    rclpy.init()
    try:
        watcher = play(scans, count, out)
    finally:
        rclpy.try_shutdown()
    print(table(watcher))
    show(watcher, out)
    return 0


def simulated_street(folder: Path) -> Path:
    """Ten HDL-64E scans of a street, kept for the next time."""
    if len(list(folder.glob("velodyne_points/data/*.bin"))) == FRAMES:
        return folder
    try:
        import open3d  # noqa: F401  the ray caster, which needs system libraries
    except (ImportError, OSError) as error:
        raise ValueError(
            f"the simulator needs Open3D ({error}): pip install '.[lidar]', and on Debian or "
            f"Ubuntu: sudo apt-get install {LIBRARIES}"
        ) from error
    from apusmog_core.simulate import drive, write_kitti

    write_kitti(tqdm(drive(FRAMES), "simulating a street", FRAMES, unit="scan"), folder)
    return folder


# --- processes -----------------------------------------------------------------------------------


@contextmanager
def node(module: str, log: Path, *arguments: str, **parameters) -> Iterator[subprocess.Popen]:
    """A node as a process of its own, ended when the block is left."""
    options = [f"-p {name}:={value}" for name, value in parameters.items()]
    ros = ["--ros-args", "-r", f"__ns:={NAMESPACE}", *" ".join(options).split()]
    command = [sys.executable, "-m", f"apusmog_ros.{module}", *arguments, *ros]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        process.log = log
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def play(scans: Path, count: int, out: Path) -> Watcher:
    """Play the scans once for each ratio and watch what comes out."""
    with ExitStack() as stack:
        upsampler = stack.enter_context(node("upsample_node", out / "node.log", ratio=RATIOS[0]))
        watcher = stack.enter_context(Watcher.recording(out / "dense", count, upsampler))
        watcher.wait_for("the node", lambda: watcher.count_publishers(watcher.dense_topic))
        for ratio in RATIOS:
            watcher.set_parameter("upsampler", "ratio", ratio)
            watcher.start(ratio)
            replay = node("replay_node", out / "replay.log", str(scans), rate=SPEED, paused="true")
            with replay as process, tqdm(total=count, desc=f"ratio {ratio:g}", unit="scan") as bar:
                watcher.wait_for("its reader", lambda: watcher.count_subscribers(watcher.topic) > 1)
                watcher.set_parameter("replay", "paused", False)
                watcher.wait_for(f"{count} scans", lambda b=bar: watcher.played(b), process)
        watcher.wait_for("diagnostics", lambda: watcher.diagnosed_after_last)
    return watcher


# --- the watching node ---------------------------------------------------------------------------
