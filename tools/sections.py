# SPDX-License-Identifier: Apache-2.0
"""What the bench measures: each section yields figures beside a baseline of the same run."""

from __future__ import annotations

import atexit
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from apusmog_core.data import KittiDrive, Scan

KITTI = Path(__file__).parents[2] / "shared" / "data" / "kitti_raw_0051"
RATIOS = (2.0, 4.0, 8.0, 16.0)
LINEAR = 4.6  # four times the work may cost this much


@dataclass(frozen=True)
class Row:
    """One measured figure beside its baseline."""

    section: str
    name: str
    value: float
    unit: str
    against: str  # what the baseline is
    baseline: float  # in the same unit
    bar: str = ""  # what must hold, where something must
    holds: bool = True

    @property
    def ratio(self) -> float:
        return self.value / self.baseline if self.baseline else float("nan")


def best(work: Callable[[], object], times: int = 5) -> float:
    """Milliseconds of the quickest of several calls, after one to warm up."""
    work()
    quickest = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        work()
        quickest = min(quickest, time.perf_counter() - start)
    return 1e3 * quickest


def timed(work: Callable[[], object]) -> float:
    """Milliseconds of one call, for what is too slow to repeat."""
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


# --- sections: each yields rows ------------------------------------------------------------------


def stages() -> Iterator[Row]:
    """Milliseconds for each stage of a scan, as shares of the whole."""
    from apusmog_core.config import PipelineConfig
    from apusmog_core.pipeline import ScanPipeline
    from apusmog_core.segment.rings import find_rings

    pipeline = ScanPipeline(PipelineConfig())
    runs: dict[str, list[float]] = {}
    for scan in [scans()[0], *scans()]:  # the first once more, to warm up
        start = time.perf_counter()
        dense = pipeline.process(scan.points, scan.intensity)
        whole = 1e3 * (time.perf_counter() - start)
        for name, ms in {**dense.timings, "total": whole}.items():
            runs.setdefault(name, []).append(ms)
    median = {name: float(np.median(times[1:])) for name, times in runs.items()}
    for name, ms in median.items():
        label = f"{name} ({source()} scan, ratio 4)"
        yield Row("stages", label, ms, "ms", "the total", median["total"])
    rings = [find_rings(scan.points, scan.ring)[0] for scan in scans()]
    few = [(scan, ring, ring % 4 == 0) for scan, ring in zip(scans(), rings, strict=True)]
    some = [(scan.points[kept], scan.intensity[kept], None, ring[kept]) for scan, ring, kept in few]
    ms = float(np.median([best(lambda of=of: pipeline.process(*of)) for of in some]))
    label = f"total with every fourth ring ({source()} scan, ratio 4)"
    whole = ("the total", median["total"])
    yield Row("stages", label, ms, "ms", *whole, bar="at most 40 ms", holds=ms <= 40)


def speed() -> Iterator[Row]:
    """Output points a second by weights and ratio, against the midpoint baseline."""
    from apusmog_core import Upsampler
    from apusmog_core.evaluation.baselines import midpoint
    from apusmog_core.weights import shipped

    clouds = objects()
    size = sum(map(len, clouds))
    simple = {}
    for ratio in RATIOS:
        ms = timed(lambda r=ratio: [midpoint(c, round(r * len(c))) for c in clouds])
        simple[ratio] = ratio * size / ms * 1e3
    for weights in shipped():
        up = Upsampler.load(weights)
        up.upsample_many(clouds[:2], 2, origin=(0, 0, 0))
        for ratio in RATIOS:
            ms = timed(lambda r=ratio, u=up: u.upsample_many(clouds, r, origin=(0, 0, 0)))
            rate = ratio * size / ms * 1e3
            yield Row(
                "speed", f"{weights}, ratio {ratio:g}", rate, "points/s", "midpoint", simple[ratio]
            )


def growth() -> Iterator[Row]:
    """Four times the ratio or the points may cost LINEAR times as much; memory at its peak."""
    from apusmog_core.weights import shipped

    for weights in shipped():
        run = [sys.executable, "-c", "from tools.sections import grow; grow()", weights]
        done = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True)
        seen = json.loads(done.stdout.splitlines()[-1])
        base = seen["ms"]["16k points, ratio 4"]
        for name in ("16k points, ratio 16", "64k points, ratio 4"):
            ms = seen["ms"][name]
            yield Row(
                "growth",
                f"{weights}, {name}",
                ms,
                "ms",
                "16k points, ratio 4",
                base,
                bar=f"at most {LINEAR:g}",
                holds=ms <= LINEAR * base,
            )
        loaded, peak = seen["megabytes"]
        yield Row("growth", f"{weights}, peak memory", peak, "MB", "weights loaded", loaded)


def grow() -> None:
    """What `growth` runs in a process of its own, so that the peak of memory is its own too."""
    from apusmog_core import Upsampler

    def megabytes() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    up = Upsampler.load(sys.argv[-1])
    small, large = sensed_surface(16_000), sensed_surface(64_000)
    loaded = megabytes()

    def cost(points: np.ndarray, ratio: float) -> float:
        return timed(lambda: up.upsample(points, ratio, origin=(0, 0, 0)))

    up.upsample(small[:2000], 4, origin=(0, 0, 0))
    ms = {
        "16k points, ratio 4": min(cost(small, 4), cost(small, 4)),
        "16k points, ratio 16": cost(small, 16),
        "64k points, ratio 4": cost(large, 4),
    }
    print(json.dumps(dict(ms=ms, megabytes=(loaded, megabytes()))))


