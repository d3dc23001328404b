# SPDX-License-Identifier: Apache-2.0
"""Scans come out of every kind of file as they went in, and no bad file stops a folder."""

import struct
from pathlib import Path

import numpy as np
import pytest
from scipy.spatial import cKDTree

from apusmog_core.data import BagScans, KittiDrive, open_scans, read_points, write_points
from apusmog_core.data.pointcloud2 import decode
from apusmog_core.segment.rings import find_rings

DATA = Path(__file__).parents[2] / "shared" / "data"
DRIVE = DATA / "kitti_raw_0051"
needs_kitti = pytest.mark.skipif(not DRIVE.is_dir(), reason="shared/data/kitti_raw_0051 is missing")


def cloud(n=50, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 3)).astype(np.float32), rng.random(n).astype(np.float32)


@pytest.mark.parametrize("suffix", [".bin", ".pcd", ".ply", ".npy", ".xyz"])
def test_what_is_written_is_read_back(tmp_path, suffix):
    points, intensity = cloud()
    write_points(tmp_path / f"a{suffix}", points, intensity)
    scan = read_points(tmp_path / f"a{suffix}")
    assert scan.points.dtype == np.float32 and scan.points.flags.c_contiguous
    np.testing.assert_allclose(scan.points, points, rtol=1e-5)
    np.testing.assert_allclose(scan.intensity, intensity, rtol=1e-5)


@pytest.mark.parametrize("suffix", [".pcd", ".ply"])
def test_open3d_reads_what_we_write_with_extra_fields(tmp_path, suffix):
    o3d = pytest.importorskip("open3d")
    points, intensity = cloud()
    ring = np.arange(len(points)) % 4
    path = tmp_path / f"a{suffix}"
    write_points(path, points, intensity, ring=ring, generated=ring > 1)
    theirs = o3d.t.io.read_point_cloud(str(path)).point
    np.testing.assert_array_equal(theirs["positions"].numpy(), points)
    np.testing.assert_array_equal(theirs["generated"].numpy().ravel(), ring > 1)
    np.testing.assert_array_equal(read_points(path).ring, ring)


@pytest.mark.parametrize("suffix", [".pcd", ".ply"])
@pytest.mark.parametrize("form", [{"write_ascii": True}, {"compressed": True}, {}])
def test_we_read_what_open3d_writes(tmp_path, suffix, form):
    o3d = pytest.importorskip("open3d")
    points, intensity = cloud()
    theirs = o3d.t.geometry.PointCloud(o3d.core.Tensor(points))
    theirs.point["intensity"] = o3d.core.Tensor(intensity[:, None])
    o3d.t.io.write_point_cloud(str(tmp_path / f"a{suffix}"), theirs, **form)
    scan = read_points(tmp_path / f"a{suffix}")
    np.testing.assert_allclose(scan.points, points, rtol=1e-5)
    np.testing.assert_allclose(scan.intensity, intensity, rtol=1e-5)


def test_points_that_are_not_finite_are_removed_and_counted(tmp_path):
    points, intensity = cloud()
    points[3, 1], points[7, 2] = np.nan, np.inf
    np.column_stack((points, intensity)).tofile(tmp_path / "a.bin")
    scan = read_points(tmp_path / "a.bin")
    assert scan.dropped == 2 and len(scan.points) == len(scan.intensity) == 48


