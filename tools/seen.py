# SPDX-License-Identifier: Apache-2.0
"""Simulated objects for pictures: what a sensor returned of one, and what it could have seen."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from apusmog_core.sensor.view import ObjectScan
from apusmog_core.simulate import objects, unit_rays
from apusmog_core.simulate.sensor import Placed, Scene, Sensor, origin_of, scan, visible_surface

OBJECTS = {"car": 2.15, "cyclist": 1.15, "person": 1.35}  # heading of each, radians
HERE = (0.0, 0.0, 0.0)


@dataclass(frozen=True, eq=False)
class Seen:
    """One object on open ground, instance 1 of the scan."""

    scan: ObjectScan
    truth: np.ndarray  # (m, 3) of the surface that the sensor can see
    scene: Scene
    sensor: Sensor

    @property
    def points(self) -> np.ndarray:
        return self.scan.points[self.scan.instance == 1]

    def meets(self, azimuth: np.ndarray, elevation: np.ndarray) -> np.ndarray:
        """Whether rays (n,) meet the object and come back; glass returns nothing."""
        hits = self.scene.hits(unit_rays(azimuth, elevation), origin_of(self.sensor, HERE))
        return (hits.instance == 1) & (hits.reflectivity > 0)


def see(kind: str, distance: float, seed: int = 0) -> Seen:
    """An object of this kind straight ahead of an HDL-64E."""
    body = objects.BUILDERS[kind](np.random.default_rng(seed))
    scene = Scene([Placed(body, kind, distance, 0.0, OBJECTS[kind])])
    sensor = Sensor.named("HDL-64E").jittered(seed)
    turn = scan(scene, sensor, seed)
    finer = (round(2 * distance), round(0.4 * distance))  # about a centimetre apart at any range
    truth = visible_surface(scene, sensor, 1, oversample=finer)
    height = turn.points[:, 2] + sensor.height
    whole = ObjectScan(turn.points, turn.instance.astype(np.int64), turn.ring, height)
    return Seen(whole, truth, scene, sensor)


def keep_rings(seen: Seen, stride: int) -> Seen:
    """The object as a sensor with only every `stride`-th ring would have measured it."""
    whole = seen.scan
    kept = whole.ring % stride == 0
    columns = ("points", "instance", "ring", "height")
    return replace(
        seen, scan=replace(whole, **{name: getattr(whole, name)[kept] for name in columns})
    )
