# SPDX-License-Identifier: Apache-2.0
"""Files of records under a header that names the fields: .ply and .pcd."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

Fields = dict[str, np.ndarray]  # name -> (n,) values; of a field with several values the first
Layout = list[tuple[str, str, int]]  # name, numpy type, values in each record

LONGEST_LINE = 1024  # bytes of a header
PLY_TYPES = {
    **{"char": "i1", "uchar": "u1", "short": "i2", "ushort": "u2", "int": "i4", "uint": "u4"},
    **{"float": "f4", "double": "f8", "int8": "i1", "uint8": "u1", "int16": "i2", "uint16": "u2"},
    **{"int32": "i4", "uint32": "u4", "float32": "f4", "float64": "f8"},
}
PLY_NAMES = {"i1": "char", "u1": "uchar", "i2": "short", "u2": "ushort"}
PLY_NAMES |= {"i4": "int", "u4": "uint", "f4": "float", "f8": "double"}
PLY_FORMATS = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}
PCD_TYPES = {letter + size for letter in "IU" for size in "1248"} | {"F4", "F8"}
PCD_FORMS = ("ascii", "binary", "binary_compressed")


# --- reading -------------------------------------------------------------------------------------


def read_ply(path: Path) -> Fields:
    """The vertices of a PLY file."""
    with path.open("rb") as file:
        if _header_line(file) != ["ply"]:
            raise ValueError("not a PLY file")
        form, element, count = "", "", 0
        layout: Layout = []
        while (line := _header_line(file)) != ["end_header"]:
            match line:
                case ["format", form, *_]:
                    if form not in PLY_FORMATS:
                        raise ValueError(f"unknown PLY format {form!r}")
                case ["element", name, number] if not element:
                    element, count = name, _count(number)
                case ["element", _, number]:
                    _count(number)
                    element = "another"  # what follows the vertices is not read
                case ["property", *rest] if element:
                    if element == "vertex":
                        layout.append(_ply_property(rest))
                case [] | ["comment" | "obj_info", *_]:
                    pass
                case _:
                    raise ValueError(f"unexpected line in the header: {' '.join(line)[:80]!r}")
            if element not in ("", "vertex") and not layout:
                raise ValueError("expected vertices as the first element")
        if not form:
            raise ValueError("the header names no format")
        if form == "ascii":
            return _read_text(file, layout, count)
        order = PLY_FORMATS[form]
        return _read_binary(file, [(name, order + kind, n) for name, kind, n in layout], count)


def _ply_property(words: list[str]) -> tuple[str, str, int]:
    if len(words) != 2 or words[0] not in PLY_TYPES:
        raise ValueError(f"expected a vertex property without lists, got {' '.join(words)[:80]!r}")
    return words[1], PLY_TYPES[words[0]], 1


def read_pcd(path: Path) -> Fields:
    """The points of a PCD file."""
    with path.open("rb") as file:
        header: dict[str, list[str]] = {}
        while "DATA" not in header:
            if line := _header_line(file):
                header[line[0]] = line[1:]
        form = " ".join(header["DATA"])
        if form not in PCD_FORMS:
            raise ValueError(f"DATA {form[:80]!r} is not one of {', '.join(PCD_FORMS)}")
        layout, count = _pcd_layout(header), _pcd_points(header)
        if form == "ascii":
            return _read_text(file, layout, count)
        if form == "binary":
            return _read_binary(file, layout, count)
        return _read_compressed(file, layout, count)


def _pcd_layout(header: dict[str, list[str]]) -> Layout:
    names = header.get("FIELDS", [])
    columns = [header.get(key, []) for key in ("TYPE", "SIZE")]
    columns.append(header.get("COUNT", ["1"] * len(names)))
    if not names or any(len(column) != len(names) for column in columns):
        raise ValueError("FIELDS, TYPE, SIZE and COUNT do not agree in number")
    layout = []
    for name, kind, size, values in zip(names, *columns, strict=True):
        if kind + size not in PCD_TYPES:
            raise ValueError(f"field {name[:80]}: unknown type {kind[:8]} of size {size[:8]}")
        layout.append((name, f"<{kind.lower()}{size}", _count(values)))
    return layout


def _pcd_points(header: dict[str, list[str]]) -> int:
    if "POINTS" in header:
        return _count(*header["POINTS"][:1])
    return _count(*header.get("WIDTH", [])[:1]) * _count(*header.get("HEIGHT", [])[:1])


def _header_line(file: BinaryIO) -> list[str]:
    line = file.readline(LONGEST_LINE)
    if not line.endswith(b"\n"):
        raise ValueError("the header does not end")
    return line.decode("ascii", "replace").split()


def _count(text: str = "") -> int:
    if not text.isdecimal():
        raise ValueError(f"expected a count in the header, got {text[:80]!r}")
    return int(text)


def _check_size(file: BinaryIO, count: int, least: int) -> None:
    """Before memory is taken: `count` records of at least so many bytes are in the file."""
    left = os.fstat(file.fileno()).st_size - file.tell()
    if count * least > left:
        raise ValueError(
            f"{left} bytes of points where the header announces {count} of {least}; file truncated?"
        )


def _read_text(file: BinaryIO, layout: Layout, count: int) -> Fields:
    columns = sum(values for *_, values in layout)
    _check_size(file, count, max(2 * columns - 1, 1))  # a digit and a space or line end for each
    kinds = {name: kind for name, kind, _ in reversed(layout)}
    firsts = np.cumsum([0] + [values for *_, values in layout]).tolist()
    rows = [file.readline().split() for _ in range(count)]
    if any(len(row) < columns for row in rows):
        raise ValueError(f"fewer than the {count} points that the header announces")
    table = np.array([row[:columns] for row in rows], np.float64).reshape(count, columns)
    fields = {name: table[:, firsts[at]] for name, at in _first_of_each(layout).items()}
    with np.errstate(invalid="ignore", over="ignore"):
        return {  # text may have more digits than the type that the header names
            name: values if name in "xyz" else values.astype(kinds[name])
            for name, values in fields.items()
        }


def _read_binary(file: BinaryIO, layout: Layout, count: int) -> Fields:
    sizes = [np.dtype(kind).itemsize * values for _, kind, values in layout]
    _check_size(file, count, sum(sizes))
    wanted = _first_of_each(layout)
    if count == 0:
        return {name: np.empty(0) for name in wanted}
    starts = np.cumsum([0, *sizes]).tolist()
    record = np.dtype(
        {
            "names": list(wanted),
            "formats": [layout[at][1] for at in wanted.values()],
            "offsets": [starts[at] for at in wanted.values()],
            "itemsize": starts[-1],
        }
    )
    records = np.frombuffer(file.read(count * record.itemsize), record)
    return {name: records[name] for name in wanted}


def _read_compressed(file: BinaryIO, layout: Layout, count: int) -> Fields:
    """Field after field instead of point after point, compressed by LZF."""
    from .lzf import MOST_EXPANSION, decompress

    packed, size = np.frombuffer(file.read(8).ljust(8, b"\0"), "<u4").tolist()
    _check_size(file, 1, packed)
    sizes = [np.dtype(kind).itemsize * values * count for _, kind, values in layout]
    if size != sum(sizes) or size > MOST_EXPANSION * packed:
        raise ValueError(f"{packed} compressed bytes announce {size}, {count} points {sum(sizes)}")
    data = decompress(file.read(packed), size)
    starts = np.cumsum([0, *sizes]).tolist()
    return {
        name: np.frombuffer(data, layout[at][1], count, starts[at])
        for name, at in _first_of_each(layout).items()
    }


def _first_of_each(layout: Layout) -> dict[str, int]:
    """Where each name is that has values; of fields with the same name the first counts."""
    places: dict[str, int] = {}
    for at, (name, _, values) in enumerate(layout):
        if values:
            places.setdefault(name, at)
    return places


# --- writing -------------------------------------------------------------------------------------


def to_records(columns: Fields) -> np.ndarray:
    """Columns as little-endian records, in types that all readers know."""
    dtype = np.dtype([(name, "<" + _common_type(values)) for name, values in columns.items()])
    records = np.empty(len(columns["x"]), dtype)
    for name, values in columns.items():
        records[name] = values
    return records


def _common_type(values: np.ndarray) -> str:
    """Flags become bytes; 64-bit integers 32-bit ones, or double where they do not fit."""
    kind = values.dtype.str[1:]
    if kind in ("i8", "u8"):
        low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
        small = {"i8": "i4", "u8": "u4"}[kind]
        return small if np.iinfo(small).min <= low and high <= np.iinfo(small).max else "f8"
    return {"b1": "u1", "f2": "f4"}.get(kind, kind)


def write_pcd(path: Path, columns: Fields) -> None:
    """Binary PCD."""
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


def write_ply(path: Path, columns: Fields, triangles: np.ndarray | None = None) -> None:
    """Binary little-endian PLY: vertices, and triangles (m, 3) where there are some."""
    records = to_records(columns)
    header = ["ply", "format binary_little_endian 1.0", f"element vertex {len(records)}"]
    header += [f"property {PLY_NAMES[records.dtype[n].str[1:]]} {n}" for n in records.dtype.names]
    body = [records.tobytes()]
    if triangles is not None:
        header += [f"element face {len(triangles)}", "property list uchar int vertex_indices"]
        faces = np.empty(len(triangles), [("corners", "u1"), ("vertices", "<i4", 3)])
        faces["corners"], faces["vertices"] = 3, triangles
        body.append(faces.tobytes())
    path.write_bytes("\n".join([*header, "end_header"]).encode() + b"\n" + b"".join(body))
