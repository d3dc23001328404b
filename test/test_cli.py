# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from apusmog_core import cli
from apusmog_core.data import read_points, write_points
from apusmog_core.evaluation import baselines

COMMANDS = [name for name in cli.COMMANDS if name != "evaluate"]
EVALUATIONS = ["pugan", "pu1k", "rings", "ablation"]


class Midpoint:
    """Stands in for a network: these tests are about files and exit codes."""

    def upsample(self, points, ratio=4.0, keep_measured=False, origin=None):
        return baselines.midpoint(points, round(ratio * len(points)))


@pytest.fixture
def midpoint(monkeypatch):
    monkeypatch.setattr(cli.clouds, "load", lambda args: Midpoint())


@pytest.fixture
def cloud(tmp_path):
    path = tmp_path / "cloud.ply"
    points = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    write_points(path, points, intensity=points[:, 0])
    return path


def error_line(capsys) -> str:
    """What the command said on stderr, which must be one line."""
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1, said
    assert said[0].startswith("apusmog: error: ")
    return said[0]


@pytest.mark.parametrize(
    "command", [[c] for c in COMMANDS] + [["evaluate", e] for e in EVALUATIONS]
)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([*command, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: apusmog {' '.join(command)}")


def test_help_loads_no_heavy_library():
    code = (
        "import sys; from apusmog_core.cli import build_parser; build_parser().format_help();"
        "print([m for m in ('torch', 'numpy', 'scipy', 'open3d') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_help_of_the_simulator_follows_the_beam_table(monkeypatch, capsys):
    from apusmog_core.simulate import sensor

    monkeypatch.setitem(sensor.BEAMS, "MINE-7", sensor.Beams((1.0,) * 7, 0.2, 0.01, 0.5, 90.0))
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in sensor.BEAMS) and "7 rings" in shown


def test_help_of_scan_lists_every_setting(capsys):
    from apusmog_core.config import PipelineConfig
    from apusmog_core.settings import settings

    with pytest.raises(SystemExit):
        cli.main(["scan", "--help"])
    shown = capsys.readouterr().out
    assert [item.name for item in settings(PipelineConfig) if f"  {item.name} " not in shown] == []


def test_a_missing_package_names_the_extra_that_installs_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "open3d", None)  # importing it fails, as if not installed
    assert cli.main(["simulate", str(tmp_path / "out")]) == 1
    assert "pip install '.[lidar]'" in error_line(capsys)


def test_every_extra_is_one_of_setup_py_and_installs_what_is_said(monkeypatch):
    import setuptools

    from apusmog_core.cli.arguments import EXTRAS

    known = {}
    monkeypatch.setattr(setuptools, "setup", lambda **options: known.update(options))
    root = Path(__file__).parents[1]
    monkeypatch.chdir(root)
    exec((root / "setup.py").read_text(), {"__file__": str(root / "setup.py")})
    for module, extra in EXTRAS.items():
        assert any(module in line for line in known["extras_require"][extra]), (module, extra)


def test_completion_is_a_script_that_knows_every_command(capsys, tmp_path):
    pytest.importorskip("shtab", reason="shtab is not installed")
    assert cli.main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    ask = (
        f"source {script}; COMP_WORDS=(apusmog sc); COMP_CWORD=1; _shtab_apusmog;"
        ' echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True)
    assert done.stdout.split() == ["scan"], done.stderr


def test_what_is_long_is_explained_after_two_seconds(monkeypatch, capsys):
    from apusmog_core.cli import progress

    monkeypatch.setattr(progress, "PATIENCE", 0.02)
    with progress.waiting("counting sheep"):
        time.sleep(0.1)
    with progress.waiting("nothing at all"):
        pass
    assert capsys.readouterr().err == "apusmog: counting sheep ...\n"


def test_info_reads_like_a_card(capsys):
    assert cli.main(["info", "lidar"]) == 0
    card = capsys.readouterr().out
    assert card.startswith("lidar\n  for: ") and "domain sensor" in card and "lidar.md" in card


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ([], "COMMAND"),
        (["sharpen"], "sharpen"),
        (["upsample", "a.xyz"], "OUT"),
        (["upsample", "a.xyz", "b.xyz", "--ratio", "0"], "0 is not a ratio above 0"),
        (["upsample", "a.xyz", "b.xyz", "--ratio", "nan"], "nan is not a ratio above 0"),
        (["simulate", "out", "--frames", "0"], "0 is not a count of 1 or more"),
        (["evaluate", "rings", "--simulate", "1", "--stride", "1"], "1: no ring is held out"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert complaint in error_line(capsys)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["upsample", "{}/none.xyz", "{}/out.xyz"], "none.xyz: no such file or folder"),
        (["upsample", "{}/cloud.ply", "{}/out.doc"], "out.doc: unknown kind of file"),
        (["mesh", "{}/cloud.ply", "{}/out.doc"], "out.doc: unknown kind of mesh"),
        (["train", "{}/none.yaml"], "none.yaml"),
        (["evaluate", "pugan", "{}", "--baselines"], "no folder input_2048"),
        (["evaluate", "pugan", "{}", "--baselines", "--out", "{}/a.xls"], "a.xls: results are"),
        (["evaluate", "rings", "--baselines"], "give SCANS, or --simulate"),
        (["evaluate", "rings", "{}", "--holdout", "{}", "--baselines"], "no SCAN.npz in it"),
        (["evaluate", "rings", "{}", "--sensor", "VLP-16"], "--sensor VLP-16: only simulated"),
        (
            ["evaluate", "rings", "--simulate", "1", "--baselines", "--sensor", "X1"],
            "unknown sensor 'X1'; known: HDL-64E",
        ),
        (["simulate", "{}/out", "--sensor", "X1"], "unknown sensor 'X1'"),
        (["info", "{}/cloud.ply"], "cloud.ply: not APU-SMOG weights"),
        (["upsample", "{}/cloud.ply", "{}/a.ply", "--weights", "none"], "weights 'none': no such"),
        (["view", "{}/none.bag"], "none.bag: no such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, complaint, capsys, tmp_path, cloud):
    assert cli.main([text.format(tmp_path) for text in arguments]) == 2
    assert complaint in error_line(capsys)


def test_interrupting_exits_with_130(monkeypatch, cloud, tmp_path):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.clouds, "load", interrupt)
    assert cli.main(["upsample", str(cloud), str(tmp_path / "out.ply")]) == 130


@pytest.mark.parametrize("suffix", [".xyz", ".ply", ".pcd", ".bin", ".npy"])
def test_a_cloud_is_upsampled_to_the_exact_count_in_any_format(suffix, cloud, tmp_path, midpoint):
    out = tmp_path / "deep" / f"out{suffix}"
    assert cli.main(["upsample", str(cloud), str(out), "--ratio", "2.5"]) == 0
    dense = read_points(out)
    assert len(dense.points) == 125
    assert set(dense.intensity.round(4)) <= set(read_points(cloud).intensity.round(4))


def test_a_folder_is_upsampled_past_a_bad_file_which_is_named(cloud, tmp_path, midpoint, capsys):
    (tmp_path / "bad.xyz").write_text("not numbers\n")
    out = tmp_path / "out"
    assert cli.main(["upsample", str(tmp_path), str(out)]) == 1
    assert [file.name for file in out.iterdir()] == ["cloud.ply"]
    assert "bad.xyz" in capsys.readouterr().err


def test_a_folder_is_never_overwritten_with_its_own_output(cloud, midpoint, capsys):
    before = cloud.read_bytes()
    assert cli.main(["upsample", str(cloud.parent), str(cloud.parent)]) == 2
    assert "must not be the input folder" in error_line(capsys)
    assert cloud.read_bytes() == before


@pytest.mark.parametrize("origin", [[], ["--origin", "1000", "2000", "-3000"]])
def test_a_mesh_follows_the_cloud_and_faces_the_sensor(origin, tmp_path, midpoint):
    o3d = pytest.importorskip("open3d")
    rng = np.random.default_rng(0)
    sphere = rng.normal(size=(600, 3))
    sphere = sphere / np.linalg.norm(sphere, axis=1, keepdims=True) + [1000, 2000, 0]
    if origin:  # a sensor far below sees the lower half
        sphere = sphere[sphere[:, 2] < -0.1]
    write_points(tmp_path / "sphere.ply", sphere)
    out = tmp_path / "mesh.ply"
    arguments = ["mesh", str(tmp_path / "sphere.ply"), str(out), "--depth", "5", "--trim", "0.3"]
    assert cli.main(arguments + origin) == 0
    mesh = o3d.io.read_triangle_mesh(str(out))
    outward = np.asarray(mesh.vertices) - [1000, 2000, 0]
    assert np.abs(np.linalg.norm(outward, axis=1) - 1).mean() < 0.05
    facing = (np.asarray(mesh.vertex_normals) * outward).sum(axis=1)
    assert (facing > 0).mean() > 0.95


def test_evaluation_on_simulated_rings_prints_and_writes_one_table(tmp_path, capsys):
    pytest.importorskip("open3d")
    out = tmp_path / "rings.csv"
    arguments = ["evaluate", "rings", "--simulate", "1", "--sensor", "OS1-64", "--stride", "4"]
    assert cli.main([*arguments, "--baselines", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for method in ("nothing", "range-interpolation", "midpoint"):
        assert method in printed and method in out.read_text()
    assert "to surface" in printed and "F-score at 5 cm" in printed


def test_simulated_scans_are_written_where_they_can_be_read(tmp_path):
    pytest.importorskip("open3d")
    from apusmog_core.data import open_scans

    assert cli.main(["simulate", str(tmp_path / "drive"), "--frames", "2"]) == 0
    assert [len(scan.points) > 10000 for scan in open_scans(tmp_path / "drive")] == [True, True]
