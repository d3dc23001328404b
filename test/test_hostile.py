# SPDX-License-Identifier: Apache-2.0
"""Malformed and hostile input is one line and exit code 2; nothing goes wrong in silence."""

import io
import os
import struct
import zipfile

import numpy as np
import pytest
from scipy.spatial import cKDTree

from apusmog_core import Upsampler, cli
from apusmog_core.data import open_scans, read_points, write_points
from apusmog_core.data.clouds import WRITERS
from apusmog_core.data.meshes import read_off
from apusmog_core.data.pointcloud2 import decode

PLY = "ply\nformat {} 1.0\nelement vertex {}\n" + "".join(f"property float {a}\n" for a in "xyz")
PLY += "end_header\n"
PCD = "FIELDS x y z\nSIZE 4 4 4\nTYPE F F F\nCOUNT 1 1 {}\nPOINTS {}\nDATA {}\n"
NPY = b"\x93NUMPY\x01\x00v\x00"
ROWS = "0 0 1\n0 1 0\n1 0 0\n"


def npy_header(text: str) -> bytes:
    return NPY + text.ljust(117).encode() + b"\n" + bytes(72)


def npz(**columns) -> bytes:
    memory = io.BytesIO()
    np.savez(memory, **columns)
    return memory.getvalue()


def bomb() -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", bytes(10**7))
    return memory.getvalue()


CLOUDS = {
    "short format line.ply": b"ply\nformat\nend_header\n",
    "short element line.ply": b"ply\nformat ascii 1.0\nelement vertex\nend_header\n",
    "property first.ply": b"ply\nformat ascii 1.0\nproperty float x\nend_header\n",
    "unknown format.ply": PLY.format("weird", 1).encode() + bytes(12),
    "no format.ply": PLY.replace("format {} 1.0\n", "").format(3).encode() + ROWS.encode(),
    "endless text.ply": (PLY.format("ascii", 10**12) + ROWS).encode(),
    "endless records.ply": PLY.format("binary_little_endian", 4 * 10**9).encode() + bytes(120),
    "negative.ply": (PLY.format("ascii", -3) + ROWS).encode(),
    "odd digit.ply": (PLY.format("ascii", "²") + ROWS).encode(),
    "words.ply": (PLY.format("ascii", 1) + "a b c\n").encode(),
    "short data line.pcd": b"DATA\n",
    "no fields.pcd": b"DATA ascii\n1 2 3\n",
    "unknown data.pcd": (PCD.format(1, 3, "weird") + ROWS).encode(),
    "wide field.pcd": PCD.format(10**9, 1, "binary").encode() + bytes(12),
    "endless.pcd": (PCD.format(1, 10**12, "ascii") + ROWS).encode(),
    "no values.pcd": (PCD.format(1, 3, "binary").replace("1 1 1", "0 0 0")).encode(),
    "odd type.pcd": (PCD.format(1, 3, "ascii").replace("F F F", "Q F F") + ROWS).encode(),
    "odd size.pcd": (PCD.format(1, 3, "ascii").replace("4 4 4", "3 4") + ROWS).encode(),
    "damaged.pcd": PCD.format(1, 9, "binary_compressed").encode() + struct.pack("<II", 4, 108) * 2,
    "expanding.pcd": PCD.format(1, 2**27, "binary_compressed").encode()
    + struct.pack("<II", 8, 12 * 2**27 % 2**32)
    + bytes(8),
    "endless.npy": npy_header("{'descr': '<f8', 'fortran_order': False, 'shape': (10**12, 3)}"),
    "large.npy": npy_header("{'descr': '<f8', 'fortran_order': False, 'shape': (999999999999, 3)}"),
    "pickled.npy": npy_header("{'descr': '|O', 'fortran_order': False, 'shape': (1, 3)}"),
    "brackets.npy": npy_header("(" * 117),
    "renamed.npy": npz(a=np.ones((30, 3))),
    "lengths.npz": npz(x=np.ones(3), y=np.ones(4), z=np.ones(3)),
    "texts.npz": npz(x=np.array(["a"]), y=np.array(["b"]), z=np.array(["c"])),
    "bomb.npz": bomb(),
    "two columns.xyz": b"1 2\n3 4\n",
    "ragged.xyz": b"1 2 3\n1 2\n",
}


