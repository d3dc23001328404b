# SPDX-License-Identifier: Apache-2.0
"""Looking at clouds: one self-contained 3-D page (page.html)."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ..files import check_output, written_whole

TEMPLATE = Path(__file__).with_name("page.html")
STEPS = 32767  # int16 steps on each side of a moment's centre: 2 mm for a 120 m scan
MOST_BESIDE = 4  # clouds beside each other


@dataclass(frozen=True)
class DrawnObjects:
    """Dense objects as the page draws them; a pipeline's `DenseScan` has the same fields."""

    points: np.ndarray  # (m, 3)
    instance: np.ndarray  # (m,) from 1
    generated: np.ndarray  # (m,) bool
    confidence: np.ndarray | None = None  # (m,) 0 to 1


@dataclass(frozen=True)
class Moment:
    """One moment: the scan, and its dense objects at every ratio recorded."""

    name: str
    scan: np.ndarray  # (n, 3)
    dense: dict[float, DrawnObjects] = field(default_factory=dict)


def make_page(
    paths: Sequence[str | Path],
    out: str | Path = "view.html",
    ratios: Sequence[float] = (),
    pipeline=None,
    most: int = 20,
    progress: Callable[[Iterable, str, int], Iterable] = lambda items, unit, total: items,
) -> tuple[Path, str]:
    """A page of clouds, bags or folders, and what was not found.

    With ratios, a `ScanPipeline` finds the objects of each scan and upsamples them by each. Single
    clouds are shown beside each other.
    """
    from ..data import open_scans

    check_output(out, *paths)
    opened = [open_scans(path) for path in paths]
    total = sum(min(most, len(scans)) for scans in opened)
    shown = (scan for scans in opened for scan in _spread(scans, most))
    moments = [_moment(scan, ratios, pipeline) for scan in progress(shown, "scan", total)]
    objects = any(len(dense.points) for moment in moments for dense in moment.dense.values())
    notice = "" if objects or not ratios else _nothing_found(len(moments))
    beside = len(opened) > 1 and not ratios and all(len(scans) == 1 for scans in opened)
    return write_page(moments, out, _title(paths), notice=notice, beside=beside), notice


def _moment(scan, ratios: Sequence[float], pipeline) -> Moment:
    """A scan with its objects at each ratio; they are found once, so that colours stay."""
    if ratios:
        segments = pipeline.segment(scan.points, scan.intensity, scan.ring)
        dense = {ratio: pipeline.densify(segments, ratio) for ratio in ratios}
        return Moment(scan.name, scan.points, dense)
    if {"instance", "generated"} <= set(scan.fields):  # written by `apusmog scan`
        return _stored(scan)
    return Moment(scan.name, scan.points)


def _stored(scan) -> Moment:
    """A cloud that is dense already: what was measured, and its objects at the ratio it has."""
    instance, generated = scan.fields["instance"], scan.fields["generated"] > 0
    objects = np.flatnonzero(instance)
    confidence = scan.fields.get("confidence")
    dense = DrawnObjects(
        scan.points[objects],
        instance[objects],
        generated[objects],
        None if confidence is None else confidence[objects],
    )
    ratio = len(objects) / max(np.count_nonzero(~dense.generated), 1)
    found = {round(ratio, 3): dense} if len(objects) else {}
    return Moment(scan.name, scan.points[~generated], found)


def renumbered(dense: DrawnObjects, like: DrawnObjects) -> DrawnObjects:
    """The objects under their numbers in `like`, so that colours stay; by measured points."""
    old = ~like.generated.astype(bool)
    known = {p.tobytes(): int(n) for p, n in zip(like.points[old], like.instance[old], strict=True)}
    measured = ~dense.generated.astype(bool)
    points, own = dense.points[measured], dense.instance[measured]
    numbers = np.array([known.get(point.tobytes(), 0) for point in points], np.int64)
    unused, taken = max(known.values(), default=0), set()
    instance = np.zeros_like(dense.instance)
    for number in np.unique(dense.instance):
        votes = np.bincount(numbers[own == number], minlength=1)
        new = int(votes.argmax())
        if new == 0 or new in taken:  # an object that was not there, or a part of one
            unused += 1
            new = unused
        taken.add(new)
        instance[dense.instance == number] = new
    return replace(dense, instance=instance)


def _nothing_found(scans: int) -> str:
    from ..pipeline import TO_FIND_OBJECTS

    return f"no objects found in {scans} scan{'s' if scans != 1 else ''}: {TO_FIND_OBJECTS}"


def _title(paths: Sequence[str | Path]) -> str:
    names = [Path(path).resolve().name for path in paths]
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} and {len(names) - 1} more"


