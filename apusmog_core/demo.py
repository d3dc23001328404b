# SPDX-License-Identifier: Apache-2.0
"""The first ten minutes: scans through the real node over DDS; a table, a picture and a page.

The upsample node and the replay node are processes of their own, as on a robot; this one watches,
records, and changes the ratio half-way through the node's parameter service.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from apusmog_core.data import open_scans
from apusmog_core.view import Frame, picture, write_page

if TYPE_CHECKING:
    from apusmog_ros.watcher import Watcher

RATIOS = (4.0, 6.5)  # before and after the change
SPEED = 0.5  # of the recording: two CPU cores keep up, and dropped scans are holes in the page
FRAMES = 10  # of the simulated street
LONGEST = 50  # scans of a bag that are played, so that the demo of a long one ends
PAGE_FRAMES = 5  # scans in the page, which stays below 15 MB
NAMESPACE = "/demo"
LIBRARIES = "libusb-1.0-0 libgl1 libegl1 libx11-6 libgomp1"


def demo(bag: str | Path | None = None, out: str | Path = "demo") -> int:
    """Play simulated scans, or a bag's or folder's, through the node; the exit code."""
    try:
        import rclpy
    except ImportError as error:
        raise ValueError(
            f"the demo runs a ROS 2 node ({error}): source a ROS 2 installation, "
            "or pip install '.[ros]'"
        ) from error
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    scans = Path(bag) if bag else simulated_street(out / "street")
    # nothing of the demo leaves this machine, unless the user has said otherwise
    os.environ.setdefault("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    rclpy.init()
    try:
        watcher = play(scans, out)
    except RuntimeError as error:
        log = (out / "node.log").read_text().strip().splitlines()
        print("\n".join(["", *log[-5:], f"demo: {error}; the whole log: {out}/node.log"]))
        return 1
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


# --- over DDS ------------------------------------------------------------------------------------


@contextmanager
def node(module: str, log: Path, *arguments: str, **parameters) -> Iterator[subprocess.Popen]:
    """A node as a process of its own, ended when the block is left."""
    settings = [part for name, value in parameters.items() for part in ("-p", f"{name}:={value}")]
    ros = ["--ros-args", "-r", f"__ns:={NAMESPACE}", *settings]
    command = [sys.executable, "-m", f"apusmog_ros.{module}", *arguments, *ros]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def play(scans: Path, out: Path) -> Watcher:
    """Play the scans once for each ratio and watch what comes out."""
    from apusmog_ros.watcher import Watcher, recording

    count = min(len(open_scans(scans)), LONGEST)
    keep = set(np.linspace(0, count - 1, min(count, PAGE_FRAMES)).round().astype(int).tolist())
    shutil.rmtree(out / "dense", ignore_errors=True)  # of the demo before
    with (
        recording(out / "dense", f"{NAMESPACE}/upsampler/dense") as record,
        node("upsample_node", out / "node.log", ratio=RATIOS[0]) as upsampler,
    ):
        watcher = Watcher(record, keep, NAMESPACE)
        ready = lambda: watcher.count_publishers("upsampler/dense")  # noqa: E731
        watcher.wait_until(ready, "the upsample node", (upsampler,))
        for ratio in RATIOS:
            watcher.set_parameter("upsampler", "ratio", ratio)
            watcher.start_pass(ratio)
            play_once(watcher, upsampler, scans, count, out)
        watcher.diagnostics = {}
        watcher.wait_until(lambda: watcher.diagnostics, "diagnostics", (upsampler,))
    return watcher


def play_once(watcher: Watcher, upsampler: subprocess.Popen, scans: Path, count: int, out: Path):
    """Play up to `count` scans from the start, with a progress bar."""
    replay = node("replay_node", out / "replay.log", str(scans), rate=SPEED, paused="true")
    with replay as player, tqdm(total=count, desc=f"ratio {watcher.ratio:g}", unit="scan") as bar:

        def finished() -> bool:
            played, answered = watcher.progress()
            bar.update(min(played, count) - bar.n)
            return answered and (played >= count or player.poll() is not None)

        children = (upsampler, player)
        heard = lambda: watcher.count_subscribers("points") > 1  # noqa: E731
        watcher.wait_until(heard, "the nodes to find each other", children)
        watcher.set_parameter("replay", "paused", False)
        watcher.wait_until(finished, "dense clouds", children)


# --- what came of it -----------------------------------------------------------------------------


def table(watcher: Watcher) -> str:
    """Counts for each ratio, then the time of each stage as the node reports it."""
    lines = [
        "",
        f"{'ratio':>8}{'scans':>8}{'objects':>9}{'points in':>11}{'points out':>12}{'out/in':>8}",
    ]
    for ratio in RATIOS:
        rows = [seen for seen in watcher.seen if seen.ratio == ratio]
        objects = np.mean([row.instances for row in rows])
        before = np.mean([row.measured for row in rows])
        after = np.mean([row.points for row in rows])
        lines.append(
            f"{ratio:8g}{len(rows):8d}{objects:9.0f}{before:11.0f}{after:12.0f}"
            f"{after / max(before, 1):8.2f}"
        )
    lines += ["", "means a scan; from the node's diagnostics:"]
    lines += [f"  {name:<28} {value}" for name, value in watcher.diagnostics.items()]
    return "\n".join(lines)


def show(watcher: Watcher, out: Path) -> None:
    """The page and the picture."""
    stamps = [stamp for stamp in sorted(watcher.scans) if watcher.dense[stamp]]
    if not stamps:
        raise ValueError("no scan of those kept for the page came back; see the table above")
    frames = [
        Frame(
            f"scan at {(stamp - stamps[0]) / 1e9:.1f} s", watcher.scans[stamp], watcher.dense[stamp]
        )
        for stamp in stamps
    ]
    first = frames[0]
    written = [
        picture(first.scan, first.dense[max(first.dense)], out / "before_after.png"),
        write_page(frames, out / "view.html", scan_points=100_000 * len(frames)),
    ]
    print()
    for file in [*written, out / "dense"]:
        print(f"  {file}")