def messages() -> Iterator[Row]:
    """PointCloud2 to arrays and back, against copying the same bytes."""
    from std_msgs.msg import Header

    from apusmog_ros import cloud

    scan = scans()[0]
    msg = cloud.write(Header(), scan.points, cloud.MEASURED, intensity=scan.intensity)
    many = np.tile(scan.points, (4, 1))
    columns = dict(instance=np.ones(len(many), np.uint32), generated=np.zeros(len(many), bool))
    dense = cloud.write(Header(), many, **columns)
    for name, work, size in (
        ("read a scan", lambda: cloud.read(msg), len(msg.data)),
        ("write a dense cloud", lambda: cloud.write(Header(), many, **columns), len(dense.data)),
    ):
        raw = np.ones(size, np.uint8)
        label = f"{name}, {size / 1e6:.1f} MB"
        yield Row("messages", label, best(work), "ms", "copying the bytes", best(raw.copy))


def segment() -> Iterator[Row]:
    """Ground and clusters: time, Open3D's DBSCAN beside it, labelled objects found."""
    import open3d as o3d

    from apusmog_core.data.kitti import tracklet_recall
    from apusmog_core.segment import Segmenter, find_instances

    segmenter = Segmenter()
    ours, clusters, dbscan = [], 0.0, 0.0
    for scan in scans():  # side by side, so that a slow moment of the machine meets all of them
        ours.append(best(partial(segmenter, scan.points, scan.ring)))
        rest = scan.points[~segmenter(scan.points, scan.ring)[0]]
        clusters += best(partial(find_instances, rest, segmenter.config.cluster))
        cloud = o3d.geometry.PointCloud(o3d.utility.Vector3dVector(rest.astype(np.float64)))
        run = partial(cloud.cluster_dbscan, segmenter.config.cluster.tolerance, min_points=1)
        dbscan += best(run)
    yield Row(
        "segment",
        f"ground and clusters, slowest of 5 {source()} scans",
        max(ours),
        "ms",
        "their mean",
        sum(ours) / len(ours),
        bar="at most 60 ms",
        holds=max(ours) <= 60,
    )
    for what, ms in (("clusters", clusters), ("ground and clusters", sum(ours))):
        yield Row(
            "segment",
            f"{what}, all 5 scans",
            ms,
            "ms",
            "Open3D's DBSCAN of what is not ground",
            dbscan,
            bar="at most 0.2",
            holds=ms <= dbscan / 5,
        )
    if drive().boxes:
        labels = [segmenter(scan.points, scan.ring)[1] for scan in drive()]
        labelled, found = tracklet_recall(drive(), labels)
        yield Row(
            "segment",
            "labelled objects that are one cluster",
            found,
            "objects",
            "those of 30 points and more",
            labelled,
            bar="at least 0.9",
            holds=found >= 0.9 * labelled,
        )


TIME_BUDGET_MS = 60.0  # what two cores can spare for the network at 10 Hz


def dds() -> Iterator[Row]:
    """Node and replay as processes of their own, at the recording's 10 Hz."""
    from .throughput import throughput

    for budget in (0.0, TIME_BUDGET_MS):
        seen = throughput(drive().folder, seconds=30, time_budget_ms=budget)
        rate, age = seen["rate_out_hz"], seen["age_ms_p50"]
        how = f"time_budget_ms {budget:g}" if budget else "every object"
        yield Row(
            "dds",
            f"dense clouds a second, ratio 4, {how}",
            rate,
            "Hz",
            "scans played",
            seen["rate_in_hz"],
            bar="at least 9.8 Hz",
            holds=rate >= 9.8,
        )
        yield Row(
            "dds",
            f"median age of a dense cloud, {how}",
            age,
            "ms",
            "its 99th percentile",
            seen["age_ms_p99"],
            bar="at most 170 ms",
            holds=age <= 170,
        )


SECTIONS = dict(
    stages=stages,
    segment=segment,
    speed=speed,
    growth=growth,
    messages=messages,
    dds=dds,
)


# --- what is measured on -------------------------------------------------------------------------


@cache
def drive() -> KittiDrive:
    """Real KITTI where it is, else a simulated street; read once for all sections."""
    from apusmog_core.data import KittiDrive

    if KITTI.is_dir():
        return KittiDrive(KITTI)
    from apusmog_core.simulate.street import drive, write_kitti

    folder = Path(tempfile.mkdtemp(prefix="apusmog-bench-"))
    atexit.register(shutil.rmtree, folder)
    write_kitti(drive(5), folder)
    return KittiDrive(folder)


@cache
def scans(count: int = 5) -> list[Scan]:
    return list(islice(drive(), count))


def source() -> str:
    return "KITTI" if KITTI.is_dir() else "simulated"


def objects(count: int = 4000) -> list[np.ndarray]:
    """Instances of one scan, near and far, with about `count` points together."""
    from apusmog_core.segment import Segmenter

    scan = scans()[0]
    _, instance = Segmenter()(scan.points, scan.ring)
    clouds = [scan.points[instance == i] for i in range(1, instance.max() + 1)]
    step = max(1, sum(map(len, clouds)) // count)
    return clouds[::step]


def sensed_surface(count: int) -> np.ndarray:
    """A wavy wall around a sensor at the origin, on the rings of a spinning LiDAR. (count, 3)"""
    rings = 64
    azimuth = np.linspace(-np.pi, np.pi, count // rings, endpoint=False)
    elevation = np.radians(np.linspace(-20, 5, rings))
    azimuth, elevation = (a.ravel() for a in np.meshgrid(azimuth, elevation))
    reach = 12 + np.sin(5 * azimuth) + 0.5 * np.sin(20 * elevation)
    level = np.cos(elevation)
    rays = np.stack([level * np.cos(azimuth), level * np.sin(azimuth), np.sin(elevation)], axis=1)
    return (rays * reach[:, None]).astype(np.float32)
