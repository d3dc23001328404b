# SPDX-License-Identifier: Apache-2.0
"""Triangle meshes in files: .ply, .obj, .stl and .off written with all their digits; .off read.

Open3D would write them too, but it keeps six digits in text and does not notice a full disk; and
its reader of .off crashes on damaged files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..files import written_whole
from .pointcloud2 import narrowed
from .records import write_ply

DIGITS = "%.15g %.15g %.15g"


def write_mesh(
    path: str | Path, vertices: np.ndarray, triangles: np.ndarray, normals: np.ndarray
) -> None:
    """Write vertices (n, 3) with their normals (n, 3), and triangles (m, 3), by the suffix."""
    path = Path(path)
    writer = MESH_WRITERS.get(path.suffix.lower())
    if writer is None:
        raise ValueError(f"{path}: unknown kind of mesh; known: {', '.join(MESH_WRITERS)}")
    if not np.isfinite(vertices).all():
        raise ValueError(f"{path}: vertices that are not finite; not written")
    with written_whole(path) as place:
        writer(place, vertices, triangles, normals)


def read_off(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Vertices (n, 3) and triangles (m, 3) of an .off file; polygons become fans of triangles."""
    try:
        lines = (line.split("#")[0].split() for line in Path(path).read_text().splitlines())
        rows = [row for row in lines if row]
        if not rows or not rows[0][0].startswith("OFF"):
            raise ValueError("not an OFF file")
        counts = " ".join(rows[0])[3:].split()  # some write them on the first line
        begin = 1 if counts else 2
        counts = counts or rows[1]
        vertices, faces = (int(count) for count in counts[:2])
        if vertices < 0 or faces < 0 or vertices + faces > len(rows) - begin:
            raise ValueError(f"{len(rows) - begin} lines where {vertices} + {faces} are announced")
        places = np.array([row[:3] for row in rows[begin : begin + vertices]], np.float64)
        triangles = []
        for row in rows[begin + vertices : begin + vertices + faces]:
            corners = [int(word) for word in row[1 : 1 + int(row[0])]]
            triangles += [
                (corners[0], *pair) for pair in zip(corners[1:], corners[2:], strict=False)
            ]
        places, corners = places.reshape(vertices, 3), np.array(triangles, np.int64).reshape(-1, 3)
        if not np.isfinite(places).all() or (corners < 0).any() or (corners >= vertices).any():
            raise ValueError(
                "a vertex that is not finite, or a face of vertices that are not there"
            )
    except (OSError, ValueError, IndexError, OverflowError) as error:
        raise ValueError(f"{path}: not a readable OFF mesh ({error})") from error
    return places, corners


def _write_ply(path: Path, vertices, triangles, normals) -> None:
    columns = dict(zip("xyz", narrowed(vertices).T, strict=True))
    columns |= dict(zip(("nx", "ny", "nz"), normals.astype(np.float32).T, strict=True))
    write_ply(path, columns, triangles)


def _write_obj(path: Path, vertices, triangles, normals) -> None:
    with path.open("w") as file:
        np.savetxt(file, vertices, "v " + DIGITS)
        np.savetxt(file, normals, "vn %.6g %.6g %.6g")
        np.savetxt(file, np.repeat(triangles + 1, 2, axis=1), "f %d//%d %d//%d %d//%d")


def _write_off(path: Path, vertices, triangles, normals) -> None:
    with path.open("w") as file:
        file.write(f"OFF\n{len(vertices)} {len(triangles)} 0\n")
        np.savetxt(file, vertices, DIGITS)
        np.savetxt(file, triangles, "3 %d %d %d")


def _write_stl(path: Path, vertices, triangles, normals) -> None:
    if narrowed(vertices).dtype != np.float32:
        raise ValueError(
            f"{path.name}: .stl files hold float32, which loses the millimetres of these "
            "coordinates; write .ply, .obj or .off, or subtract an offset first"
        )
    corners = vertices[triangles]  # (m, 3, 3)
    across = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    length = np.linalg.norm(across, axis=1, keepdims=True)
    facets = np.zeros(
        len(triangles), [("normal", "<f4", 3), ("corners", "<f4", (3, 3)), ("unused", "<u2")]
    )
    facets["normal"], facets["corners"] = across / np.maximum(length, 1e-300), corners
    count = np.array(len(triangles), "<u4")
    path.write_bytes(b"APU-SMOG".ljust(80) + count.tobytes() + facets.tobytes())


MESH_WRITERS = {".ply": _write_ply, ".obj": _write_obj, ".stl": _write_stl, ".off": _write_off}
