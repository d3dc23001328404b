# SPDX-License-Identifier: Apache-2.0
"""The bench saves what it prints, and tells what changed."""

import json

import pytest

from tools import bench
from tools.sections import Row, sensed_surface


def fake(value: float, holds: bool = True):
    def section():
        yield Row("fake", "work", value, "ms", "rest", 2.0, bar="at most 5 ms", holds=holds)

    return section


def run(monkeypatch, folder, **values) -> dict:
    monkeypatch.setattr(bench, "SECTIONS", {"fake": fake(**values)})
    code = bench.bench(out=folder)
    return code, json.loads(next(folder.iterdir()).read_text())


def test_the_saved_run_has_figures_baselines_and_the_machine(monkeypatch, tmp_path, capsys):
    code, saved = run(monkeypatch, tmp_path / "a", value=4.0)
    assert code == 0 and saved["rows"][0]["ratio"] == 2.0
    assert {"cpu", "cores", "torch", "load"} <= set(saved["machine"])
    assert "at most 5 ms: yes" in capsys.readouterr().out


def test_a_bar_that_is_missed_shows_and_fails(monkeypatch, tmp_path, capsys):
    code, _ = run(monkeypatch, tmp_path / "a", value=6.0, holds=False)
    assert code == 1 and "at most 5 ms: NO" in capsys.readouterr().out


def test_comparing_marks_what_changed(monkeypatch, tmp_path):
    run(monkeypatch, tmp_path / "a", value=4.0)
    run(monkeypatch, tmp_path / "b", value=5.0)
    files = [next((tmp_path / name).iterdir()) for name in "ab"]
    line = next(line for line in bench.compare(*files).splitlines() if "fake: work" in line)
    assert "+25%" in line and line.endswith("*")


def test_comparing_with_what_is_no_bench_says_so(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ValueError, match=r"x\.json: not a saved bench"):
        bench.compare(tmp_path / "x.json", tmp_path / "x.json")


def test_the_measured_surface_has_the_size_it_is_named_for():
    assert sensed_surface(16_000).shape == (16_000, 3)
