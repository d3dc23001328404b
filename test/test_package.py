# SPDX-License-Identifier: Apache-2.0
"""What is installed is what the documentation promises, with pip and with colcon."""

import ast
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

import apusmog_core.cli

ROOT = Path(__file__).parents[1]
# extras of setup.py, and fpsample, for which rosdep has no key
OPTIONAL = {"fpsample", "open3d", "pypatchworkpp", "matplotlib", "h5py", "tensorboard"}
OPTIONAL |= {"onnx", "onnxruntime", "onnxscript", "shtab"}
OPTIONAL |= {"lz4"}  # rosbags brings it
COMMANDS = {"apusmog", "apusmog-upsample-node", "apusmog-replay"}  # on the path of pip's users
EXECUTABLES = {"upsample_node", "replay_node"}  # of `ros2 run apusmog_ros`


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The files of the project that are under version control, so that building leaves no trace."""
    copy = tmp_path_factory.mktemp("source") / "apusmog_ros"
    leave = shutil.ignore_patterns(".*", "build", "install", "log", "demo", "runs", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=leave)
    return copy


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", out, source]
    run = subprocess.run([*command, "--no-build-isolation"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return zipfile.ZipFile(next(out.glob("*.whl")))


def commands_of(wheel: zipfile.ZipFile) -> dict[str, str]:
    name = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    parser = ConfigParser()
    parser.optionxform = str
    parser.read_string(wheel.read(name).decode())
    return dict(parser["console_scripts"])


def test_the_wheel_holds_every_module_weight_and_ament_file(wheel):
    names = wheel.namelist()
    for package in ("apusmog_core", "apusmog_ros"):
        wanted = [file.relative_to(ROOT).as_posix() for file in (ROOT / package).rglob("*.py")]
        assert set(wanted) <= set(names)
    weights = [file.name for file in (ROOT / "apusmog_core/weights").iterdir() if file.is_file()]
    assert {f"apusmog_core/weights/{name}" for name in weights} <= set(names)
    assert any(f"-{apusmog_core.__version__}.dist-info" in name for name in names)
    files = ("py.typed", "show/page.html", "sample_clouds.npz")
    assert {f"apusmog_core/{name}" for name in files} <= set(names)
    assert "apusmog_ros/fastdds.xml" in names
    shared = "\n".join(names)
    for file in ("package.xml", "launch/upsample.launch.py", "config/upsample.yaml"):
        assert f"/share/apusmog_ros/{file}" in shared
    assert "/share/ament_index/resource_index/packages/apusmog_ros" in shared
    assert all(f"/lib/apusmog_ros/{name}" in shared for name in EXECUTABLES)


def test_every_command_has_a_function_behind_it(wheel):
    commands = commands_of(wheel)
    assert set(commands) == COMMANDS
    for target in commands.values():
        module, function = target.split(":")
        if module.startswith("apusmog_ros") and importlib.util.find_spec("rclpy") is None:
            pytest.skip("rclpy is not installed")
        assert callable(getattr(importlib.import_module(module), function))


def test_both_metadata_files_agree():
    package = ET.parse(ROOT / "package.xml").getroot()
    setup = (ROOT / "setup.py").read_text()
    assert re.search(r'license="(.*?)"', setup)[1] == package.findtext("license")
    assert package.findtext("version") == apusmog_core.__version__
    assert package.get("format") == "3"
    assert package.findtext("export/build_type") == "ament_python"


def test_public_names_are_there_and_pytorch_only_for_who_needs_it():
    code = (
        "import sys\n"
        "from apusmog_core import DenseScan, PipelineConfig, ScanPipeline, __version__\n"
        "assert 'torch' not in sys.modules\n"
        "from apusmog_core import Upsampler\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr


def test_the_command_knows_its_version(capsys):
    with pytest.raises(SystemExit) as stop:
        apusmog_core.cli.main(["--version"])
    assert stop.value.code == 0 and apusmog_core.__version__ in capsys.readouterr().out


def test_the_core_does_not_import_ros_or_heavy_optional_packages():
    heavy = ["rclpy", "open3d", "matplotlib", "rosbags", "pypatchworkpp", "onnxruntime"]
    code = (
        "import sys, apusmog_core, apusmog_core.pipeline, apusmog_core.cli\n"
        f"print(*(name for name in {heavy} if name in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (run.stdout.strip(), run.returncode) == ("", 0), run.stderr


@pytest.mark.skipif(shutil.which("colcon") is None, reason="colcon is not installed")
@pytest.mark.parametrize("option", [[], ["--symlink-install"]])
def test_colcon_builds_it_with_executables_where_ros_looks_for_them(source, option):
    workspace = source.parent
    for folder in ("build", "install", "log"):
        shutil.rmtree(workspace / folder, ignore_errors=True)
    command = ["colcon", "build", *option]
    run = subprocess.run(command, cwd=workspace, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    libexec = workspace / "install" / "apusmog_ros" / "lib" / "apusmog_ros"
    assert COMMANDS | EXECUTABLES <= {file.name for file in libexec.iterdir()}
    assert all(os.access(libexec / name, os.X_OK) for name in EXECUTABLES)


def test_package_xml_names_what_is_imported_and_nothing_else():
    modules = set()
    for folder in ("apusmog_core", "apusmog_ros", "launch"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    modules |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    modules.add(node.module.split(".")[0])
    modules -= set(sys.stdlib_module_names) | {"apusmog_core", "apusmog_ros"}
    keys = {"tf2_ros": "tf2_ros_py", "rosbags": "python3-rosbags-pip"}
    keys |= {
        name: f"python3-{name}" for name in ("numba", "numpy", "scipy", "torch", "tqdm", "yaml")
    }
    package = ET.parse(ROOT / "package.xml").getroot()
    named = {depend.text for depend in package.iter("exec_depend")}
    assert named == {keys.get(module, module) for module in modules - OPTIONAL}


def test_every_source_says_its_licence_first():
    folders = ("apusmog_core", "apusmog_ros", "examples", "launch", "test", "tools")
    sources = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    sources += [ROOT / "setup.py", ROOT / "Makefile", *(ROOT / "resource").glob("*_node")]
    texts = {file: file.read_text().removeprefix("#!/usr/bin/env python3\n") for file in sources}
    spdx = "# SPDX-License-Identifier: Apache-2.0\n"
    assert len(texts) > 150
    assert not [file for file, text in texts.items() if text and not text.startswith(spdx)]


def test_no_file_is_longer_than_400_lines_and_no_folder_larger_than_14_modules():
    folders = {file.parent for file in ROOT.glob("apusmog_*/**/*.py")}
    assert {f for f in folders if len(list(f.glob("[!_]*.py"))) > 14} == set()
    sources = [
        file for top in ("apusmog_*", "test", "tools") for file in ROOT.glob(f"{top}/**/*.py")
    ]
    assert [file for file in sources if file.read_text().count("\n") > 400] == []
    assert (ROOT / "README.md").read_text().count("\n") <= 160
