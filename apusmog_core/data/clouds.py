# SPDX-License-Identifier: Apache-2.0
"""Point clouds in files: .bin (KITTI), .pcd, .ply, .npy, .npz and .xyz, read and written."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from .pointcloud2 import drop_nonfinite

SCAN_PERIOD = 0.1  # seconds between scans where nothing else is known


@dataclass(frozen=True, eq=False)
class Scan:
    """One sweep of a sensor, or any other cloud, in the sensor's frame."""

    points: np.ndarray  # (n, 3) float32, finite
    intensity: np.ndarray | None = None  # (n,) float32
    ring: np.ndarray | None = None  # (n,) int32, 0 is the first ring of the file
    stamp: float = 0.0  # seconds
    name: str = ""
    dropped: int = 0  # points removed because they were not finite
    fields: dict[str, np.ndarray] = field(default_factory=dict)  # all others of the input, (n,)
    frame: str = ""  # of a message
    stamp_ns: int | None = None  # of a message: seconds as a float are not exact


class ScanFiles:
    """A folder's files as scans; iterating skips a bad file, with a warning, and counts it."""

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
        *arrays, fields = reader(path)
        points, intensity, ring, dropped = drop_nonfinite(*arrays)
        if dropped:
            fields = keep_finite(arrays[0], fields)
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise ValueError(f"{path}: {error}") from error
    if len(points) == 0:
        raise ValueError(f"{path}: no finite point in the file")
    if path.suffix.lower() == ".bin":
        ring = rings_from_order(points)
    return Scan(points, intensity, ring, name=path.stem, dropped=dropped, fields=fields)


def write_points(
    path: str | Path, points: np.ndarray, intensity: np.ndarray | None = None, **fields: np.ndarray
) -> None:
    """Write points (n, 3) by the file's suffix; `fields` (ring...) go to .pcd, .ply and .npz.

    The other formats are plain columns and hold x, y, z and intensity only.
    """
    path = Path(path)
    writer = WRITERS.get(path.suffix.lower())
    if writer is None:
        raise ValueError(f"{path}: unknown kind of file; known: {', '.join(WRITERS)}")
    columns = {axis: np.asarray(points, np.float32)[:, i] for i, axis in enumerate("xyz")}
    if intensity is not None:
        columns["intensity"] = np.asarray(intensity, np.float32)
    columns |= {name: np.asarray(values) for name, values in fields.items()}
    writer(path, columns)


def rings_from_order(points: np.ndarray) -> np.ndarray | None:
    """Ring numbers of a scan stored ring after ring (KITTI), each turning once from straight ahead.

    A new ring starts where the azimuth falls back; None where the order holds no rings.
    """
    azimuth = np.mod(np.arctan2(points[:, 1], points[:, 0]), 2 * np.pi)
    step = np.diff(azimuth)
    if np.median(step) < 0:  # a sensor that turns clockwise
        step = -step
    starts = step < -1.0
    returns = step > 2 * np.pi - 0.05  # noise across straight ahead: still the ring before
    ring = np.zeros(len(points), np.int32)
    np.cumsum(starts.astype(np.int32) - returns, out=ring[1:])
    ring -= ring.min()
    return ring if 0 < ring.max() < 256 else None


# --- columns: files that are one table of numbers ------------------------------------------------

# points, intensity, ring, other fields
Arrays = tuple[np.ndarray, "np.ndarray | None", "np.ndarray | None", dict[str, np.ndarray]]


def _from_table(table: np.ndarray) -> Arrays:
    """x y z, and intensity where there are exactly four columns (six would be normals)."""
    if table.ndim != 2 or table.shape[1] < 3:
        raise ValueError(f"expected rows of x y z, found an array of shape {table.shape}")
    table = table.astype(np.float32)
    intensity = table[:, 3].copy() if table.shape[1] == 4 else None
    return np.ascontiguousarray(table[:, :3]), intensity, None, {}


def _to_table(columns: dict[str, np.ndarray]) -> np.ndarray:
    names = [name for name in ("x", "y", "z", "intensity") if name in columns]
    return np.stack([columns[name] for name in names], axis=1)


def read_bin(path: Path) -> np.ndarray:
    """All points of a KITTI scan as they are stored, x y z intensity: (n, 4) float32."""
    size = path.stat().st_size
    if size % 16:
        raise ValueError(f"{size} bytes are no whole number of 16-byte points; file truncated?")
    return np.fromfile(path, "<f4").reshape(-1, 4)


