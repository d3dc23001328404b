# SPDX-License-Identifier: Apache-2.0
"""`apusmog samples` and `apusmog scan`: what the node does, for files."""

import numpy as np
import pytest
from rosbags.highlevel import AnyReader

from apusmog_core import cli, sample_clouds
from apusmog_core.data import open_scans, read_points, write_points
from apusmog_core.data.bag_writer import cloud_writer
from apusmog_core.data.clouds import WRITERS
from apusmog_core.data.records import to_records


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("samples")
    assert cli.main(["samples", str(out)]) == 0
    return out


def street(folder) -> dict[str, np.ndarray]:
    """Columns of the VLP-16 street with fields of its own, a NaN and rows without return."""
    scan = read_points(folder / "street_vlp16.pcd")
    points = scan.points.copy()
    points[5], points[7:9] = np.nan, 0
    columns = {axis: points[:, i] for i, axis in enumerate("xyz")}
    columns |= dict(intensity=scan.intensity, ring=scan.ring.astype(np.uint16))
    columns["time"] = np.arange(len(points), dtype=np.float64) * 1e-6
    columns["label"] = (np.arange(len(points)) % 251).astype(np.uint8)
    return columns


def columns_of(path) -> dict[str, np.ndarray]:
    scan = read_points(path)
    axes = {axis: scan.points[:, i] for i, axis in enumerate("xyz")}
    return dict(axes, intensity=scan.intensity, ring=scan.ring, **scan.fields)


def test_samples_are_small_scans_and_objects_of_two_sensors_and_a_shape(folder):
    assert sample_clouds.STORED.stat().st_size < 300_000
    names = {path.stem for path in folder.iterdir()}
    assert names == {"shape"} | {
        f"{kind}_{sensor}" for kind in ("car", "person", "street") for sensor in ("hdl64e", "vlp16")
    }
    for path in folder.glob("*.pcd"):
        scan = read_points(path)
        assert scan.ring.max() < (64 if "hdl64e" in path.stem else 16)
        assert 0 < scan.intensity.max() <= 1 and len(scan.points) >= 50


def test_packing_a_scan_loses_less_than_a_sensor_s_noise():
    rng = np.random.default_rng(0)
    rays = rng.normal(size=(500, 3)) * (1, 1, 0.1)
    points = rays / np.linalg.norm(rays, axis=1)[:, None] * rng.uniform(1, 120, (500, 1))
    again = sample_clouds.unpack(
        sample_clouds.pack(points, np.linspace(0, 1, 500), np.arange(500) % 64)
    )
    distance = np.linalg.norm(points, axis=1)
    assert (np.linalg.norm(again["points"] - points, axis=1) < 0.004 + 1e-4 * distance).all()
    assert np.abs(again["intensity"] - np.linspace(0, 1, 500)).max() < 0.006
    assert (again["ring"] == np.arange(500) % 64).all()


@pytest.mark.parametrize("suffix", [".pcd", ".ply", ".npz"])
@pytest.mark.parametrize("scene", [False, True])
def test_measured_points_keep_every_field_and_new_ones_take_those_of_a_neighbour(
    suffix, scene, folder, tmp_path, capsys
):
    before = street(folder)
    WRITERS[suffix](tmp_path / f"in{suffix}", before)  # one point is not finite
    points = np.stack([before.pop(axis) for axis in "xyz"], axis=1)
    out = tmp_path / f"out{suffix}"
    arguments = ["scan", str(tmp_path / f"in{suffix}"), str(out), "--ratio", "2.5"]
    assert cli.main(arguments + ["--scene"] * scene) == 0
    said = capsys.readouterr()
    assert "1 scan, " in said.out and "× 2.500" in said.out and "PatchWork" not in said.out
    assert "1 point not finite" in said.err and "2 points at (0, 0, 0)" in said.err
    after = columns_of(out)
    assert set(after) == {*"xyz", *before, "instance", "generated", "confidence"}
    label_of = dict(zip(before["time"], before["label"], strict=True))
    assert [label_of[t] for t in after["time"]] == after["label"].tolist()
    measured = after["generated"] == 0
    row = np.rint(after["time"][measured] * 1e6).astype(int)
    assert len(set(row)) == len(row)  # each measured point once
    assert (np.stack([after[a][measured] for a in "xyz"], axis=1) == points[row]).all()
    assert (after["ring"][measured] == before["ring"][row]).all()
    assert (after["confidence"][measured] == 1).all() and (~measured).any()
    assert ((after["instance"] == 0).any(), len(row) == len(points) - 3) == (scene, scene)
    objects = after["instance"] > 0
    assert objects.sum() == round(2.5 * (objects & measured).sum())


