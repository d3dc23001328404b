# SPDX-License-Identifier: Apache-2.0
"""One scan to one dense scan: filter -> ground -> instances -> ratios -> network -> intensity."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .config import PipelineConfig
from .dense import Dense, check_ratio
from .segment import HERE, Mounting, Segmenter, about_sensor, from_sensor, rows_by_label, timed
from .sensor.calibrate import Calibration
from .sensor.neighbours import find_returns
from .sensor.view import ObjectScan

SMALLEST_SIDE = 0.1  # metres; a pole seen as one line of points still has an area
SENSOR = (0.0, 0.0, 0.0)  # seen from there, a cloud is in the sensor's frame
ENOUGH_TO_LEARN = 200  # new points, or the overhead of the call hides their cost
FORGET = 0.2  # weight of the newest scan in the estimate of time a point
# what to change where no object was found
TO_FIND_OBJECTS = (
    "try --set ground.sensor_height=METRES (where its estimate is wrong) or ground.method=none "
    "(no ground in sight)"
)


@dataclass(frozen=True, eq=False)
class Segments:
    """A scan's returns and what they belong to."""

    points: np.ndarray  # (n, 3) float32, finite, none at the sensor itself
    intensity: np.ndarray  # (n,) float32, 0 where the sensor gives none
    ground: np.ndarray  # (n,) bool
    instance: np.ndarray  # (n,) uint32, 1.. from near to far, 0: ground and background
    rows: np.ndarray  # (n,) int64, row of the input that each point was
    ring: np.ndarray | None = None  # (n,) int32, as given or found
    ring_source: str = "none"  # what told the rings: field, order, elevation or none
    height: np.ndarray | None = None  # (n,) float32 above the ground, nan where not known
    bias: np.ndarray | None = None  # (n,) metres by which ranges are too long; None: not known
    place: np.ndarray = field(default_factory=lambda: HERE)  # (5,) of the sensor, segment/place.py
    not_finite: int = 0  # rows of the input that were left out
    no_return: int = 0  # rows at exactly (0, 0, 0), which say that nothing came back
    timings: dict[str, float] = field(default_factory=dict)  # stage -> milliseconds

    @property
    def generated(self) -> np.ndarray:
        """(n,) bool: none of these points is."""
        return np.zeros(len(self.points), bool)

    @cached_property
    def seen(self) -> np.ndarray:
        """(n, 3) the points about the sensor."""
        return about_sensor(self.points, self.place)

    def instances(self) -> list[np.ndarray]:
        """Indices of each instance's points, by its number."""
        return rows_by_label(self.instance)[1:]


@dataclass(frozen=True, eq=False)
class DenseScan:
    """The instances of a scan, dense; ground and background stay in `segments`."""

    points: np.ndarray  # (m, 3) float32
    intensity: np.ndarray  # (m,) float32, of the nearest measured point
    instance: np.ndarray  # (m,) uint32, 1..
    generated: np.ndarray  # (m,) bool, False for measured points
    confidence: np.ndarray  # (m,) float32, 1 for measured points
    source: np.ndarray  # (m,) int64, the point of `segments` it is, or the nearest one to it
    segments: Segments
    ratio: float  # as asked for
    limited: str = ""  # which budget was bound, and what it cost
    timings: dict[str, float] = field(default_factory=dict)  # stage -> milliseconds

    @property
    def effective_ratio(self) -> float:
        """Output points for each measured point of an instance."""
        return len(self.points) / max(np.count_nonzero(self.segments.instance), 1)


