# SPDX-License-Identifier: Apache-2.0
"""Point clouds in files: .bin (KITTI), .pcd, .ply, .npy, .npz and .xyz, read and written."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ..files import written_whole
from .pointcloud2 import drop_nonfinite, narrowed, wide
from .records import read_pcd, read_ply, write_pcd, write_ply

SCAN_PERIOD = 0.1  # seconds between scans where nothing else is known
READ_OTHERWISE = ("x", "y", "z", "intensity", "i", "ring", "_", "")  # "_": padding of a .pcd
MOST_EXPANSION = 100  # times the size of a file that its compressed content may have


@dataclass(frozen=True, eq=False)
class Scan:
    """One sweep of a sensor, or any other cloud, in the sensor's frame."""

    points: np.ndarray  # (n, 3) finite, float32 or, where that loses millimetres, float64
    intensity: np.ndarray | None = None  # (n,) float32
    ring: np.ndarray | None = None  # (n,) int32, where a field tells it
    stamp: float = 0.0  # seconds
    name: str = ""
    dropped: int = 0  # points removed because they were not finite
    fields: dict[str, np.ndarray] = field(default_factory=dict)  # all others of the input, (n,)
    frame: str = ""  # of a message
    stamp_ns: int | None = None  # of a message: seconds as a float are not exact


class ScanFiles:
    """Files as scans; iterating skips a bad one of many, with a warning, and counts it."""

    def __init__(self, files: Sequence[Path], stamps: Sequence[float] | None = None):
        self.files = list(files)
        self.stamps = stamps
        self.skipped = 0  # of the latest iteration

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Scan:
        """Read one scan; a ValueError names the file and what is wrong with it."""
        scan = read_points(self.files[index])
        index = range(len(self.files))[index]  # from the end as well
        stamp = self.stamps[index] if self.stamps is not None else index * SCAN_PERIOD
        return replace(scan, stamp=stamp)

    def __iter__(self) -> Iterator[Scan]:
        self.skipped = 0
        for index in range(len(self.files)):
            try:
                scan = self[index]
            except ValueError as error:
                if len(self.files) == 1:
                    raise
                self.skipped += 1
                warnings.warn(f"skipped {error}", stacklevel=2)
                continue
            yield scan


