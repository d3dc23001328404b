# SPDX-License-Identifier: Apache-2.0
"""KITTI: raw drives and odometry sequences, with time stamps, poses and labelled boxes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from .clouds import SCAN_PERIOD, ScanFiles

EARTH_RADIUS = 6378137.0  # metres, WGS 84, as in KITTI's development kit


@dataclass(frozen=True, eq=False)
class Box:
    """A labelled object in one scan, in the sensor's coordinates."""

    label: str
    centre: np.ndarray  # (3,) of the bottom face, metres
    size: np.ndarray  # (3,) length, width, height
    yaw: float

    def contains(self, points: np.ndarray, margin: float = 0.0) -> np.ndarray:
        """Which points (n, 3) lie in the box enlarged by `margin` on every side: (n,) bool."""
        near = np.abs(points - self.centre).max(axis=1) < self.size.max() + 2 * margin
        c, s = math.cos(self.yaw), math.sin(self.yaw)
        local = (points[near] - self.centre) @ np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])
        local[:, 2] -= self.size[2] / 2
        near[near] = (np.abs(local) <= self.size / 2 + margin).all(axis=1)
        return near


class KittiDrive(ScanFiles):
    """One raw drive or odometry sequence; scans are known by the number in the file's name."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        raw = self.folder / "velodyne_points" / "data"
        self.raw = raw.is_dir()
        files = sorted((raw if self.raw else self.folder / "velodyne").glob("*.bin"))
        if not files:
            raise ValueError(f"{self.folder}: no scans (.bin) in this KITTI folder")
        self.numbers = [_number(file, at) for at, file in enumerate(files)]
        times = self._times()  # also of numbers whose scan is missing, as in drive 0009
        stamps = [times[n] if n < len(times) else n * SCAN_PERIOD for n in self.numbers]
        super().__init__(files, stamps)

    def _times(self) -> list[float]:
        file = self.folder / ("velodyne_points/timestamps.txt" if self.raw else "times.txt")
        if not file.is_file():
            return []
        parse = _seconds if self.raw else float
        try:
            return [parse(line) for line in file.read_text().split("\n") if line.strip()]
        except (OSError, ValueError) as error:
            raise ValueError(f"{file}: {error}") from error

    @cached_property
    def boxes(self) -> dict[int, list[Box]]:
        """Labelled boxes by number of the scan; empty where the drive has no tracklets."""
        file = self.folder / "tracklet_labels.xml"
        return read_tracklets(file) if file.is_file() else {}

    @cached_property
    def poses(self) -> np.ndarray | None:
        """Sensor to first sensor frame, (scans, 4, 4), of a raw drive with oxts; None without."""
        files = [self.folder / "oxts" / "data" / f"{file.stem}.txt" for file in self.files]
        if not all(file.is_file() for file in files):
            return None
        calibration = self.folder / "calib_imu_to_velo.txt"
        if not calibration.is_file():  # the published layout keeps it with the date
            calibration = self.folder.parent / "calib_imu_to_velo.txt"
        imu_to_velo = read_transform(calibration) if calibration.is_file() else np.eye(4)
        world = oxts_poses([_read_oxts(file) for file in files])  # IMU to world
        world = world @ np.linalg.inv(imu_to_velo)
        return np.linalg.inv(world[0]) @ world


def tracklet_recall(
    drive: KittiDrive, labels: Sequence[np.ndarray], least: int = 30
) -> tuple[int, int]:
    """How many labelled objects with `least` points there are, and how many one cluster found.

    `labels` are the instances of each scan's points, 0 for none. Found: the cluster holds 80 % of
    the points in the box, and 80 % of the cluster lie in the box enlarged by 0.3 m.
    """
    objects = found = 0
    for scan, number, label in zip(drive, drive.numbers, labels, strict=True):
        for box in drive.boxes.get(number, []):
            inside = label[box.contains(scan.points)]
            if len(inside) < least:
                continue
            votes = np.bincount(inside)
            votes[0] = 0
            whole = scan.points[label == votes.argmax()]
            held = votes.max() >= 0.8 * len(inside)
            objects += 1
            found += bool(held and box.contains(whole, margin=0.3).mean() >= 0.8)
    return objects, found


def read_tracklets(path: str | Path) -> dict[int, list[Box]]:
    """Boxes of a `tracklet_labels.xml`, by number of the scan."""
    try:
        tracklets = ElementTree.parse(path).getroot().find("tracklets")
        boxes: dict[int, list[Box]] = {}
        for item in tracklets.findall("item"):
            label = item.find("objectType").text
            size = np.array([float(item.find(name).text) for name in "lwh"])
            first = int(item.find("first_frame").text)
            for at, pose in enumerate(item.find("poses").findall("item")):
                centre = np.array([float(pose.find(name).text) for name in ("tx", "ty", "tz")])
                box = Box(label, centre, size, float(pose.find("rz").text))
                boxes.setdefault(first + at, []).append(box)
    except (OSError, ElementTree.ParseError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a readable file of tracklets ({error})") from error
    return boxes


def read_transform(path: str | Path) -> np.ndarray:
    """A calibration file's R and T as one (4, 4) matrix."""
    try:
        text = Path(path).read_text()
        lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        transform = np.eye(4)
        transform[:3, :3] = np.array(lines["R"].split(), float).reshape(3, 3)
        transform[:3, 3] = np.array(lines["T"].split(), float).reshape(3)
        if not 0.5 < np.linalg.det(transform) < 2.0:  # not so for NaN either
            raise ValueError("R is no rotation")
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{path}: expected a rotation R and a translation T ({error})") from error
    return transform


def oxts_poses(packets: Sequence[np.ndarray]) -> np.ndarray:
    """IMU to a local metric world, (n, 4, 4); a packet starts lat, lon, alt, roll, pitch, yaw."""
    from scipy.spatial.transform import Rotation  # slow to load, and few need it

    poses = np.tile(np.eye(4), (len(packets), 1, 1))
    scale = math.cos(math.radians(packets[0][0]))  # of the Mercator projection
    for pose, (lat, lon, alt, roll, pitch, yaw, *_) in zip(poses, packets, strict=True):
        x = scale * EARTH_RADIUS * math.radians(lon)
        y = scale * EARTH_RADIUS * math.log(math.tan(math.radians(90 + lat) / 2))
        pose[:3, :3] = Rotation.from_euler("xyz", (roll, pitch, yaw)).as_matrix()
        pose[:3, 3] = x, y, alt
    return poses


def _read_oxts(file: Path) -> np.ndarray:
    """A packet of at least lat, lon, alt, roll, pitch, yaw."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an empty file
            packet = np.loadtxt(file, ndmin=1).ravel()
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
    if len(packet) < 6 or not np.isfinite(packet[:6]).all() or not abs(packet[0]) < 90:
        raise ValueError(f"{file}: expected lat, lon, alt, roll, pitch and yaw")
    return packet


def _number(file: Path, at: int) -> int:
    return int(file.stem) if file.stem.isdecimal() else at


def _seconds(stamp: str) -> float:
    """'2011-09-26 13:02:25.594360375' in seconds since 1970, as exact as a float can be."""
    whole, _, fraction = stamp.strip().partition(".")
    moment = datetime.strptime(whole, "%Y-%m-%d %H:%M:%S").replace(tzinfo=timezone.utc)
    return moment.timestamp() + float(f"0.{fraction or 0}")