class ScanPipeline:
    """Makes the objects of scans dense; one object serves one stream of scans.

    `process`, `segment` and `densify` may run in several threads, for one scan each.
    """

    def __init__(self, config: PipelineConfig | None = None, upsampler=None):
        config = config or PipelineConfig()
        self.config = config
        self.upsampler = upsampler or _load(config)
        self.segmenter = Segmenter(config)
        self.calibration, self._seen_from = Calibration(), HERE
        self.overhead_ms = 0.0  # of any call of the network
        self.ms_per_point: float | None = None  # of the network, for each new point; learned

    def configured(self, config: PipelineConfig) -> ScanPipeline:
        """This pipeline with other settings; network and all that was learned stay as they are."""
        other = copy.copy(self)
        other.config = config
        other.segmenter = self.segmenter.configured(config)
        if config.seed != self.config.seed:
            other.upsampler = copy.copy(self.upsampler)
            other.upsampler.seed = config.seed
        return other

    def restarted(self) -> ScanPipeline:
        """This pipeline for another stream of scans: the network stays, what was learned goes."""
        other = copy.copy(self)
        other.segmenter, other.calibration = Segmenter(self.config), Calibration()
        other._seen_from = HERE
        return other

    def with_upsampler(self, upsampler) -> ScanPipeline:
        """This pipeline with another network; what was learned of the scans stays."""
        other = copy.copy(self)
        other.upsampler, other.overhead_ms, other.ms_per_point = upsampler, 0.0, None
        return other

    def warm_up(self) -> None:
        """Make small walls dense, so that the first scan does not wait for the compiler."""
        azimuth, elevation = np.meshgrid(
            np.radians(np.arange(0, 8, 0.2)), np.arange(-0.1, 0.1, 0.01)
        )
        blur = np.random.default_rng(0).uniform(-0.005, 0.005, elevation.shape)
        other = self.restarted()  # nothing is to be learned from a wall
        for rise in (elevation, elevation + blur):  # with rings, and without
            ray = (np.cos(azimuth), np.sin(azimuth), np.tan(rise))
            wall = 10 * np.stack(ray, axis=-1).reshape(-1, 3).astype(np.float32)
            other.process(wall, np.ones(len(wall), np.float32), ratio=4.0)
        # a cloud alone, as `upsample` and the time budget have it
        self.upsampler.upsample(wall, 2.0, True, SENSOR)

    @property
    def mounting(self) -> Mounting:
        """Height, roll and pitch of the sensor, as set or as learned so far."""
        return self.segmenter.mounting

    @property
    def device(self) -> str:
        """Where the network runs, and why there if that was measured."""
        return getattr(self.upsampler, "choice", "") or str(self.upsampler.device)

    def process(
        self,
        points: np.ndarray,
        intensity: np.ndarray | None = None,
        ratio: float | None = None,
        ring: np.ndarray | None = None,
    ) -> DenseScan:
        """One scan (n, 3), in the frame of the sensor or the vehicle, to its dense objects."""
        return self.densify(self.segment(points, intensity, ring), ratio)

    def segment(
        self,
        points: np.ndarray,
        intensity: np.ndarray | None = None,
        ring: np.ndarray | None = None,
    ) -> Segments:
        """What is ground and which points form an object."""
        timings: dict[str, float] = {}
        with timed(timings, "filter"):
            scan = _returns(points, intensity, ring)
        found = self.segmenter.find(scan["points"], scan.pop("ring"))
        timings = found.timings | {"filter": timings["filter"] + found.timings["filter"]}
        bias = None
        if self.config.calibrate and found.ring is not None:
            with timed(timings, "calibrate"):
                counted = found.ring_source != "field"
                if found.place is not self._seen_from:
                    self.calibration, self._seen_from = Calibration(), found.place
                seen = about_sensor(scan["points"], found.place)
                bias = self.calibration.update(seen, found.ring, counted)
        return Segments(
            ground=found.ground,
            instance=found.instance,
            ring=found.ring,
            ring_source=found.ring_source,
            height=found.height,
            bias=bias,
            place=found.place,
            timings=timings,
            **scan,
        )

    def densify(self, segments: Segments, ratio: float | None = None) -> DenseScan:
        """The instances, upsampled: round(ratio * n) points over all that the budgets allow."""
        ratio = self.config.ratio if ratio is None else check_ratio(ratio)
        timings = dict(segments.timings)
        rows = segments.instances()
        sizes = np.array([len(mine) for mine in rows], np.int64)

        # 1. how many points each instance gets, within the budgets
        with timed(timings, "ratios"):
            wanted = self._ratios(segments, rows, sizes, ratio) * sizes
            wanted, served, limited = self._within_budgets(segments, rows, sizes, wanted)
            counts = sizes.copy()  # the rest passes through
            counts[served] = apportion(wanted[served])

        # 2. the network; measured points come first
        with timed(timings, "upsample"):
            dense = self._upsample(segments, rows, served, counts)
        self._learn_pace(timings["upsample"], self._new(counts, sizes)[served].sum())

        # 3. which are sure enough, and not there for the count alone
        instance = np.repeat(np.arange(1, len(rows) + 1, dtype=np.uint32), counts)
        if self.config.min_confidence:
            sure = (dense.confidence >= self.config.min_confidence) & ~dense.filler
            sure |= ~dense.generated
            dense, instance = dense.take(np.flatnonzero(sure)), instance[sure]
        timings["total"] = sum(timings.values())
        return DenseScan(
            dense.points.astype(np.float32, copy=False),
            segments.intensity.take(dense.source),
            instance,
            dense.generated,
            dense.confidence,
            dense.source,
            segments,
            ratio,
            limited,
            timings,
        )

    def _upsample(
        self, segments: Segments, rows: list[np.ndarray], served: np.ndarray, counts: np.ndarray
    ) -> Dense:
        """All instances (k,), those served with as many points as counted."""
        where = (segments.seen, segments.instance, segments.ring, segments.height)
        scan, chosen = ObjectScan(*where, bias=segments.bias), np.flatnonzero(served)
        if len(chosen) < len(rows):
            scan = scan.only(chosen + 1)
        options = (self.config.keep_measured, self.config.spread)
        dense = self.upsampler.upsample_scan(scan, counts[chosen], *options)
        if segments.place.any():
            dense = dense.moved(from_sensor(dense.points, segments.place), segments.points)
        if len(chosen) == len(rows):
            return dense
        rest = np.concatenate([mine for mine, here in zip(rows, served, strict=True) if not here])
        together = Dense.concatenate((dense, Dense.measured(segments.points, rest)))
        return together.by_object(segments.instance)

    def _ratios(
        self, segments: Segments, rows: list[np.ndarray], sizes: np.ndarray, ratio: float
    ) -> np.ndarray:
        """Ratio of each instance: constant, or up to a density, so that far objects gain most."""
        if self.config.density == 0.0:
            return np.full(len(sizes), ratio)
        area = np.array([visible_area(segments.seen[mine]) for mine in rows])
        return np.clip(self.config.density * area / np.maximum(sizes, 1), min(1.0, ratio), ratio)

    def _new(self, counts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Points that the network makes for each instance."""
        if self.config.keep_measured:
            return np.maximum(counts - sizes, 0)
        return np.where(counts >= sizes, counts, 0)  # fewer: a choice of the measured ones

    def _within_budgets(
        self, segments: Segments, rows: list[np.ndarray], sizes: np.ndarray, wanted: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, str]:
        """Points of each instance (k,), which of them the budgets allow, and which was bound.

        Those with the fewest points come first: they gain most and cost least. Where the measured
        points alone exceed the budget, all instances are thinned to it by the same share.
        """
        served = np.ones(len(sizes), bool)
        most, least = self.config.max_points_out, np.minimum(sizes, wanted).sum()
        if most and least > most:
            thinned = np.minimum(sizes, wanted) * (most / least)
            return thinned, served, f"max_points_out: {round(least)} points thinned to {most}"
        bound = []
        order = np.argsort(sizes, kind="stable")
        counts = np.ceil(wanted).astype(np.int64)

        def limit(name: str, cost: np.ndarray, room: float) -> None:
            over = order[np.cumsum(cost[order]) > room]
            if served[over].any():
                served[over] = False
                bound.append(f"{name}: {len(over)} of {len(sizes)} instances pass through")

        if most:
            limit("max_points_out", np.maximum(counts - sizes, 0), most - least)
        if self.config.time_budget_ms and len(sizes):
            cost = self._new(counts, sizes)
            cost[order[0]] = 0  # one is always served, or a slow moment would never be forgotten
            limit("time_budget_ms", cost, self._room(segments.seen[rows[order[0]]]))
        return wanted, served, "; ".join(bound)

    def _room(self, cloud: np.ndarray) -> float:
        """New points that the time budget allows; the first time, one cloud shows the costs."""
        if self.ms_per_point is None:
            self._milliseconds(cloud, 2)  # the first call ever is slow
            few, many = self._milliseconds(cloud, 2), self._milliseconds(cloud, 32)
            self.ms_per_point = max(many - few, 0.1 * many) / (30.0 * len(cloud))
            self.overhead_ms = max(few - self.ms_per_point * len(cloud), 0.0)
        return max(self.config.time_budget_ms - self.overhead_ms, 0.0) / self.ms_per_point

    def _milliseconds(self, cloud: np.ndarray, ratio: int) -> float:
        start = time.perf_counter()
        self.upsampler.upsample(cloud, ratio, True, SENSOR)
        return 1e3 * (time.perf_counter() - start)

    def _learn_pace(self, ms: float, new_points: int) -> None:
        if self.ms_per_point is not None and new_points >= ENOUGH_TO_LEARN:
            pace = max(ms - self.overhead_ms, 0.1 * ms) / float(new_points)
            self.ms_per_point = (1 - FORGET) * self.ms_per_point + FORGET * pace


def apportion(wanted: np.ndarray) -> np.ndarray:
    """Whole counts (k,) nearest to `wanted` that add up to round(sum): largest remainders first."""
    counts = np.floor(wanted).astype(np.int64)
    missing = round(float(wanted.sum())) - counts.sum()
    counts[np.argsort(counts - wanted, kind="stable")[:missing]] += 1
    return counts


def visible_area(points: np.ndarray) -> float:
    """Square metres that points (n, 3) cover as the sensor sees them: width times height."""
    ray = points[:, :2].mean(axis=0)
    ray = ray / max(np.linalg.norm(ray), 1e-9)
    width = np.ptp(points[:, 1] * ray[0] - points[:, 0] * ray[1])
    height = np.ptp(points[:, 2])
    return max(float(width), SMALLEST_SIDE) * max(float(height), SMALLEST_SIDE)


def _returns(points: np.ndarray, intensity: np.ndarray | None, ring: np.ndarray | None) -> dict:
    """The fields of `Segments` that the input gives, without rows that are no returns."""
    points = np.asarray(points, np.float32)
    if points.ndim != 2 or points.shape[1] != 3:
        raise ValueError(f"expected points of shape (n, 3), got {points.shape}")
    intensity = np.zeros(len(points)) if intensity is None else np.asarray(intensity)
    for name, column in (("intensity", intensity), ("ring", ring)):
        if column is not None and np.shape(column) != (len(points),):
            raise ValueError(f"{len(points)} points, but {name} of shape {np.shape(column)}")
    kept, not_finite, no_return = find_returns(points)
    return dict(
        points=points[kept],
        intensity=intensity[kept].astype(np.float32, copy=False),
        rows=kept,
        ring=None if ring is None else np.asarray(ring)[kept].astype(np.int32, copy=False),
        not_finite=not_finite,
        no_return=no_return,
    )


def _load(config: PipelineConfig):
    from .upsampler import Upsampler  # imports torch

    return Upsampler.load(config.weights, config.device, config.seed, config.precision)