def read_points(path: str | Path) -> Scan:
    """Any supported file as a scan; ValueError names the file and what is wrong with it."""
    path = Path(path)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path}: unknown kind of file; known: {', '.join(READERS)}")
    try:
        if path.exists() and not path.is_file():
            raise ValueError("not a regular file")  # a pipe could wait, a device go on, for ever
        points, intensity, ring, fields = reader(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    points = narrowed(points)
    everything = points
    points, intensity, ring, dropped = drop_nonfinite(points, intensity, ring)
    if dropped:
        fields = keep_finite(everything, fields)
    if len(points) == 0:
        raise ValueError(f"{path}: no finite point in the file")
    return Scan(points, intensity, ring, name=path.stem, dropped=dropped, fields=fields)


def write_points(
    path: str | Path, points: np.ndarray, intensity: np.ndarray | None = None, **fields: np.ndarray
) -> None:
    """Write points (n, 3) by the file's suffix; `fields` (ring...) go to .pcd, .ply and .npz.

    The other formats are plain columns and hold x, y, z and intensity only.
    """
    points = np.asarray(points)
    if points.ndim != 2 or points.shape[1] != 3:
        raise ValueError(f"{path}: expected points of shape (n, 3), got {points.shape}")
    columns = dict(zip("xyz", points.T, strict=True))
    if intensity is not None:
        columns["intensity"] = np.asarray(intensity, np.float32)
    write_columns(path, columns | {name: np.asarray(values) for name, values in fields.items()})


def write_columns(path: str | Path, columns: dict[str, np.ndarray]) -> None:
    """Write x, y, z and other columns (n,), whole or not at all, by the file's suffix."""
    path = Path(path)
    writer = WRITERS.get(path.suffix.lower())
    if writer is None:
        raise ValueError(f"{path}: unknown kind of file; known: {', '.join(WRITERS)}")
    points = narrowed(np.stack([columns[axis] for axis in "xyz"], axis=1))
    bad = len(points) - np.count_nonzero(np.isfinite(points).all(axis=1))
    if bad:
        raise ValueError(f"{path}: {bad} of {len(points)} points are not finite; not written")
    with written_whole(path) as place:
        writer(place, columns | dict(zip("xyz", points.T, strict=True)))


# --- columns: files that are one table of numbers ------------------------------------------------

# points, intensity, ring, other fields
Arrays = tuple[np.ndarray, "np.ndarray | None", "np.ndarray | None", dict[str, np.ndarray]]


def _from_table(table: np.ndarray) -> Arrays:
    """x y z, and intensity where there are exactly four columns (six would be normals)."""
    if table.ndim != 2 or table.shape[1] < 3:
        raise ValueError(f"expected rows of x y z, found an array of shape {table.shape}")
    if table.dtype.kind not in "fiu":
        raise ValueError(f"expected numbers, found an array of {table.dtype}")
    intensity = _float32(table[:, 3]) if table.shape[1] == 4 else None
    return np.ascontiguousarray(table[:, :3], wide(table.dtype)), intensity, None, {}


def _float32(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _to_table(columns: dict[str, np.ndarray]) -> np.ndarray:
    names = [name for name in ("x", "y", "z", "intensity") if name in columns]
    return np.stack([columns[name] for name in names], axis=1)


def read_bin(path: Path) -> np.ndarray:
    """All points of a KITTI scan as they are stored, x y z intensity: (n, 4) float32."""
    if not path.is_file():
        raise ValueError("not a regular file")
    size = path.stat().st_size
    if size % 16:
        raise ValueError(f"{size} bytes are no whole number of 16-byte points; file truncated?")
    return np.fromfile(path, "<f4").reshape(-1, 4)


def _write_bin(path: Path, columns: dict[str, np.ndarray]) -> None:
    if columns["x"].dtype != np.float32:
        raise ValueError(
            f"{path.name}: .bin files hold float32, which loses the millimetres of these "
            "coordinates; write .ply, .pcd, .npy or .xyz, or subtract an offset first"
        )
    _to_table({"intensity": np.zeros_like(columns["x"]), **columns}).astype("<f4").tofile(path)


def _read_npy(path: Path) -> Arrays:
    try:  # mapped, so that the shape is checked against the file before memory is taken
        table = np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # the header is parsed as Python, which may fail in any way
        raise ValueError(f"not a readable .npy array ({error})") from error
    return _from_table(table)


def _write_npy(path: Path, columns: dict[str, np.ndarray]) -> None:
    np.save(path, _to_table(columns))


def _read_xyz(path: Path) -> Arrays:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an empty file is reported by the caller
        table = np.loadtxt(path, np.float64, comments=("#", "//"), ndmin=2)
    return _from_table(table if table.size else table.reshape(0, 3))


def _write_xyz(path: Path, columns: dict[str, np.ndarray]) -> None:
    table = _to_table(columns)  # as many digits as the numbers have
    np.savetxt(path, table, fmt="%.9g" if table.dtype == np.float32 else "%.15g")


# --- records: files with a header that names the fields ------------------------------------------


def _from_records(fields: dict[str, np.ndarray]) -> Arrays:
    missing = [axis for axis in "xyz" if axis not in fields]
    if missing:
        raise ValueError(f"no field {', '.join(missing)}; fields: {', '.join(fields)}")
    kind = np.result_type(*(wide(fields[axis].dtype) for axis in "xyz"))
    points = np.stack([fields[axis].astype(kind) for axis in "xyz"], axis=1)
    intensity = next((_float32(fields[n]) for n in ("intensity", "i") if n in fields), None)
    ring = _rings(fields["ring"]) if "ring" in fields else None
    others = {name: values for name, values in fields.items() if name not in READ_OTHERWISE}
    return points, intensity, ring, others


def _rings(values: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return values.astype(np.int32)


def other_fields(records: np.ndarray) -> dict[str, np.ndarray]:
    """Fields of records (n,) that are not read otherwise; several values become several fields."""
    columns = {}
    for name in records.dtype.names:
        if name in READ_OTHERWISE:
            continue
        values = records[name].reshape(len(records), -1)
        if values.shape[1] == 1:
            columns[name] = values[:, 0]
        else:
            columns |= {f"{name}_{i}": values[:, i] for i in range(values.shape[1])}
    return columns


def keep_finite(points: np.ndarray, fields: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The fields (n,) of those points (n, 3) that are finite."""
    finite = np.isfinite(points).all(axis=1)
    return {name: values[finite] for name, values in fields.items()}


def _read_npz(path: Path) -> Arrays:
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as entries:
            announced = sum(entry.file_size for entry in entries.infolist())
            if announced > MOST_EXPANSION * size:
                raise ValueError(f"{size} bytes announce {announced}")
        with np.load(path, allow_pickle=False) as stored:
            fields = {name: stored[name] for name in stored}
    except OSError:
        raise
    except Exception as error:  # headers are parsed as Python, which may fail in any way
        raise ValueError(f"not a readable .npz archive ({error})") from error
    shapes = {values.shape for values in fields.values()}
    kinds = {values.dtype.kind for values in fields.values()}
    if len(shapes) != 1 or len(*shapes) != 1 or not kinds <= set("fiub"):
        raise ValueError("expected columns of numbers, x, y, z and others, all of one length")
    return _from_records(fields)


def _write_npz(path: Path, columns: dict[str, np.ndarray]) -> None:
    if "file" in columns:  # numpy's own name for the first argument
        raise ValueError(f"{path.name}: .npz files cannot hold a field named 'file'; use .ply")
    np.savez_compressed(path, **columns)


READERS = {
    ".bin": lambda path: _from_table(read_bin(path)),
    ".pcd": lambda path: _from_records(read_pcd(path)),
    ".ply": lambda path: _from_records(read_ply(path)),
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".xyz": _read_xyz,
}
WRITERS = {
    ".bin": _write_bin,
    ".pcd": write_pcd,
    ".ply": write_ply,
    ".npy": _write_npy,
    ".npz": _write_npz,
    ".xyz": _write_xyz,
}
