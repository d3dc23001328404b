# SPDX-License-Identifier: Apache-2.0
"""Files are written whole or not at all: on a full disk, on Ctrl-C, on SIGTERM."""

import resource
import signal
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from conftest import wait_until

from apusmog_core import weights
from apusmog_core.data import write_points
from apusmog_core.data.bag_writer import FORMATS, convert
from apusmog_core.data.clouds import WRITERS
from apusmog_core.data.meshes import MESH_WRITERS, write_mesh
from apusmog_core.evaluation.tables import write_rows
from apusmog_core.files import check_output, written_whole
from apusmog_core.show.page import Moment, write_page

POINTS = np.random.default_rng(0).normal(size=(500, 3)).astype(np.float32)


@contextmanager
def full_disk(room: int = 1000):
    """No file can grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def drive(folder):
    write_points(folder / "velodyne" / "000000.bin", POINTS)
    return folder


FILES = {f"cloud{suffix}": lambda path: write_points(path, POINTS) for suffix in WRITERS}
FILES |= {
    f"mesh{suffix}": lambda path: write_mesh(path, POINTS, np.arange(498).reshape(-1, 3), POINTS)
    for suffix in MESH_WRITERS
}
FILES |= {
    "page.html": lambda path: write_page([Moment("a", POINTS)], path),
    "weights.pt": lambda path: weights.store({"state": torch.zeros(5000)}, path),
    "rows.csv": lambda path: write_rows(path, [{"name": "a" * 2000}]),
    "rows.json": lambda path: write_rows(path, [{"name": "a" * 2000}]),
}


@pytest.mark.parametrize("name", FILES)
def test_a_full_disk_is_an_error_and_leaves_the_old_file_alone(name, tmp_path):
    path = tmp_path / name
    path.write_text("old")
    with pytest.raises(OSError), full_disk():
        FILES[name](path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    FILES[name](path)
    assert path.stat().st_size > 1000 and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("format", FORMATS)
def test_a_bag_that_does_not_fit_on_the_disk_leaves_nothing(format, tmp_path):
    source = drive(tmp_path / "drive")
    with pytest.raises(OSError), full_disk():
        convert(source, tmp_path / "bag", format)
    assert list(tmp_path.iterdir()) == [source]
    assert convert(source, tmp_path / "bag", format) == 1


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_command_leaves_nothing_behind(number, code, tmp_path):
    pytest.importorskip("open3d")
    command = [sys.executable, "-m", "apusmog_core", "simulate", str(tmp_path / "drive")]
    process = subprocess.Popen([*command, "--frames", "100"], stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: list(tmp_path.glob(".partial-*/drive/truth/*.npz")), "the first scan")
        process.send_signal(number)
        said = process.communicate(timeout=30)[1].strip().splitlines()
    finally:
        process.kill()
    assert process.returncode == code and len(said) == 1
    assert list(tmp_path.iterdir()) == []


def test_links_stay_links_and_modes_stay(tmp_path):
    (tmp_path / "there").mkdir()
    real, link = tmp_path / "there" / "a.txt", tmp_path / "a.txt"
    real.write_text("old")
    real.chmod(0o600)
    link.symlink_to(real)
    with written_whole(link) as place:
        place.write_text("new")
    assert link.is_symlink() and real.read_text() == "new" and real.stat().st_mode & 0o777 == 0o600


def test_an_input_is_not_overwritten_under_another_name(tmp_path):
    (tmp_path / "a.ply").write_text("old")
    (tmp_path / "b.ply").hardlink_to(tmp_path / "a.ply")
    with pytest.raises(ValueError, match="must not be the input"):
        check_output(tmp_path / "b.ply", tmp_path / "a.ply")
    with pytest.raises(ValueError, match="a folder"):
        check_output(tmp_path)


def test_points_that_are_not_finite_are_never_written(tmp_path):
    bad = POINTS.copy()
    bad[3, 1] = np.nan
    with pytest.raises(ValueError, match=r"out.ply: 1 of 500 points are not finite"):
        write_points(tmp_path / "out.ply", bad)
    assert list(tmp_path.iterdir()) == []