@pytest.mark.parametrize("name", CLOUDS)
def test_a_malformed_cloud_is_one_line_that_names_it_and_exit_code_2(name, tmp_path, capsys):
    path = tmp_path / name
    path.write_bytes(CLOUDS[name])
    assert cli.main(["view", str(path), "--out", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and said[0].startswith(f"apusmog: error: {path}: ")
    assert os.listdir(tmp_path) == [name]


def test_a_pipe_in_a_folder_is_skipped_and_named_and_the_exit_code_says_so(tmp_path, capsys):
    write_points(tmp_path / "a.ply", np.eye(3))
    os.mkfifo(tmp_path / "b.ply")
    (tmp_path / "c.ply").symlink_to("/dev/zero")
    page = tmp_path / "page.html"
    assert cli.main(["view", str(tmp_path), "--out", str(page)]) == 1
    said = capsys.readouterr().err
    assert all(f"{name}.ply: not a regular file" in said for name in "bc") and page.is_file()


@pytest.mark.parametrize("name", ["a.mcap", "a.db3", "a.bag", "a/a.db3"])
def test_a_bag_that_is_a_pipe_is_refused_and_not_waited_for(name, tmp_path, capsys):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    (path.parent / "metadata.yaml").write_text("rosbag2_bagfile_information: {}")
    os.mkfifo(path)
    bag = path if path.parent == tmp_path else path.parent
    assert cli.main(["view", str(bag), "--out", str(tmp_path / "page.html")]) == 2
    assert capsys.readouterr().err == f"apusmog: error: {path}: not a regular file\n"


@pytest.mark.parametrize(
    "plugin, mode",
    [("MCAP", "STORAGE"), ("SQLITE3", "FILE"), ("MCAP", "FILE"), ("SQLITE3", "MESSAGE")],
)
def test_a_bag_that_expands_without_end_is_stopped(plugin, mode, tmp_path, capsys, monkeypatch):
    rosbag2 = pytest.importorskip("rosbags.rosbag2")
    from rosbags.typesys import Stores, get_typestore

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "expanded"))
    (tmp_path / "expanded").mkdir()
    kind, store = "sensor_msgs/msg/PointCloud2", get_typestore(Stores.ROS2_JAZZY)
    storage = rosbag2.StoragePlugin[plugin]
    writer = rosbag2.Writer(tmp_path / "bag", version=9, storage_plugin=storage)
    writer.set_compression(rosbag2.CompressionMode[mode], rosbag2.CompressionFormat.ZSTD)
    with writer:
        connection = writer.add_connection("/points", kind, typestore=store)
        for size in (10**5, 3 * 10**7):
            writer.write(connection, size, bytes(size))
    assert cli.main(["view", str(tmp_path / "bag"), "--out", str(tmp_path / "page.html")]) == 2
    assert "expands beyond" in capsys.readouterr().err
    assert not os.listdir(tmp_path / "expanded")
    with pytest.raises(ValueError, match="expands beyond"):  # as replay reads it
        for _, message in open_scans(tmp_path / "bag").messages():
            if "expands" in str(message):
                raise message


# --- millimetres ----------------------------------------------------------------------------------

UTM = np.array([500_000.0, 4_500_000.0, 100.0])


@pytest.fixture(scope="module")
def sphere():
    points = np.random.default_rng(0).normal(size=(300, 3))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def shape():
    return Upsampler.load("shape", device="cpu")


