# SPDX-License-Identifier: Apache-2.0
"""Which objects are found on simulated streets, and which are none: by the ground, by range.

python -m tools.found ROAD_MESHES            # streets that are not flat
python -m tools.found ROAD_MESHES --far      # long streets, up to 200 m
python -m tools.found ROAD_MESHES --far --sensors VLP-16 --shift 1.3 0 1.9    # as in base_link
python -m tools.found ROAD_MESHES --far --sensors VLP-16+VLP-16 HDL-64E+VLP-16+VLP-16    # merged
python -m tools.found ROAD_MESHES --far --sensors rosette-360 rosette-70      # no rings
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from scipy.spatial.transform import Rotation
from tqdm import tqdm

from apusmog_core import DenseScan, PipelineConfig, ScanPipeline, simulate
from apusmog_core.evaluation.rings import distance_to
from apusmog_core.segment import Segmenter
from apusmog_core.sensor.lattice import LATTICE
from apusmog_core.simulate.shapes import Mesh, solid

SENSORS = {False: ("HDL-64E", "OS1-32", "VLP-16"), True: ("Pandar64", "HDL-64E", "VLP-32C")}
HALF, STEP = 150.0, 1.0  # metres: the ground to all sides, and from vertex to vertex
SUNK = 0.03  # metres that things stand in uneven ground
BIAS = 0.02  # metres, of each laser
FEWEST, FARTHEST = 10, 70.0  # points and metres of an object that should be found
ROSETTE_SHOTS, ROSETTE_LINES, ROSETTE_REACH = 24_000, 4, 100.0  # a scan, metres
LONG, RANGES = 480.0, ((0, 75), (75, 120), (120, 200))  # metres
MIDDLE = 1.75  # y of the middle of the road

Height = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of the ground at x, y


def waves(height: float) -> Height:
    """So high from trough to crest, 20 m and 27 m long; level where the sensor stands."""

    def at(x, y):
        swell = np.sin(2 * np.pi * x / 20) * np.cos(2 * np.pi * y / 27)
        return height / 2 * swell * (np.hypot(x, y) > 6)

    return at


GROUNDS: dict[str, Height] = {
    "flat": lambda x, y: 0 * x,
    "waves of .2 m": waves(0.2),
    "waves of .5 m": waves(0.5),
    "kerbs of .15 m": lambda x, y: 0.15 * ((y < -5.4) | (y > 8.9)),
    "camber of 3 %": lambda x, y: -0.03 * np.abs(y - MIDDLE),
    "falling 8 % from 15 m on": lambda x, y: -0.08 * np.maximum(np.abs(x) - 15, 0),
    "rising 8 % from 15 m on": lambda x, y: 0.08 * np.maximum(np.abs(x) - 15, 0),
    "banks of 27 degrees, 3 m high": lambda x, y: np.clip((np.abs(y - MIDDLE) - 11) / 2, 0, 3),
}


def ground_mesh(height: Height) -> Mesh:
    ticks = np.arange(-HALF, HALF + STEP, STEP)
    x, y = np.meshgrid(ticks, ticks, indexing="ij")
    number = np.arange(x.size).reshape(x.shape)
    a, b, c, d = (
        corner.ravel()
        for corner in (number[:-1, :-1], number[1:, :-1], number[1:, 1:], number[:-1, 1:])
    )
    faces = np.concatenate([np.stack([a, b, c], 1), np.stack([a, c, d], 1)])
    vertices = np.stack([x, y, height(x, y)], axis=-1).reshape(-1, 3)
    return solid(vertices, faces, simulate.sensor.GROUND_REFLECTIVITY)


def street_on(height: Height, seed: int, meshes: Path | None) -> simulate.Scene:
    """A street whose things stand on uneven ground."""
    things = []
    for thing in simulate.street(seed, meshes).objects:
        level = float(height(np.float64(thing.x), np.float64(thing.y)))
        things.append(replace(thing, mesh=thing.mesh.moved((0, 0, level - SUNK))))
    return simulate.Scene(things, ground_mesh(height))


def count_objects(
    turn: simulate.SimulatedScan, instance: np.ndarray, reach: tuple[float, float] = (0, FARTHEST)
) -> tuple[int, int, int]:
    """Objects found within reach that are mostly ground, objects that should be found there, and
    how many of these are."""

    def away(mine: np.ndarray) -> bool:
        return reach[0] <= np.linalg.norm(turn.points[mine].mean(axis=0)) < reach[1]

    found = (instance == number for number in range(1, instance.max() + 1))
    false = sum((turn.instance[mine] == 0).mean() > 0.5 and away(mine) for mine in found)
    held = there = 0
    for number in range(1, len(turn.names)):
        mine = turn.instance == number
        if mine.sum() >= FEWEST and turn.names[number] != "building" and away(mine):
            votes = np.bincount(instance[mine])
            votes[0] = 0
            there += 1
            held += votes.max() >= 0.5 * mine.sum()
    return false, there, held


def turns(
    sensor: str, scene_of: Callable[[int], simulate.Scene], seed: int, streets: int
) -> Iterator[tuple[simulate.Scene, np.ndarray, simulate.SimulatedScan]]:
    """Streets, where the frame of the scan has its origin (3,) in each, and the scan."""
    for number in range(streets):
        scene = scene_of(seed + number)
        if sensor in ROSETTES:
            device = simulate.Sensor.named()
            turn = rosette_scan(scene, device, ROSETTES[sensor], number)
        elif "+" in sensor:
            yield scene, np.zeros(3), merged_scan(scene, sensor.split("+"), number)
            continue
        else:
            device = simulate.Sensor.named(sensor).jittered(number, metres=BIAS, lift=0.25)
            turn = simulate.scan(scene, device, number)
        yield scene, np.array((0, 0, device.height)), turn


def merged_scan(scene: simulate.Scene, names: list[str], seed: int) -> simulate.SimulatedScan:
    """Several sensors on a roof, in the frame of the vehicle: on its axis or left and right."""
    scans = []
    for number, name in enumerate(names):
        side = 0.8 * (-1) ** number if number or len(names) == 2 else 0.0
        place, yaw = np.float32((1.0, side, 1.8 if side else 2.0)), 0.3 * side
        device = simulate.Sensor.named(name, height=float(place[2])).jittered(seed, metres=BIAS)
        turn = simulate.scan(scene, device, seed + number, (*place[:2], yaw))
        points = Rotation.from_euler("z", yaw).apply(turn.points).astype(np.float32) + place
        scans.append(replace(turn, points=points))
    columns = ("points", "intensity", "ring", "azimuth", "instance")
    return simulate.SimulatedScan(
        *(np.concatenate([getattr(turn, name) for turn in scans]) for name in columns), scene.names
    )


def rosette_360(time: np.ndarray, phase: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Azimuths and elevations (n,) all around, -7 to 52 degrees, as of a Livox Mid-360."""
    rise = np.sin(2 * np.pi * (611.3 * time + phase[1]))
    return 2 * np.pi * (150.8 * time + phase[0]), np.radians(22.5 + 29.5 * rise)


