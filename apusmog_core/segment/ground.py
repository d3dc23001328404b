# SPDX-License-Identifier: Apache-2.0
"""Which points are ground: by terrain.py where the sensor's rings are known, which is the default;
otherwise Patchwork++ where installed, else a grid of lowest points."""

from __future__ import annotations

import importlib.util
import threading

import numpy as np

from ..compute import machine_code, silenced
from ..config import GroundConfig
from .mounting import Mounting, MountingEstimate
from .rings import Rings
from .terrain import Terrain, find_terrain

PLENTY, ENOUGH = 35.0, 20_000  # metres to all sides within which so many points tell of the others
PLENTY_CELL, LITTLE = 1.0, 0.03  # metres: cells of ground there, and how rough it is
UNKNOWN = 2.7  # metres within which Patchwork++ does not look
MOVED = 0.1  # metres of sensor height after which Patchwork++ starts anew
STEEPEST = 0.05  # rise per metre that the grid method takes for ground without seeing it
MOST_CELLS = 4096  # on a side: small cells of a wide scan would take gigabytes
REACH = 8.0  # metres that the grid method looks under objects for ground at their side


class Ground:
    """Finds ground in one stream of scans, and how the sensor is mounted above it.

    Patchwork++ learns the terrain from scan to scan; it may be called from several threads, one
    waits for the other. The other methods have no memory but the mounting.
    """

    def __init__(self, config: GroundConfig):
        self.config = config
        without_rings = "patchwork" if importlib.util.find_spec("pypatchworkpp") else "grid"
        self.method = without_rings if config.method == "auto" else config.method
        self._estimate = MountingEstimate(config)
        self._lock = threading.Lock()
        self._patchwork = None
        self._patchwork_height = 0.0

    @property
    def mounting(self) -> Mounting:
        """How the sensor is mounted, as set or as learned so far."""
        return self._estimate.mounting

    def __call__(self, points: np.ndarray) -> np.ndarray:
        """Which of the points (n, 3), in the sensor's frame, are ground: (n,) bool."""
        return self.find(points)[1]

    def find(
        self,
        points: np.ndarray,
        rings: Rings | None = None,
        distance: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray, Terrain | None]:
        """Points (n, 3) turned upright, which of them are ground, and how they stand on it.

        The terrain is None unless the method is `auto` and the points have rings; these need
        the distances (n,) from the sensor as well.
        """
        if self.method == "none" or len(points) == 0:
            return points, np.zeros(len(points), bool), None
        mounting = self._estimate(points)
        upright = mounting.level(points)
        if self.config.method == "auto" and rings is not None:
            terrain = find_terrain(upright, rings, distance, mounting.height)
            return upright, terrain.height < self.config.thickness, terrain
        if self.method == "grid":
            return upright, grid_ground(upright, self.config, mounting.height), None
        return upright, self._call_patchwork(upright, mounting.height), None

    def _call_patchwork(self, points: np.ndarray, sensor_height: float) -> np.ndarray:
        asked = _thinned(points)
        told = np.zeros(len(asked), bool)
        with self._lock:
            if self._patchwork is None or abs(sensor_height - self._patchwork_height) > MOVED:
                self._patchwork = _patchwork(sensor_height)
                self._patchwork_height = sensor_height
            self._patchwork.estimateGround(points[asked])
            told[self._patchwork.getGroundIndices().ravel()] = True
        return _by_their_cells(points, asked, told, self.config.thickness - sensor_height)


@machine_code
def _is_near(point):
    return abs(point[0]) < PLENTY and abs(point[1]) < PLENTY


@machine_code
def _near_cell(point):
    return int((point[0] + PLENTY) / PLENTY_CELL), int((point[1] + PLENTY) / PLENTY_CELL)


@machine_code
def _thinned(points):
    """Indices of the points that are asked: all, or one of a few near ones if these are many."""
    near = 0
    for i in range(len(points)):
        near += _is_near(points[i])
    every = max(1, near // ENOUGH)
    asked, count = np.empty(len(points), np.int64), 0
    for i in range(len(points)):
        if i % every == 0 or not _is_near(points[i]):
            asked[count] = i
            count += 1
    return asked[:count]


@machine_code
def _by_their_cells(points, asked, told, level):
    """Ground (n,) bool: as told for those asked; others, if not above the ground in their cell.

    Patchwork++ has no opinion on what is nearer than its least range: there, what is below level.
    """
    cells = int(2 * PLENTY / PLENTY_CELL)
    highest = np.full((cells, cells), -np.inf)
    ground, known = np.zeros(len(points), np.bool_), np.zeros(len(points), np.bool_)
    for n in range(len(asked)):
        i, answer = asked[n], told[n]
        ground[i], known[i] = answer, True
        if answer and _is_near(points[i]):
            cell = _near_cell(points[i])
            highest[cell] = max(highest[cell], points[i, 2])
    for i in range(len(points)):
        if not known[i]:
            ground[i] = points[i, 2] < highest[_near_cell(points[i])] + LITTLE
        if points[i, 0] ** 2 + points[i, 1] ** 2 < UNKNOWN**2:
            ground[i] |= points[i, 2] < level
    return ground


def grid_ground(points: np.ndarray, config: GroundConfig, sensor_height: float) -> np.ndarray:
    """Points within `thickness` of the lowest surface that is nowhere steeper than STEEPEST."""
    side = max(config.cell, float(np.ptp(points[:, :2], axis=0).max()) / MOST_CELLS)
    cell = np.floor(points[:, :2] / side).astype(np.int64)
    cell -= cell.min(axis=0)
    shape = tuple(cell.max(axis=0) + 1)
    flat = np.ravel_multi_index((cell[:, 0], cell[:, 1]), shape)

    z = points[:, 2]
    slack = STEEPEST * np.hypot(points[:, 0], points[:, 1]) + 0.5
    plausible = np.abs(z + sensor_height) < slack  # not a treetop, not a reflection below
    lowest = np.full(shape, np.inf, np.float32)
    np.minimum.at(lowest.reshape(-1), flat[plausible], z[plausible])

    # a lower envelope: no cell is higher than its neighbour plus the steepest rise between them
    rise = np.float32(STEEPEST * side)
    for _ in range(int(np.ceil(REACH / side))):
        np.minimum(lowest[1:], lowest[:-1] + rise, out=lowest[1:])
        np.minimum(lowest[:-1], lowest[1:] + rise, out=lowest[:-1])
        np.minimum(lowest[:, 1:], lowest[:, :-1] + rise, out=lowest[:, 1:])
        np.minimum(lowest[:, :-1], lowest[:, 1:] + rise, out=lowest[:, :-1])
    return z < lowest.reshape(-1)[flat] + config.thickness


def _patchwork(sensor_height: float):
    import pypatchworkpp

    parameters = pypatchworkpp.Parameters()
    parameters.sensor_height = sensor_height
    parameters.enable_RNR = False  # its reflection filter needs intensities on KITTI's scale
    with silenced():
        return pypatchworkpp.patchworkpp(parameters)