@pytest.mark.parametrize("suffix", WRITERS)
def test_large_coordinates_keep_their_millimetres_or_are_refused(suffix, sphere, tmp_path):
    path = tmp_path / f"a{suffix}"
    if suffix == ".bin":
        with pytest.raises(ValueError, match=r"a.bin: .bin files hold float32"):
            write_points(path, sphere + UTM)
    else:
        write_points(path, sphere + UTM)
        assert np.abs(read_points(path).points - UTM - sphere).max() < 1e-6
    write_points(path, sphere)
    assert read_points(path).points.dtype == np.float32


@pytest.mark.parametrize("suffix", [".xyz", ".pcd"])
def test_upsampling_far_from_the_origin_is_as_exact_as_near_it(suffix, sphere, tmp_path):
    write_points(tmp_path / f"far{suffix}", sphere + UTM)
    write_points(tmp_path / "near.npy", sphere)
    for source, target in ((f"far{suffix}", f"out{suffix}"), ("near.npy", "out.npy")):
        assert cli.main(["upsample", str(tmp_path / source), str(tmp_path / target)]) == 0
    far = read_points(tmp_path / f"out{suffix}").points - UTM
    away, _ = cKDTree(read_points(tmp_path / "out.npy").points).query(far)
    assert np.mean(away < 1e-4) > 0.99  # of points that are equally good, the other may be chosen


@pytest.mark.parametrize("kind", ["<f8", ">f8", "<i4"])
def test_messages_with_large_coordinates_keep_their_millimetres(kind, sphere):
    exact = np.round((sphere + UTM) * (1 if "i" in kind else 1e3)) / (1 if "i" in kind else 1e3)
    rows = np.ascontiguousarray(exact.astype(kind))
    code = {"f8": 8, "i4": 5}[kind[1:]]
    size = rows.itemsize
    fields = [(axis, at * size, code, 1) for at, axis in enumerate("xyz")]
    points, *_, dropped = decode(fields, 1, len(rows), 3 * size, 0, kind[0] == ">", rows.tobytes())
    assert dropped == 0 and np.abs(points - exact).max() < 1e-6


def test_a_bag_in_map_coordinates_comes_out_of_a_scan_with_its_millimetres(sphere, tmp_path):
    pytest.importorskip("rosbags")
    from apusmog_core.data.bag_writer import cloud_writer

    records = np.zeros(len(sphere), [(axis, "<f8") for axis in "xyz"])
    for axis, values in zip("xyz", (sphere + UTM).T, strict=True):
        records[axis] = values
    with cloud_writer(tmp_path / "bag", "/points") as write:
        write(1, "map", records)
    (scan,) = open_scans(tmp_path / "bag")
    assert np.abs(scan.points - UTM - sphere).max() < 1e-6
    out = tmp_path / "out"
    assert cli.main(["scan", str(tmp_path / "bag"), str(out), "--scene"]) == 0
    (again,) = open_scans(out)
    assert np.abs(again.points - UTM - sphere).max() < 1e-6


# --- clouds that no network can serve -------------------------------------------------------------


@pytest.mark.parametrize("factor", [1e4, 1e6, 1e30])
def test_a_point_far_away_is_refused_by_name(factor, sphere, shape):
    cloud = sphere.copy()
    cloud[7] *= factor
    with pytest.raises(ValueError, match=r"1 of 300 points, such as number 7 at"):
        shape.upsample(cloud, 4)


def test_a_point_that_is_not_so_far_away_changes_nothing_for_the_others(sphere, shape):
    cloud = sphere.copy()
    cloud[7] *= 100
    dense = shape.upsample(cloud, 4)
    radius = np.linalg.norm(dense, axis=1)
    near = radius < 2
    before = np.abs(np.linalg.norm(shape.upsample(sphere, 4), axis=1) - 1).mean()
    assert near.mean() > 0.95 and np.abs(radius[near] - 1).mean() < 1.2 * before


@pytest.mark.parametrize("origin", [(1e4, 0, 0), (1e200, 0, 0)])
def test_an_origin_out_of_reach_is_refused(origin, sphere):
    with pytest.raises(ValueError, match="origin: .*no sensor sees"):
        Upsampler.load("lidar", device="cpu").upsample(sphere + [5, 0, 0], 4, origin=origin)


