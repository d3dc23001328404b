# SPDX-License-Identifier: Apache-2.0
"""The first ten minutes: scans through the real node over DDS; a table, a picture and a page.

The upsample node and the replay node are processes of their own, as on a robot; this one watches,
records, and changes the ratio half-way through the node's parameter service.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from apusmog_core.cli.progress import waiting
from apusmog_core.data import open_scans
from apusmog_core.show.page import DrawnObjects, Moment, renumbered, write_page
from apusmog_core.show.picture import picture

if TYPE_CHECKING:
    from .watcher import Answer, Watcher

RATIOS = (4.0, 6.5)  # before and after the change
SPEED = 0.5  # of the recording: two CPU cores keep up, and dropped scans are holes in the page
SCANS = 10  # of the simulated street
LONGEST = 20  # scans of a bag that are played, so that the demo of a long one ends
PAGE_SCANS = 5  # scans in the page, which stays below 15 MB
NAMESPACE = "/demo"
LIBRARIES = "libusb-1.0-0 libgl1 libegl1 libx11-6 libgomp1"


def demo(
    bag: str | Path | None = None, out: str | Path = "demo", weights: str | Path = "lidar"
) -> int:
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
    source = Path(bag) if bag else simulated_street(out / "street")
    story = Story.of(source)
    # nothing of the demo leaves this machine, unless the user has said otherwise
    os.environ.setdefault("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    rclpy.init()
    try:
        diagnostics = play(source, story, out, weights)
    except RuntimeError as error:
        log = (out / "node.log").read_text().strip().splitlines()
        print("\n".join(["", *log[-5:], f"demo: {error}; the whole log: {out}/node.log"]))
        return 1
    finally:
        rclpy.try_shutdown()
    print(table(story, diagnostics))
    show(story, source, out)
    return 0


def simulated_street(folder: Path) -> Path:
    """Ten HDL-64E scans of a street, kept for the next time."""
    if len(list(folder.glob("velodyne_points/data/*.bin"))) == SCANS:
        return folder
    try:
        import open3d  # noqa: F401  the ray caster, which needs system libraries
    except (ImportError, OSError) as error:
        raise ValueError(
            f"the simulator needs Open3D ({error}): pip install '.[lidar]', and on Debian or "
            f"Ubuntu: sudo apt-get install {LIBRARIES}"
        ) from error
    from apusmog_core.simulate.street import drive, write_kitti

    shutil.rmtree(folder, ignore_errors=True)  # of a version with other streets
    write_kitti(tqdm(drive(SCANS), "simulating a street", SCANS, unit="scan"), folder)
    return folder


# --- what happened -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Count:
    """One dense cloud, counted."""

    ratio: float  # asked for
    instances: int
    measured: int
    points: int


@dataclass
class Story:
    """The scans that are played, and what came back for them."""

    order: dict[int, int]  # number of each scan by its stamp
    scans: list[np.ndarray]  # their points
    dense: dict[int, dict[float, DrawnObjects]] = field(default_factory=dict)  # by number and ratio
    counts: list[Count] = field(default_factory=list)
    ratio: float = RATIOS[0]  # of the present pass
    reached: int = 0  # scans of the present pass, up to the latest that came back

    @classmethod
    def of(cls, source: Path) -> Story:
        scans = list(islice(open_scans(source), LONGEST))
        order = {_key(scan.stamp): number for number, scan in enumerate(scans)}
        return cls(order, [scan.points for scan in scans])

    def begin(self, ratio: float) -> None:
        self.ratio, self.reached = ratio, 0

    def add(self, answer: Answer) -> None:
        number = self.order.get(_key(answer.stamp), len(self.order))  # unknown: beyond the end
        measured = int(np.count_nonzero(~answer.generated))
        instances = len(np.unique(answer.instance))
        self.counts.append(Count(self.ratio, instances, measured, len(answer.points)))
        self.reached = min(number + 1, len(self.order))
        if number < len(self.scans):
            dense = DrawnObjects(
                answer.points, answer.instance, answer.generated, answer.confidence
            )
            known = self.dense.setdefault(number, {})
            for other in known.values():
                dense = renumbered(dense, other)
            known[self.ratio] = dense


def _key(stamp: float) -> int:
    """A stamp that survives seconds as a float: ten microseconds."""
    return round(stamp * 1e5)


# --- over DDS ------------------------------------------------------------------------------------


@contextmanager
def node(module: str, log: Path, **parameters: object) -> Iterator[subprocess.Popen]:
    """A node as a process of its own, ended when the block is left."""
    from .running import child

    place = f"__ns:={NAMESPACE}"
    with (
        log.open("w") as file,
        child(module, place, stdout=file, stderr=subprocess.STDOUT, **parameters) as process,
    ):
        yield process


def play(source: Path, story: Story, out: Path, weights: str | Path) -> dict[str, str]:
    """Play the scans once for each ratio; the node's diagnostics at the end."""
    from .watcher import Watcher, recording

    shutil.rmtree(out / "dense", ignore_errors=True)  # of the demo before
    settings = {"ratio": RATIOS[0], "weights": weights}
    with (
        recording(out / "dense", f"{NAMESPACE}/upsampler/dense") as record,
        node("upsample_node", out / "node.log", **settings) as upsampler,
    ):
        watcher = Watcher(NAMESPACE, story.add, record)
        ready = lambda: watcher.diagnostics.get("network") == "ready"  # noqa: E731
        with waiting("the node starts; the first time it compiles, for about a minute"):
            watcher.wait_until(ready, "the network", (upsampler,))
        for ratio in RATIOS:
            watcher.set_parameter("upsampler", "ratio", ratio)
            story.begin(ratio)
            play_once(watcher, story, source, upsampler, out / "replay.log")
        watcher.diagnostics = {}
        watcher.wait_until(lambda: watcher.diagnostics, "diagnostics", (upsampler,))
    return watcher.diagnostics


