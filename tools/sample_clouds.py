# SPDX-License-Identifier: Apache-2.0
"""Make the clouds that ship with the package, of built-in shapes: python -m tools.sample_clouds"""

from __future__ import annotations

import numpy as np

from apusmog_core.sample_clouds import STORED, pack
from apusmog_core.simulate.objects import BUILDERS
from apusmog_core.simulate.sensor import Placed, Scene, Sensor, SimulatedScan, scan
from apusmog_core.simulate.street import street

from .ratios import SHAPE_POINTS, knot, sample_mesh

SENSORS = {"hdl64e": "HDL-64E", "vlp16": "VLP-16"}
OBJECTS = {"car": 2.15, "person": 1.35}  # heading of each, radians
RANGE = {"hdl64e": 20.0, "vlp16": 8.0}  # metres: where the rings still show what it is
STREET = 19  # seed of a street with cars, persons and a cyclist near the sensor


def make_sample_clouds(seed: int = 0) -> dict[str, np.ndarray]:
    """All clouds by name, as they are stored."""
    stored = {"shape": sample_mesh(knot(), SHAPE_POINTS, seed)}
    for short, name in SENSORS.items():
        sensor = Sensor.named(name).jittered(seed)
        for kind, heading in OBJECTS.items():
            body = BUILDERS[kind](np.random.default_rng(seed))
            scene = Scene([Placed(body, kind, RANGE[short], 0.0, heading)])
            stored[f"{kind}_{short}"] = _packed(scan(scene, sensor, seed), instance=1)
        stored[f"street_{short}"] = _packed(scan(street(STREET), sensor, seed))
    return stored


def _packed(turn: SimulatedScan, instance: int | None = None) -> np.ndarray:
    own = slice(None) if instance is None else turn.instance == instance
    return pack(turn.points[own].astype(np.float64), turn.intensity[own], turn.ring[own])


def main() -> None:
    np.savez_compressed(STORED, **make_sample_clouds())
    print(f"{STORED}: {STORED.stat().st_size} bytes")


if __name__ == "__main__":
    main()
