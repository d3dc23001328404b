# SPDX-License-Identifier: Apache-2.0
"""What the README says is there: its table, its links, its commands, its Python."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from apusmog_core import cli
from apusmog_core.config import NodeConfig
from apusmog_core.data import write_points
from apusmog_core.settings import settings
from tools import readme

ROOT = Path(__file__).parents[1]
TEXT = readme.README.read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def commands(program: str) -> list[list[str]]:
    """The words after the program, of each line of the shell blocks that calls it."""
    lines = [shlex.split(line, comments=True) for line in "".join(blocks("bash")).splitlines()]
    return [words[1:] for words in lines if words[:1] == [program]]


def test_the_table_of_parameters_is_up_to_date():
    assert readme.with_table(TEXT) == TEXT, "run: python -m tools.readme"


def test_a_readme_without_the_markers_is_refused():
    with pytest.raises(ValueError, match="<!-- /parameters -->"):
        readme.with_table("no markers here")


def test_every_relative_link_leads_somewhere():
    links = [link for link in re.findall(r"\]\(([^)#]+)", TEXT) if "://" not in link]
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_apusmog_command_parses():
    assert len(commands("apusmog")) > 10
    for words in commands("apusmog"):
        cli.build_parser().parse_args(words)


def test_every_apusmog_command_in_a_sentence_exists(capsys):
    for words in map(str.split, re.findall(r"`apusmog ([^`]+)`", TEXT)):
        if words[0] != "COMMAND":
            with pytest.raises(SystemExit) as stop:
                cli.build_parser().parse_args([*words, "--help"])
            assert stop.value.code == 0, words


def test_every_make_target_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert len(commands("make")) > 2
    assert {words[0] for words in commands("make")} <= targets


def test_bare_make_explains_every_target():
    import subprocess

    said = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = re.search(r"^.PHONY: help (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert [name for name in targets.split() if f"make {name}" not in said] == []


def test_every_command_on_the_samples_runs(tmp_path, monkeypatch, capsys):
    on_samples = [
        words for words in commands("apusmog") if any(word.startswith("samples/") for word in words)
    ]
    if not on_samples:
        pytest.skip("the README has no command on the samples")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["samples", "samples"]) == 0
    for words in on_samples:
        assert cli.main(words) == 0, words


def test_every_launch_argument_and_parameter_exists():
    launch = (ROOT / "launch" / "upsample.launch.py").read_text()
    arguments = re.findall(r"(\w+):=", "".join(blocks("bash")))
    assert arguments
    assert [name for name in arguments if f'    "{name}": (' not in launch] == []
    known = {item.name for item in settings(NodeConfig)}
    named = [words[3] for words in commands("ros2") if words[0] == "param"]
    assert named and set(named) <= known


def test_the_python_runs(tmp_path, monkeypatch, capsys):
    side, up = np.meshgrid(np.linspace(-1, 1, 30), np.linspace(-1.2, 0.3, 10))
    wall = np.column_stack([np.full(side.size, 9.0), side.ravel(), up.ravel()]).astype(np.float32)
    (tmp_path / "street").mkdir()
    write_points(tmp_path / "cloud.ply", wall)
    write_points(tmp_path / "street" / "scan.ply", wall)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["samples", "samples"]) == 0
    capsys.readouterr()
    names = {}
    for code in blocks("python"):
        exec(code, names)
    assert capsys.readouterr().out.startswith("scan 1200 {")
    assert len(names["dense"].points) == 4 * len(wall)
