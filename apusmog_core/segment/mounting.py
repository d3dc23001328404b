# SPDX-License-Identifier: Apache-2.0
"""How the sensor is mounted: height above the ground, roll and pitch, from the first scans."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import numpy as np
from scipy.spatial.transform import Rotation

from ..config import GroundConfig

USUAL_HEIGHT = 1.73  # metres, where no scan shows the ground
SCANS, TRIES = 10, 50  # scans whose median is the mounting (the first one counts already), at most
REACH = 25.0  # metres within which the ground is looked for
CELL = 1.0  # metres: near ground has a thousand times the points of far ground
CLOSE = 8.0  # metres: the sensor stands on what is near, not on what is farther away
TRIALS, TRIED, THICKNESS = 400, 1000, 0.1  # planes, cells that judge them, metres
STEEPEST = np.cos(np.radians(50))  # planes more upright than this are no ground
LOWEST, HIGHEST = 0.15, 8.0  # metres that the sensor may be above the ground
INVERTED = 2.0  # how much better a ground above the sensor must fit: it may be a ceiling
SUPPORT = 0.2  # of all cells, less those below the plane: walls and desks fall short
FEWEST = 3  # cells on the plane, all of them close by
NO_GROUND = (
    f"no ground in {TRIES} scans: give scans in the frame of the sensor or the vehicle, or set "
    "ground.sensor_height, or ground.method none"
)
CONTRADICTION = 0.25  # metres, and as share of the height: more is worth a warning


@dataclass(frozen=True)
class Mounting:
    """The sensor above the ground; roll and pitch turn its points upright, see `level`."""

    height: float  # metres
    roll: float  # degrees
    pitch: float
    source: str = "default"  # estimated, set, or default where nothing is known yet
    warning: str = ""

    @property
    def text(self) -> str:
        """One line for people."""
        return f"{self.height:.2f} m, roll {self.roll:.1f}, pitch {self.pitch:.1f} ({self.source})"

    @property
    def rotation(self) -> np.ndarray | None:
        """(3, 3) float32 from the sensor's frame to an upright one; None where they are one."""
        if self.roll == self.pitch == 0.0:
            return None
        turn = Rotation.from_euler("xy", (self.roll, self.pitch), degrees=True)
        return turn.as_matrix().astype(np.float32)

    def level(self, points: np.ndarray) -> np.ndarray:
        """Points (n, 3) turned so that z is up."""
        turn = self.rotation
        if turn is None:
            return points
        x, y, z = points.T  # threads of a matrix product would wait for cores that others use
        return np.stack([a * x + b * y + c * z for a, b, c in turn], axis=1)


class MountingEstimate:
    """Mounting of one stream of scans: as set, or learned from the first scans."""

    def __init__(self, config: GroundConfig):
        self.config = config
        self._planes: list[np.ndarray] = []
        self._scans = 0
        self._lock = threading.Lock()
        if config.sensor_height > 0:
            self.mounting = Mounting(config.sensor_height, config.roll, config.pitch, "set")
        else:
            self.mounting = Mounting(USUAL_HEIGHT, config.roll, config.pitch)

    def __call__(self, points: np.ndarray) -> Mounting:
        """The mounting, given one more scan (n, 3)."""
        with self._lock:
            if len(self._planes) < SCANS and self._scans < TRIES:
                self._scans += 1
                plane = find_ground_plane(points)
                if plane is not None:
                    self._planes.append(plane)
                    self.mounting = self._combined()
                elif self._scans == TRIES and not self._planes:
                    self.mounting = replace(self.mounting, warning=NO_GROUND)
            return self.mounting

    def _combined(self) -> Mounting:
        normal = np.median(self._planes, axis=0)
        height, normal = float(normal[3]), normal[:3] / np.linalg.norm(normal[:3])
        roll, pitch = upright_angles(normal)
        config = self.config
        if config.sensor_height == 0:
            return Mounting(round(height, 2), round(roll, 1), round(pitch, 1), "estimated")
        off = abs(height - config.sensor_height)
        warning = ""
        if off > CONTRADICTION * max(1.0, config.sensor_height):
            warning = (
                f"ground.sensor_height is {config.sensor_height:g}, but the scans show the ground "
                f"{height:.2f} m below the sensor; set {height:.2f}, or 0 for automatic"
            )
        return Mounting(config.sensor_height, config.roll, config.pitch, "set", warning)