def test_a_bag_becomes_a_bag_with_the_same_stamps_frames_and_fields(folder, tmp_path, capsys):
    records = to_records(street(folder))
    stamps = [1317042272124561234, 1317042272228889567]
    with cloud_writer(tmp_path / "in", "/points") as write:
        for stamp in stamps:
            write(stamp, "roof", records)
    out = tmp_path / "out"
    assert cli.main(["scan", str(tmp_path / "in"), str(out), "--set", "range.max=20"]) == 0
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []
    with AnyReader([out]) as bag:
        assert [c.topic for c in bag.connections] == ["/upsampler/dense"]
        for (connection, _, raw), stamp in zip(bag.messages(), stamps, strict=True):
            message = bag.deserialize(raw, connection.msgtype)
            time = message.header.stamp
            assert time.sec * 10**9 + time.nanosec == stamp and message.header.frame_id == "roof"
            names = [field.name for field in message.fields]
            assert names == [
                *("x y z intensity ring time label instance generated confidence".split())
            ]
    for scan in open_scans(out):
        assert len(scan.points) and np.linalg.norm(scan.points, axis=1).max() < 21


def test_a_folder_of_clouds_becomes_a_folder_of_files(folder, tmp_path):
    out = tmp_path / "deep" / "dense_x4.5"
    assert cli.main(["scan", str(folder), str(out), "--format", "ply", "--ratio", "4.5"]) == 0
    assert {path.name for path in out.iterdir()} == {f"{p.stem}.ply" for p in folder.iterdir()}


def test_nothing_found_says_what_to_try(folder, tmp_path, capsys):
    arguments = ["scan", str(folder / "person_vlp16.pcd"), str(tmp_path / "out.pcd")]
    assert cli.main([*arguments, "--set", "range.max=3"]) == 0
    assert "no objects found in 1 of 1 scans" in capsys.readouterr().err
    assert "generated" in (tmp_path / "out.pcd").read_bytes()[:300].decode("ascii", "replace")


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["{}", "{}/out.pcd"], "scans do not fit into one file"),
        (["{}/shape.ply", "{}/out.mcap"], "name a folder for a bag"),
        (["{}/shape.ply", "{}"], "exists already"),
        (["{}/shape.ply", "{}/x.pcd", "--set", "cluster.size=8"], "unknown setting 'cluster.size'"),
        (["{}/shape.ply", "{}/new", "--set", "cluster.min_points=0"], "below the least value"),
        (["{}/shape.ply", "{}/new", "--ratio", "2", "--set", "ratio=8"], "give one of them"),
    ],
)
def test_bad_usage_is_named_and_leaves_nothing(arguments, complaint, folder, capsys):
    before = sorted(folder.iterdir())
    assert cli.main(["scan", *(text.format(folder) for text in arguments)]) == 2
    assert complaint in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before


def test_upsample_sends_recordings_and_scans_to_this_command(folder, tmp_path, capsys):
    with cloud_writer(tmp_path / "bag", "/points") as write:
        write(0, "roof", to_records(street(folder)))
    assert cli.main(["upsample", str(tmp_path / "bag"), str(tmp_path / "out")]) == 2
    assert "use: apusmog scan" in capsys.readouterr().err
    car = str(folder / "car_vlp16.pcd")
    assert cli.main(["upsample", car, str(tmp_path / "car.ply"), "--ratio", "1.5"]) == 0
    assert "apusmog scan" in capsys.readouterr().err
    turn, height = (a.ravel() for a in np.meshgrid(np.linspace(0, 6.28, 40), np.linspace(0, 1, 9)))
    write_points(tmp_path / "tube.ply", np.stack((np.cos(turn), np.sin(turn), height), axis=1))
    tube = [str(tmp_path / name) for name in ("tube.ply", "more.ply")]
    assert cli.main(["upsample", *tube, "--ratio", "1.5"]) == 0  # row by row, but no scan
    assert "apusmog scan" not in capsys.readouterr().err


def test_an_origin_that_the_weights_cannot_use_is_an_error(folder, tmp_path, capsys):
    car, out = str(folder / "car_vlp16.pcd"), str(tmp_path / "car.ply")
    assert cli.main(["upsample", car, out, "--origin", "0", "0", "0"]) == 2
    assert "cannot use it" in capsys.readouterr().err
    assert cli.main(["upsample", car, out, "--weights", "lidar"]) == 2
    assert "--origin X Y Z" in capsys.readouterr().err