def _write_bin(path: Path, columns: dict[str, np.ndarray]) -> None:
    _to_table({"intensity": np.zeros_like(columns["x"]), **columns}).astype("<f4").tofile(path)


def _read_npy(path: Path) -> Arrays:
    return _from_table(np.load(path, allow_pickle=False))


def _write_npy(path: Path, columns: dict[str, np.ndarray]) -> None:
    np.save(path, _to_table(columns))


def _read_xyz(path: Path) -> Arrays:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an empty file is reported by the caller
        table = np.loadtxt(path, np.float32, comments=("#", "//"), ndmin=2)
    return _from_table(table if table.size else table.reshape(0, 3))


def _write_xyz(path: Path, columns: dict[str, np.ndarray]) -> None:
    np.savetxt(path, _to_table(columns), fmt="%.6g")


# --- records: files with a header that names the fields ------------------------------------------

PLY_TYPES = {
    **{"char": "i1", "uchar": "u1", "short": "i2", "ushort": "u2", "int": "i4", "uint": "u4"},
    **{"float": "f4", "double": "f8", "int8": "i1", "uint8": "u1", "int16": "i2", "uint16": "u2"},
    **{"int32": "i4", "uint32": "u4", "float32": "f4", "float64": "f8"},
}
PLY_NAMES = {"i1": "char", "u1": "uchar", "i2": "short", "u2": "ushort"}
PLY_NAMES |= {"i4": "int", "u4": "uint", "f4": "float", "f8": "double"}


def _from_records(records: np.ndarray) -> Arrays:
    names = records.dtype.names or ()
    missing = [axis for axis in "xyz" if axis not in names]
    if missing:
        raise ValueError(f"no field {', '.join(missing)}; fields: {', '.join(names)}")
    points = np.stack([records[axis].astype(np.float32) for axis in "xyz"], axis=1)
    intensity = next(
        (records[n].astype(np.float32) for n in ("intensity", "i") if n in names), None
    )
    ring = records["ring"].astype(np.int32) if "ring" in names else None
    return points, intensity, ring, other_fields(records)


def other_fields(records: np.ndarray) -> dict[str, np.ndarray]:
    """Fields of records (n,) that are not read otherwise; several values become several fields."""
    columns = {}
    for name in records.dtype.names:
        if name in ("x", "y", "z", "intensity", "i", "ring") or "." in name:
            continue  # a dot: padding or more values of a .pcd, by our own name
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


def to_records(columns: dict[str, np.ndarray]) -> np.ndarray:
    """Columns as little-endian records; flags become bytes, 64-bit integers 32-bit ones."""
    smaller = {"b1": "u1", "i8": "i4", "u8": "u4"}
    kinds = {name: values.dtype.str[1:] for name, values in columns.items()}
    dtype = np.dtype([(name, "<" + smaller.get(kind, kind)) for name, kind in kinds.items()])
    records = np.empty(len(columns["x"]), dtype)
    for name, values in columns.items():
        records[name] = values
    return records


def _read_records(file, text: bool, dtype: np.dtype, count: int) -> np.ndarray:
    """`count` records from an open file just after its header."""
    if text:
        rows = [file.readline().split() for _ in range(count)]
        if any(len(row) < len(dtype) for row in rows):
            raise ValueError(f"fewer than the {count} points that the header announces")
        table = np.array([row[: len(dtype)] for row in rows], np.float64).reshape(count, -1)
        return np.rec.fromarrays(table.T, dtype=dtype) if count else np.empty(0, dtype)
    data = file.read(count * dtype.itemsize)
    if len(data) < count * dtype.itemsize:
        raise ValueError(
            f"{len(data)} bytes of points where the header announces "
            f"{count} of {dtype.itemsize}; file truncated?"
        )
    return np.frombuffer(data, dtype)


def _header_line(file) -> list[str]:
    line = file.readline(1024)
    if not line.endswith(b"\n"):
        raise ValueError("the header does not end")
    return line.decode("ascii", "replace").split()