def upright_angles(normal: np.ndarray) -> tuple[float, float]:
    """Roll and pitch, in degrees, that turn this upward normal to z: first about x, then y."""
    roll = np.arctan2(normal[1], normal[2])
    pitch = np.arctan2(-normal[0], np.hypot(normal[1], normal[2]))
    return float(np.degrees(roll)), float(np.degrees(pitch))


def find_ground_plane(points: np.ndarray) -> np.ndarray | None:
    """Upward normal and height of the sensor above it (4,), or None where no plane is ground.

    The ground is the plane that most of the area around the sensor lies on, with little below.
    """
    near = points[(np.abs(points) < REACH).all(axis=1)]
    if len(near) < FEWEST:
        return None
    cells = _one_each(near, CELL)
    rng = np.random.default_rng(0)
    spread = near[rng.permutation(cells)[:TRIED]].astype(np.float64)
    triples = rng.integers(0, len(spread), (TRIALS, 3))
    planes = _planes(spread, triples)
    up, up_score = _best_plane(planes[planes[:, 2] > 0], spread)
    down, down_score = _best_plane(planes[planes[:, 2] <= 0], spread)
    plane, score = (down, down_score) if down_score > INVERTED * up_score else (up, up_score)
    if score < max(FEWEST, SUPPORT * _weights(spread).sum()):
        return None
    return _refined(plane, near.astype(np.float64))


def _one_each(points: np.ndarray, cell: float) -> np.ndarray:
    """Index of the first point in each voxel of the space around the sensor."""
    side = int(2 * REACH / cell) + 1
    x, y, z = ((points + REACH) / cell).astype(np.int64).T
    return np.sort(np.unique((x * side + y) * side + z, return_index=True)[1])


def _weights(points: np.ndarray) -> np.ndarray:
    """How much each point counts (n,), less with distance."""
    return 1 / (1 + np.einsum("nd,nd->n", points, points) / CLOSE**2)


def _best_plane(planes: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, float]:
    """The plane (4,) that most points lie on, less those below it, and its score."""
    if len(planes) == 0:
        return np.zeros(4), 0.0
    above = planes[:, :3] @ points.T + planes[:, 3:]  # (planes, points)
    vote = (np.abs(above) < THICKNESS).astype(np.float64) - (above < -3 * THICKNESS)
    scores = vote @ _weights(points)
    best = int(scores.argmax())
    return planes[best], max(float(scores[best]), 0.0)


def _planes(points: np.ndarray, triples: np.ndarray) -> np.ndarray:
    """Planes (k, 4) through triples (t, 3) of points that may be ground, facing the sensor."""
    a, b, c = points[triples.T]
    normal = np.cross(b - a, c - a)
    length = np.linalg.norm(normal, axis=1)
    flat = (length >= 1e-3) & (np.abs(normal[:, 2]) >= STEEPEST * length)
    normal = normal[flat] / length[flat, None]
    height = -np.einsum("td,td->t", normal, a[flat])
    side = np.where(height < 0, -1.0, 1.0)[:, None]
    planes = side * np.column_stack((normal, height))
    return planes[(planes[:, 3] >= LOWEST) & (planes[:, 3] <= HIGHEST)]


def _refined(plane: np.ndarray, points: np.ndarray) -> np.ndarray:
    """A least-squares plane through the points close to this one."""
    for _ in range(2):
        on = points[np.abs(points @ plane[:3] + plane[3]) < THICKNESS]
        on = on[_one_each(on, CELL / 2)]
        if len(on) < 3:
            return plane
        middle = on.mean(axis=0)
        normal = np.linalg.svd(on - middle, full_matrices=False)[2][2]
        normal *= np.sign(normal @ plane[:3])
        plane = np.append(normal, -normal @ middle)
    return plane