def play_once(
    watcher: Watcher, story: Story, source: Path, upsampler: subprocess.Popen, log: Path
) -> None:
    """Play the scans from the start until the last has come back, with a progress bar."""
    count = len(story.order)
    replay = node("replay_node", log, path=source, rate=SPEED, wait="true")
    with replay as player, tqdm(total=count, desc=f"ratio {story.ratio:g}", unit="scan") as bar:

        def finished() -> bool:
            if story.reached > bar.n:
                bar.update(story.reached - bar.n)
            return story.reached == count

        watcher.wait_until(finished, "a dense cloud", (upsampler, player))


# --- what came of it -----------------------------------------------------------------------------


def table(story: Story, diagnostics: dict[str, str]) -> str:
    """Means of each ratio's scans, then the time of each stage as the node reports it."""
    names = ("ratio", "scans", "objects", "points in", "points out", "out/in")
    lines = ["", "Means of a scan: points of all objects before and after, and their ratio."]
    lines.append("".join(f"{name:>12}" for name in names))
    for ratio in RATIOS:
        rows = [count for count in story.counts if count.ratio == ratio]
        objects, before, after = np.mean(
            [(row.instances, row.measured, row.points) for row in rows], axis=0
        )
        lines.append(
            f"{ratio:12g}{len(rows):12d}{objects:12.0f}{before:12,.0f}{after:12,.0f}"
            f"{after / max(before, 1):12.3f}"
        )
    shown = {name: value for name, value in diagnostics.items() if _of_interest(name)}
    width = max(map(len, shown)) + 2
    lines += ["", *(f"  {name:{width}}{value}" for name, value in shown.items())]
    if int(diagnostics.get("dropped", 0)):
        lines += [
            "",
            "  dropped: slower than the sensor with every object served; see time_budget_ms",
        ]
    if not any(row.instances for row in story.counts):
        lines += ["", "  no objects found: check ground.sensor_height, cluster.* and range.*"]
    return "\n".join(lines)


def _of_interest(name: str) -> bool:
    """Of the diagnostics; the age is left out, since the stamps are those of the recording."""
    told = ("received", "published", "dropped", "weights", "device", "memory [MB]")
    return name in told or (name.endswith("p50 [ms]") and not name.startswith("age"))


def show(story: Story, source: Path, out: Path) -> None:
    """Write the picture and the page."""
    both = [number for number, dense in story.dense.items() if len(dense) == len(RATIOS)]
    numbers = sorted(both or story.dense)  # a slow machine may have dropped all but some
    chosen = np.linspace(0, len(numbers) - 1, min(len(numbers), PAGE_SCANS)).round().astype(int)
    moments = [
        Moment(f"scan {numbers[i]}", story.scans[numbers[i]], story.dense[numbers[i]])
        for i in chosen
    ]
    first, ratio = moments[0], max(moments[0].dense)
    names = true_names(source, numbers[chosen[0]], first.scan, first.dense[ratio])
    title = f"demo: {source.resolve().name}"
    written = [
        picture(first.scan, first.dense[ratio], out / "before_after.png", ratio, names),
        write_page(moments, out / "view.html", title, scan_points=100_000 * len(moments)),
        out / "dense",
    ]
    about = ("the picture", "the 3-D page: open it in a browser", "the dense clouds, a rosbag2")
    width = max(len(str(path)) for path in written)
    lines = [f"  {str(path):{width}}  {what}" for path, what in zip(written, about, strict=True)]
    print("\n" + "\n".join(lines))


def true_names(source: Path, number: int, scan: np.ndarray, dense: DrawnObjects) -> dict[int, str]:
    """Classes of the instances of a simulated scan; empty for a recording."""
    file = source / "truth" / f"{number:010d}.npz"
    if not file.is_file():
        return {}
    with np.load(file) as truth:
        names, belongs = truth["names"], truth["instance"]
    known = {point.tobytes(): of for point, of in zip(scan, belongs, strict=True)}
    measured = ~dense.generated.astype(bool)
    found = {}
    for instance in np.unique(dense.instance):
        points = dense.points[measured & (dense.instance == instance)]
        votes = np.bincount([known.get(point.tobytes(), 0) for point in points], minlength=1)
        found[int(instance)] = str(names[votes.argmax()])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the whole system and show what comes out.")
    parser.add_argument("--bag", type=Path, help="a bag or folder of scans; simulated otherwise")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder (%(default)s)")
    args = parser.parse_args()
    try:
        return demo(args.bag, args.out)
    except KeyboardInterrupt:
        return 130
    except ValueError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
