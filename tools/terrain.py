# SPDX-License-Identifier: Apache-2.0
"""Objects that are ground, and objects that are found, on simulated streets that are not flat.

python -m tools.terrain ROAD_MESHES --sensors VLP-16 --streets 3
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from apusmog_core import simulate
from apusmog_core.segment import Segmenter
from apusmog_core.simulate.shapes import Mesh, solid

SENSORS = ("HDL-64E", "OS1-32", "VLP-16")
HALF, STEP = 150.0, 1.0  # metres: the ground to all sides, and from vertex to vertex
SUNK = 0.03  # metres that things stand in uneven ground
BIAS = 0.02  # metres, of each laser
FEWEST, FARTHEST = 10, 70.0  # points and metres of an object that should be found
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


def count_objects(turn: simulate.SimulatedScan) -> tuple[int, int, int]:
    """Objects found that are mostly ground, objects found, and objects that should be found."""
    instance = Segmenter()(turn.points, turn.ring)[1]
    false = sum(
        (turn.instance[instance == number] == 0).mean() > 0.5
        for number in range(1, instance.max() + 1)
    )
    found = there = 0
    for number in range(1, len(turn.names)):
        mine = turn.instance == number
        far = np.linalg.norm(turn.points[mine].mean(axis=0)) if mine.any() else np.inf
        if mine.sum() >= FEWEST and far <= FARTHEST and turn.names[number] != "building":
            votes = np.bincount(instance[mine])
            votes[0] = 0
            there += 1
            found += votes.max() >= 0.5 * mine.sum()
    return false, found, there


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("meshes", type=Path, nargs="?", help="road meshes, beside the built-in")
    parser.add_argument("--sensors", nargs="+", default=SENSORS, help="(%(default)s)")
    parser.add_argument("--streets", type=int, default=3, help="for each (%(default)s)")
    parser.add_argument("--seed", type=int, default=9900, help="of the first (%(default)s)")
    args = parser.parse_args()
    print("| ground |", " | ".join(args.sensors), "|")
    print("|---" * (1 + len(args.sensors)) + "|")
    for name, height in tqdm(GROUNDS.items(), unit="ground", disable=None):
        cells = []
        for sensor in args.sensors:
            counts = []
            for number in range(args.streets):
                device = simulate.Sensor.named(sensor).jittered(number, metres=BIAS, lift=0.25)
                scene = street_on(height, args.seed + number, args.meshes)
                counts.append(count_objects(simulate.scan(scene, device, number)))
            false, found, there = np.sum(counts, axis=0)
            cells.append(f"{false / args.streets:.1f}, {found / there:.0%}")
        tqdm.write(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
