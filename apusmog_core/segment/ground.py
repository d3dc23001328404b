# SPDX-License-Identifier: Apache-2.0
"""Which points are ground: Patchwork++ where installed, a grid of lowest points otherwise."""

from __future__ import annotations

import importlib.util
import threading

import numpy as np
from scipy.spatial.transform import Rotation

from ..compute import machine_code, silenced
from ..config import GroundConfig

PLENTY, ENOUGH = 35.0, 20_000  # metres to all sides within which so many points tell of the others
PLENTY_CELL, LITTLE = 1.0, 0.03  # metres: cells of ground there, and how rough it is
UNKNOWN = 2.7  # metres within which Patchwork++ does not look
STEEPEST = 0.05  # rise per metre that the grid method takes for ground without seeing it
MOST_CELLS = 4096  # on a side: small cells of a wide scan would take gigabytes
REACH = 8.0  # metres that the grid method looks under objects for ground at their side


class Ground:
    """Finds ground in level points: `Ground(config)(points)` -> (n,) bool.

    Patchwork++ learns the terrain from scan to scan, so one object serves one stream of scans; it
    may be called from several threads, one waits for the other. `grid` has no memory.
    """

    def __init__(self, config: GroundConfig):
        self.config = config
        self.method = _available(config.method)
        self._lock = threading.Lock()
        self._patchwork = _patchwork(config) if self.method == "patchwork" else None

    def __call__(self, points: np.ndarray) -> np.ndarray:
        """Which of the level points (n, 3) are ground: (n,) bool."""
        if self.method == "none" or len(points) == 0:
            return np.zeros(len(points), bool)
        if self.method == "grid":
            return grid_ground(points, self.config)
        return self._call_patchwork(points)

    def _call_patchwork(self, points: np.ndarray) -> np.ndarray:
        asked = _thinned(points)
        told = np.zeros(len(asked), bool)
        with self._lock:
            self._patchwork.estimateGround(points[asked])
            told[self._patchwork.getGroundIndices().ravel()] = True
        return _by_their_cells(
            points, asked, told, self.config.thickness - self.config.sensor_height
        )


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


def level(points: np.ndarray, config: GroundConfig) -> np.ndarray:
    """Points (n, 3) turned so that z is up, undoing the sensor's mounting roll and pitch."""
    if config.roll == config.pitch == 0.0:
        return points
    turn = Rotation.from_euler("xy", (config.roll, config.pitch), degrees=True)
    return points @ turn.as_matrix().T.astype(np.float32)


def grid_ground(points: np.ndarray, config: GroundConfig) -> np.ndarray:
    """Points within `thickness` of the lowest surface that is nowhere steeper than STEEPEST."""
    side = max(config.cell, float(np.ptp(points[:, :2], axis=0).max()) / MOST_CELLS)
    cell = np.floor(points[:, :2] / side).astype(np.int64)
    cell -= cell.min(axis=0)
    shape = tuple(cell.max(axis=0) + 1)
    flat = np.ravel_multi_index((cell[:, 0], cell[:, 1]), shape)

    z = points[:, 2]
    slack = STEEPEST * np.hypot(points[:, 0], points[:, 1]) + 0.5
    plausible = np.abs(z + config.sensor_height) < slack  # not a treetop, not a reflection below
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


def _available(method: str) -> str:
    installed = importlib.util.find_spec("pypatchworkpp") is not None
    if method == "patchwork" and not installed:
        raise ValueError(
            "ground.method patchwork needs pip install pypatchworkpp; or choose auto or grid"
        )
    return ("patchwork" if installed else "grid") if method == "auto" else method


def _patchwork(config: GroundConfig):
    import pypatchworkpp

    parameters = pypatchworkpp.Parameters()
    parameters.sensor_height = config.sensor_height
    parameters.enable_RNR = False  # its reflection filter needs intensities on KITTI's scale
    with silenced():
        return pypatchworkpp.patchworkpp(parameters)