def _read_pcd(path: Path) -> Arrays:
    with path.open("rb") as file:
        header: dict[str, list[str]] = {}
        while "DATA" not in header:
            line = _header_line(file)
            if line:
                header[line[0]] = line[1:]
        form = header["DATA"][0]
        if form == "binary_compressed":
            return _read_compressed_pcd(path)
        letters = {"I": "i", "U": "u", "F": "f"}
        counts = header.get("COUNT", ["1"] * len(header["FIELDS"]))
        layout = []
        for at, name in enumerate(header["FIELDS"]):
            kind = "<" + letters[header["TYPE"][at]] + header["SIZE"][at]
            for part in range(int(counts[at])):
                unique = name if part == 0 and name != "_" else f"{name}.{at}.{part}"
                layout.append((unique, kind))
        dtype = np.dtype(layout)
        return _from_records(_read_records(file, form == "ascii", dtype, int(header["POINTS"][0])))


def _read_compressed_pcd(path: Path) -> Arrays:
    try:
        import open3d as o3d
    except ImportError as error:
        raise ValueError("compressed .pcd files need Open3D: pip install open3d") from error
    cloud = o3d.t.io.read_point_cloud(str(path)).point
    fields = {name: cloud[name].numpy() for name in cloud}
    if "positions" not in fields:
        raise ValueError("Open3D finds no points in the file")
    flat = {name: fields[name].reshape(-1) for name in ("intensity", "i", "ring") if name in fields}
    intensity = flat.get("intensity", flat.get("i"))
    return (
        fields["positions"].astype(np.float32),
        None if intensity is None else intensity.astype(np.float32),
        flat["ring"].astype(np.int32) if "ring" in flat else None,
        {},
    )


def _write_pcd(path: Path, columns: dict[str, np.ndarray]) -> None:
    records = to_records(columns)
    kinds = [records.dtype[name] for name in records.dtype.names]
    header = [
        "# .PCD v0.7 - Point Cloud Data file format",
        "VERSION 0.7",
        "FIELDS " + " ".join(records.dtype.names),
        "SIZE " + " ".join(str(kind.itemsize) for kind in kinds),
        "TYPE " + " ".join(kind.kind.upper() for kind in kinds),
        "COUNT " + " ".join("1" for _ in kinds),
        f"WIDTH {len(records)}",
        "HEIGHT 1",
        "VIEWPOINT 0 0 0 1 0 0 0",
        f"POINTS {len(records)}",
        "DATA binary",
    ]
    path.write_bytes("\n".join(header).encode() + b"\n" + records.tobytes())


def _read_ply(path: Path) -> Arrays:
    with path.open("rb") as file:
        if _header_line(file) != ["ply"]:
            raise ValueError("not a PLY file")
        form, elements = "", []  # element: [name, count, [(property, type)...]]
        while (line := _header_line(file)) != ["end_header"]:
            if line[:1] == ["format"]:
                form = line[1]
            elif line[:1] == ["element"]:
                elements.append([line[1], int(line[2]), []])
            elif line[:1] == ["property"]:
                elements[-1][2].append((line[-1], PLY_TYPES.get(line[1])))
        if not elements or elements[0][0] != "vertex" or None in dict(elements[0][2]).values():
            raise ValueError("expected vertices without lists as the first element")
        order = ">" if form == "binary_big_endian" else "<"
        dtype = np.dtype([(name, order + kind) for name, kind in elements[0][2]])
        return _from_records(_read_records(file, form == "ascii", dtype, elements[0][1]))


def _write_ply(path: Path, columns: dict[str, np.ndarray]) -> None:
    records = to_records(columns)
    properties = [
        f"property {PLY_NAMES[records.dtype[name].str[1:]]} {name}" for name in records.dtype.names
    ]
    header = ["ply", "format binary_little_endian 1.0", f"element vertex {len(records)}"]
    header += [*properties, "end_header"]
    path.write_bytes("\n".join(header).encode() + b"\n" + records.tobytes())


def _read_npz(path: Path) -> Arrays:
    with np.load(path, allow_pickle=False) as stored:
        return _from_records(to_records(dict(stored)))


def _write_npz(path: Path, columns: dict[str, np.ndarray]) -> None:
    np.savez_compressed(path, **columns)


READERS = {
    ".bin": lambda path: _from_table(read_bin(path)),
    ".pcd": _read_pcd,
    ".ply": _read_ply,
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".xyz": _read_xyz,
}
WRITERS = {
    ".bin": _write_bin,
    ".pcd": _write_pcd,
    ".ply": _write_ply,
    ".npy": _write_npy,
    ".npz": _write_npz,
    ".xyz": _write_xyz,
}