def _spread(scans, count: int):
    """At most `count` scans, evenly spaced over all of them."""
    keep = set(np.linspace(0, len(scans) - 1, min(count, len(scans))).round().astype(int).tolist())
    return (scan for index, scan in enumerate(scans) if index in keep)


# --- the page ------------------------------------------------------------------------------------


def write_page(
    moments: Sequence[Moment],
    out: str | Path,
    title: str = "APU-SMOG",
    scan_points: int = 1_000_000,
    notice: str = "",
    beside: bool = False,
) -> Path:
    """One HTML file that needs no network; scans share `scan_points` and are thinned to fit.

    `notice` is a sentence for the reader; `beside` shows the moments next to each other at first.
    """
    moments = [_wide(moment) for moment in moments if len(moment.scan)]
    if not moments:
        raise ValueError(f"{out}: there is no point to show")
    share = scan_points // len(moments)
    page = dict(
        title=title,
        notice=notice,
        beside=beside and 1 < len(moments) <= MOST_BESIDE,
        **_home(moments),
        moments=[_pack_moment(f, share) for f in moments],
    )
    # no name may end the script or begin a comment in it, and JSON knows no NaN
    data = json.dumps(page, allow_nan=False).replace("<", "\\u003c")
    with written_whole(out) as place:
        place.write_text(TEMPLATE.read_text("utf-8").replace("/*DATA*/", data), "utf-8")
    return Path(out)


def _wide(moment: Moment) -> Moment:
    """A moment whose coordinates can be multiplied: float32 could overflow."""
    return replace(moment, scan=moment.scan.astype(np.float64))


def _home(moments: Sequence[Moment]) -> dict:
    """Where the camera starts: at the first objects there are, or at the whole cloud."""
    first = moments[0]
    dense = [d.points for moment in moments for d in moment.dense.values() if len(d.points)]
    if dense:
        target = np.median(dense[0], axis=0)
        radius = np.quantile(np.linalg.norm(dense[0] - target, axis=1), 0.65)
    else:
        target = (first.scan.min(axis=0) + first.scan.max(axis=0)) / 2
        away = np.linalg.norm(first.scan - target, axis=1)
        radius = away.max()
        if radius > 2 * np.quantile(away, 0.9):  # a scan: its farthest returns are few
            target = np.median(first.scan, axis=0)
            radius = np.quantile(np.linalg.norm(first.scan - target, axis=1), 0.9)
    low, high = np.quantile(first.scan[:, 2], (0.005, 0.995))
    extent = max(np.ptp(moment.scan, axis=0).max() for moment in moments)
    return dict(
        target=target.tolist(),
        radius=max(float(radius), 1e-3),
        extent=max(float(extent), 1e-3),
        heights=[float(low), float(max(high, low + 1e-3))],
    )


def _pack_moment(moment: Moment, scan_points: int) -> dict:
    everything = np.vstack([moment.scan, *(d.points for d in moment.dense.values())])
    low, high = everything.min(axis=0), everything.max(axis=0)
    centre, extent = (low + high) / 2, max(float((high - low).max()) / 2, 1e-6)

    def pack(points: np.ndarray, tag: np.ndarray, *more: np.ndarray) -> dict:
        grid = np.rint((points - centre) / extent * STEPS).astype("<i2")
        columns = grid.T.tobytes() + tag.astype("<u2").tobytes()
        columns += b"".join(column.tobytes() for column in more)
        data = base64.b64encode(zlib.compress(columns, 9)).decode()
        return dict(count=len(points), data=data)

    def pack_dense(ratio: float, dense: DrawnObjects) -> dict:
        # 15 bits hold the instance; beyond them colours repeat, 0 stays the scan's
        instance = (dense.instance.astype(np.int64) - 1) % 32767 + 1
        tag = 2 * instance + dense.generated.astype(bool)
        sure = [] if dense.confidence is None else [_as_bytes(dense.confidence)]
        return dict(
            ratio=ratio,
            measured=int(np.count_nonzero(~dense.generated.astype(bool))),
            instances=len(np.unique(dense.instance)),
            confidence=bool(sure),
            **pack(dense.points, tag, *sure),
        )

    step = max(1, -(-len(moment.scan) // scan_points))
    scan = moment.scan[::step]
    return dict(
        name=moment.name,
        centre=centre.tolist(),
        extent=extent,
        total=len(moment.scan),
        scan=pack(scan, np.zeros(len(scan))),
        dense=[pack_dense(float(r), d) for r, d in sorted(moment.dense.items())],
    )


def _as_bytes(share: np.ndarray) -> np.ndarray:
    """0 to 1 as 0 to 255."""
    return np.rint(255 * np.clip(np.nan_to_num(share), 0, 1)).astype(np.uint8)