def rosette_70(time: np.ndarray, phase: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Azimuths and elevations (n,) in a cone to the front, as of a Livox Avia."""
    away = np.radians(38) * np.abs(np.sin(2 * np.pi * (797.1 * time + phase[0])))
    turn = 2 * np.pi * (131.7 * time + phase[1])
    return away * np.cos(turn), 0.9 * away * np.sin(turn)


ROSETTES = {"rosette-360": rosette_360, "rosette-70": rosette_70}


def rosette_scan(
    scene: simulate.Scene, device: simulate.Sensor, pattern: Callable, seed: int
) -> simulate.SimulatedScan:
    """A tenth of a second of a sensor whose lasers, the field `line`, draw rosettes."""
    rng = np.random.default_rng(seed)
    shot = np.arange(ROSETTE_SHOTS)
    azimuth, elevation = pattern(shot / len(shot), rng.random(2))
    elevation = elevation + np.radians(rng.uniform(-0.2, 0.2, len(shot)))
    rays = simulate.unit_rays(azimuth, elevation)
    hits = scene.hits(rays, simulate.origin_of(device, (0, 0, 0)))
    kept = np.flatnonzero((hits.range < ROSETTE_REACH) & (hits.reflectivity > 0))
    reach = hits.range[kept] + rng.normal(0, BIAS, len(kept))
    return simulate.SimulatedScan(
        points=(rays[kept] * reach[:, None]).astype(np.float32),
        intensity=hits.reflectivity[kept],
        ring=shot[kept] % ROSETTE_LINES,
        azimuth=azimuth[kept].astype(np.float32),
        instance=hits.instance[kept],
        names=scene.names,
    )


def by_ground(args: argparse.Namespace) -> Iterator[list[str]]:
    """Rows of the table: false objects a scan, and the share of objects that are found."""
    yield ["ground", *args.sensors]
    for name, height in tqdm(GROUNDS.items(), unit="ground", disable=None):
        cells = []
        for sensor in args.sensors:
            street = partial(street_on, height, meshes=args.meshes)
            counts = [
                count_objects(turn, Segmenter()(turn.points, turn.ring)[1])
                for _, _, turn in turns(sensor, street, args.seed, args.streets)
            ]
            false, there, held = np.sum(counts, axis=0)
            cells.append(f"{false / args.streets:.1f}, {held / there:.0%}")
        yield [name, *cells]


def by_range(args: argparse.Namespace) -> Iterator[list[str]]:
    """Rows of the table: objects that are found, false ones, and how right new points are."""
    yield ["sensor", "metres", "found", "false", "new points", "within 10 cm", "mean confidence"]
    upsampler = ScanPipeline().upsampler
    for sensor in tqdm(args.sensors, unit="sensor", disable=None):
        counts, sure, right = np.zeros((len(RANGES), 3), int), {}, {}
        street = partial(simulate.street, meshes=args.meshes, length=LONG)
        pipeline = ScanPipeline(PipelineConfig(), upsampler)
        for scene, frame, turn in turns(sensor, street, args.seed, args.streets):
            turn = replace(turn, points=turn.points + np.float32(args.shift))
            dense = pipeline.process(turn.points, turn.intensity, ring=turn.ring)
            instance = np.zeros(len(turn.points), np.int64)
            instance[dense.segments.rows] = dense.segments.instance
            for n, reach in enumerate(RANGES):
                counts[n] += count_objects(turn, instance, reach)
                told, near = confidence_and_truth(scene, frame - args.shift, turn, dense, reach)
                sure.setdefault(n, []).append(told)
                right.setdefault(n, []).append(near)
        for n, (low, high) in enumerate(RANGES):
            false, there, held = counts[n]
            told, near = np.concatenate(sure[n]), np.concatenate(right[n])
            share = [f"{near.mean():.2f}", f"{told.mean():.2f}"] if len(near) else ["-", "-"]
            cells = (f"{low}-{high}", f"{held} of {there}", str(false), str(len(near)))
            yield [sensor, *cells, *share]


def confidence_and_truth(
    scene: simulate.Scene,
    frame: np.ndarray,
    turn: simulate.SimulatedScan,
    dense: DenseScan,
    reach: tuple[float, float],
) -> tuple[np.ndarray, np.ndarray]:
    """Confidence (m,) of the new points of solid objects at these ranges, and whether (m,) the
    surface is within the tolerance."""
    thing = turn.instance[dense.segments.rows[dense.source]]
    away = np.linalg.norm(dense.points, axis=1)
    new = dense.generated & (away >= reach[0]) & (away < reach[1])
    sure, right = [np.zeros(0)], [np.zeros(0, bool)]
    for number in np.unique(thing[new & (thing > 0)]):
        placed = scene.objects[number - 1]
        if placed.name not in ("bush", "tree"):
            mine = new & (thing == number)
            sure.append(dense.confidence[mine])
            error = distance_to(placed.world, frame)(dense.points[mine])
            right.append(error <= LATTICE.tolerance)
    return np.concatenate(sure), np.concatenate(right)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("meshes", type=Path, nargs="?", help="road meshes, beside the built-in")
    parser.add_argument("--far", action="store_true", help="by range, on long streets")
    parser.add_argument("--sensors", nargs="+", help="(three, of the kind asked for)")
    parser.add_argument(
        "--shift", type=float, nargs=3, default=(0, 0, 0), help="metres, of the sensor's frame"
    )
    parser.add_argument("--streets", type=int, default=4, help="for each (%(default)s)")
    parser.add_argument("--seed", type=int, default=9900, help="of the first (%(default)s)")
    args = parser.parse_args()
    args.shift = np.array(args.shift)
    args.sensors = args.sensors or SENSORS[args.far]
    for number, row in enumerate(by_range(args) if args.far else by_ground(args)):
        tqdm.write(f"| {' | '.join(row)} |")
        if number == 0:
            tqdm.write("|---" * len(row) + "|")


if __name__ == "__main__":
    main()