@pytest.mark.parametrize("suffix", [".bin", ".pcd", ".ply", ".npy", ".xyz"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "garbage"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, suffix, damage):
    points, intensity = cloud()
    path = tmp_path / f"broken{suffix}"
    write_points(path, points, intensity)
    whole = path.read_bytes()
    cut = whole[: len(whole) - 7] if suffix != ".xyz" else whole[:-30] + b"\n1 2"
    path.write_bytes({"truncated": cut, "empty": b"", "garbage": b"\x00\xff what\n" * 7}[damage])
    with pytest.raises(ValueError, match=f"broken{suffix}"):
        read_points(path)


def test_a_bad_file_in_a_folder_is_skipped_with_a_warning_and_counted(tmp_path):
    for at in range(3):
        write_points(tmp_path / f"{at}.bin", *cloud(seed=at))
    (tmp_path / "1.bin").write_bytes(b"12345")
    scans = open_scans(tmp_path)
    with pytest.warns(UserWarning, match=r"1\.bin"):
        names = [scan.name for scan in scans]
    assert names == ["0", "2"] and len(scans) == 3 and scans.skipped == 1


@pytest.mark.parametrize("name", ["nowhere", "empty", "notes.txt"])
def test_what_holds_no_scans_is_an_error_that_names_it(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=name):
        open_scans(tmp_path / name)


# --- KITTI ---------------------------------------------------------------------------------------


@needs_kitti
def test_ring_numbers_from_the_order_agree_with_the_reference():
    drive = open_scans(DRIVE)
    assert isinstance(drive, KittiDrive) and len(drive) == 20
    for file in sorted((DATA / "ring_holdout").glob("*.npz")):
        scan = drive[drive.numbers.index(int(file.stem))]
        ring, source = find_rings(scan.points, scan.ring)
        assert source == "order" and (ring == np.load(file)["ring"]).mean() > 0.999


@needs_kitti
def test_labelled_boxes_hold_the_points_of_their_objects():
    drive = open_scans(DRIVE)
    points = drive[0].points
    above = points[points[:, 2] > -1.4]  # no ground
    boxes = drive.boxes[drive.numbers[0]]
    inside = sum(box.contains(above).sum() for box in boxes)
    around = sum(box.contains(above, margin=0.5).sum() for box in boxes)
    assert inside > 500 and inside > 0.9 * around


@needs_kitti
def test_poses_bring_the_still_world_of_two_scans_together():
    drive = open_scans(DRIVE)
    first, later = (p[p[:, 2] > -1.0] for p in (drive[0].points, drive[5].points))  # no ground
    pose = drive.poses[5]
    before, _ = cKDTree(first).query(later)
    after, _ = cKDTree(first).query(later @ pose[:3, :3].T + pose[:3, 3])
    assert np.median(after) < 0.6 * np.median(before)


def test_time_stamps_follow_the_frame_number_not_the_order(tmp_path):
    folder = tmp_path / "velodyne_points" / "data"
    folder.mkdir(parents=True)
    for number in (0, 2):  # number 1 is missing
        write_points(folder / f"{number:010d}.bin", *cloud())
    lines = [f"2011-09-26 13:00:0{second}.250000000" for second in range(3)]
    (folder.parent / "timestamps.txt").write_text("\n".join(lines))
    stamps = [scan.stamp for scan in open_scans(tmp_path)]
    assert stamps[1] - stamps[0] == 2.0 and stamps[0] % 1 == 0.25


def test_an_odometry_sequence_has_its_own_times(tmp_path):
    (tmp_path / "velodyne").mkdir()
    write_points(tmp_path / "velodyne" / "000000.bin", *cloud())
    (tmp_path / "times.txt").write_text("1.5e+00\n")
    assert [scan.stamp for scan in open_scans(tmp_path)] == [1.5]


# --- PointCloud2 and bags ------------------------------------------------------------------------

XYZ = [("x", 0, 7, 1), ("y", 4, 7, 1), ("z", 8, 7, 1)]


def test_any_layout_of_fields_decodes():
    fields = [("x", 2, 8, 1), ("y", 10, 8, 1), ("z", 18, 8, 1), ("i", 26, 2, 1), ("ring", 28, 4, 3)]
    row = struct.pack(">2x3dBx3H5x", 1, 2, 3, 200, 7, 8, 9)  # 39 bytes, big-endian, padded
    data = (row * 2 + b"....") * 2  # two rows of two points, padded as well
    points, intensity, ring, dropped = decode(fields, 2, 2, 39, 82, True, data)
    assert points.tolist() == [[1, 2, 3]] * 4 and dropped == 0
    assert intensity.tolist() == [200] * 4 and ring.tolist() == [7] * 4


def test_points_that_are_not_finite_do_not_come_out_of_a_message():
    data = np.array([[1, 2, 3], [np.nan, 0, 0], [0, 0, np.inf]], "<f4").tobytes()
    points, intensity, ring, dropped = decode(XYZ, 1, 3, 12, 36, False, data)
    assert points.tolist() == [[1, 2, 3]] and dropped == 2 and intensity is None and ring is None


@pytest.mark.parametrize(
    "layout, reason",
    [
        ((XYZ, 1, 4, 12, 48, False, bytes(36)), "36 bytes.*48"),
        ((XYZ, 2, 2, 12, 12, False, bytes(48)), "row_step 12"),
        ((XYZ, 1, 3, 10, 30, False, bytes(36)), "z ends at byte 12.*point_step is 10"),
        ((XYZ[:2], 1, 3, 12, 36, False, bytes(36)), "no field z"),
        (([*XYZ, ("a", 0, 9, 1)], 1, 3, 12, 36, False, bytes(36)), "a has the unknown datatype 9"),
    ],
)
def test_sizes_that_disagree_are_told_exactly(layout, reason):
    with pytest.raises(ValueError, match=reason):
        decode(*layout)


def write_bag(path, kind, clouds, broken=()):
    pytest.importorskip("rosbags")
    from rosbags.rosbag1 import Writer as Writer1
    from rosbags.rosbag2 import StoragePlugin
    from rosbags.rosbag2 import Writer as Writer2
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS1_NOETIC if kind == "bag" else Stores.ROS2_JAZZY)
    types = store.types
    writer = (
        Writer1(path)
        if kind == "bag"
        else Writer2(path, version=9, storage_plugin=StoragePlugin[kind.upper()])
    )
    with writer:
        connection = writer.add_connection(
            "/points", "sensor_msgs/msg/PointCloud2", typestore=store
        )
        for at, points in enumerate(clouds):
            sequence = {"seq": at} if kind == "bag" else {}
            stamp = types["builtin_interfaces/msg/Time"](sec=at, nanosec=500_000_000)
            message = types["sensor_msgs/msg/PointCloud2"](
                header=types["std_msgs/msg/Header"](stamp=stamp, frame_id="velo", **sequence),
                height=1,
                width=len(points) + (at in broken),
                fields=[types["sensor_msgs/msg/PointField"](*field) for field in XYZ],
                is_bigendian=False,
                point_step=12,
                row_step=12 * len(points),
                data=np.frombuffer(points.tobytes(), np.uint8),
                is_dense=True,
            )
            serialize = store.serialize_ros1 if kind == "bag" else store.serialize_cdr
            writer.write(connection, at, serialize(message, "sensor_msgs/msg/PointCloud2"))


@pytest.mark.parametrize("kind", ["bag", "sqlite3", "mcap"])
def test_every_kind_of_bag_gives_its_clouds_back_and_skips_a_broken_message(tmp_path, kind):
    clouds = [cloud(n)[0] for n in (5, 6, 7)]
    path = tmp_path / ("a.bag" if kind == "bag" else "a")
    write_bag(path, kind, clouds, broken={1})
    scans = open_scans(path)
    assert isinstance(scans, BagScans) and len(scans) == 3
    with pytest.warns(UserWarning, match="message 1 of /points"):
        found = list(scans)
    assert [scan.stamp for scan in found] == [0.5, 2.5] and scans.skipped == 1
    np.testing.assert_array_equal(found[1].points, clouds[2])


@pytest.mark.parametrize("name", ["broken.bag", "broken.mcap", "broken.db3"])
def test_a_damaged_bag_is_an_error_that_names_it(tmp_path, name):
    pytest.importorskip("rosbags")
    (tmp_path / name).write_bytes(b"not a bag at all")
    with pytest.raises(ValueError, match=name):
        open_scans(tmp_path / name)