def test_points_along_one_viewing_ray_stay_along_it():
    ray = np.outer(np.linspace(5, 10, 50), [1, 0.1, 0.1])
    dense = Upsampler.load("lidar", device="cpu").upsample(ray, 4, origin=(0, 0, 0))
    along = dense @ ray[0] / np.linalg.norm(ray[0]) ** 2
    assert len(dense) == 200 and np.abs(dense - np.outer(along, ray[0])).max() < 0.1


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--ratio", "0.001"], "ratio 0.001 leaves none of 300 points"),
        (["--ratio", "1e9"], "300,000,000,000 points"),
        (["--weights", "w" * 300], "no such file"),
        (["--weights", "a\0b"], "no such file"),
    ],
)
def test_arguments_that_make_no_cloud_are_one_line(arguments, complaint, sphere, tmp_path, capsys):
    write_points(tmp_path / "a.npy", sphere)
    paths = [str(tmp_path / "a.npy"), str(tmp_path / "out.npy")]
    assert cli.main(["upsample", *paths, *arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and complaint in said[0]


@pytest.mark.parametrize(
    "cloud", [np.ones((50, 3)), np.outer(np.arange(50), [1, 2, 3]), np.repeat(np.eye(3)[:2], 20, 0)]
)
def test_a_cloud_without_area_has_no_mesh(cloud, tmp_path):
    reconstruct = pytest.importorskip("apusmog_core.surface.mesh").reconstruct
    pytest.importorskip("open3d")
    with pytest.raises(ValueError, match="in one place or on one line"):
        reconstruct(cloud, tmp_path / "mesh.ply")


def test_a_crash_of_open3d_is_one_line_and_no_file(sphere, tmp_path, capsys, monkeypatch):
    pytest.importorskip("open3d")
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    monkeypatch.setattr("apusmog_core.surface.mesh.POISSON", ("-c", crash))
    write_points(tmp_path / "a.npy", sphere)
    assert cli.main(["mesh", str(tmp_path / "a.npy"), str(tmp_path / "a.ply")]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "crashed (signal 11)" in said[0]
    assert os.listdir(tmp_path) == ["a.npy"]


@pytest.mark.parametrize("suffix", [".ply", ".obj", ".off", ".stl"])
def test_an_exact_sphere_becomes_a_mesh_that_open3d_reads(suffix, sphere, tmp_path):
    o3d = pytest.importorskip("open3d")
    from apusmog_core.surface.mesh import reconstruct

    path = tmp_path / f"mesh{suffix}"
    _, triangles = reconstruct(sphere, path, depth=5)
    mesh = o3d.io.read_triangle_mesh(str(path))
    assert len(mesh.triangles) == triangles
    assert np.abs(np.linalg.norm(np.asarray(mesh.vertices), axis=1) - 1).mean() < 0.05


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n3 0 1 7\n", "vertices that are not there"),
        ("OFF\n999999999999 1 0\n0 0 0\n", "are announced"),
        ("OFF\n3 1 0\n0 0 0\n1 0\n0 1 0\n3 0 1 2\n", "not a readable OFF mesh"),
        ("COFF?\n", "not an OFF file"),
    ],
)
def test_a_damaged_mesh_is_an_error_and_not_a_crash(text, complaint, tmp_path):
    (tmp_path / "a.off").write_text(text)
    with pytest.raises(ValueError, match=f"a.off: .*{complaint}"):
        read_off(tmp_path / "a.off")


def test_an_off_mesh_with_polygons_is_read(tmp_path):
    (tmp_path / "a.off").write_text("OFF 4 1 0\n0 0 0\n1 0 0\n1 1 0 # c\n\n0 1 0\n4 0 1 2 3\n")
    vertices, triangles = read_off(tmp_path / "a.off")
    assert vertices.shape == (4, 3) and triangles.tolist() == [[0, 1, 2], [0, 2, 3]]
