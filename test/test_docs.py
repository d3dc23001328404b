# SPDX-License-Identifier: Apache-2.0
"""What README and docs say is there: links, commands, settings, launch arguments, Python."""

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from apusmog_core import cli
from apusmog_core.cli.arguments import parse_setting
from apusmog_core.config import NodeConfig, PipelineConfig, ReplayConfig, TrainConfig
from apusmog_core.settings import settings, with_values
from tools import parameters

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md"))]
CARDS = sorted(ROOT.glob("apusmog_core/weights/*.md"))
TEXT = {page: page.read_text(encoding="utf-8") for page in [*PAGES, *CARDS]}
GUIDES = "".join(TEXT[page] for page in PAGES)
BLOCK = r"^```{}\n(.*?)^```"


def blocks(text: str, language: str) -> list[str]:
    return re.findall(BLOCK.format(language), text, re.DOTALL | re.MULTILINE)


def inline(text: str = GUIDES) -> list[str]:
    """What stands in backticks in sentences and tables."""
    prose = re.sub(BLOCK.format(r"\w*"), "", text, flags=re.DOTALL | re.MULTILINE)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


def commands(program: str, text: str = GUIDES) -> list[list[str]]:
    """The words after the program, of each line of the shell blocks that calls it."""
    lines = "".join(blocks(text, "bash")).replace("&&", "\n").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[1:] for line in words if line[:1] == [program]]


def option_values(words: list[str], option: str) -> list[str]:
    """The words that follow an option, up to the next one."""
    after = words[words.index(option) + 1 :] if option in words else []
    ends = [at for at, word in enumerate(after) if word.startswith("--")]
    return after[: ends[0]] if ends else after


def anchor(heading: str) -> str:
    """As GitHub names a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", ""))
    return kept.replace(" ", "-")


# --- text ----------------------------------------------------------------------------------------


def test_the_readme_is_short():
    assert len(TEXT[README].splitlines()) <= 160


def test_no_figure_is_missing():
    assert re.findall(r"RESULTS-\d+", "".join(TEXT.values())) == []


def test_the_page_of_parameters_is_up_to_date():
    assert TEXT[parameters.PAGE] == parameters.page(), "run: python -m tools.parameters"


@pytest.mark.parametrize("page", TEXT, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page):
    broken = []
    for link in re.findall(r"\]\(([^)]+)\)", TEXT[page]):
        if "://" in link:
            continue
        path, _, part = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        found = target.exists()
        if found and part:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            found = part in map(anchor, headings)
        broken += [] if found else [link]
    assert broken == []


def test_every_page_is_linked_from_the_readme():
    assert [page.name for page in PAGES[1:] if page.name not in TEXT[README]] == []


def test_every_file_named_in_contributing_exists():
    named = inline(TEXT[ROOT / "CONTRIBUTING.md"])
    files = [name for name in named if re.fullmatch(r"\w[\w.-]*/[\w./-]*", name)]
    assert len(files) > 20
    assert [name for name in files if not (ROOT / name).exists()] == []


# --- commands ------------------------------------------------------------------------------------


def test_every_apusmog_command_of_a_block_parses(capsys):
    found = commands("apusmog")
    assert len(found) > 20
    for words in found:
        try:
            cli.build_parser().parse_args(words)
        except SystemExit as stop:
            assert stop.code == 0 and "--help" in words, words


def test_every_apusmog_command_of_a_sentence_exists_with_its_options(capsys):
    cards = "".join(TEXT[card] for card in CARDS)
    lines = [code.split()[1:] for code in inline(GUIDES + cards) if code.startswith("apusmog ")]
    assert len(lines) > 10
    for words in lines:
        if words[0] == "COMMAND":
            continue
        names = [word for word in words if re.fullmatch(r"[a-z][a-z0-9-]*", word)][:2]
        with pytest.raises(SystemExit) as stop:
            names = names if names[:1] == ["evaluate"] else names[:1]
            cli.build_parser().parse_args([*names, "--help"])
        assert stop.value.code == 0, words
        known = re.findall(r"--[\w-]+", capsys.readouterr().out)
        assert [word for word in words if word.startswith("--") and word not in known] == []


def test_every_setting_of_a_command_is_accepted():
    kinds = dict(scan=PipelineConfig(), view=PipelineConfig(), train=TrainConfig())
    kinds["evaluate"] = kinds["train"]  # of the ablation
    given = [
        (words[0], text) for words in commands("apusmog") for text in option_values(words, "--set")
    ]
    given += [("scan", text.split()[1]) for text in inline() if text.startswith("--set ")]
    assert len(given) > 5
    for command, text in given:
        with_values(kinds[command], dict([parse_setting(text)]))


def test_every_make_target_exists():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    named = {words[0] for words in commands("make") if words}
    named |= {code.split()[1] for code in inline() if code.startswith("make ")}
    assert len(named) > 3 and named <= targets


def test_bare_make_explains_every_target():
    said = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = re.search(r"^.PHONY: help (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert [name for name in targets.split() if f"make {name}" not in said] == []


def test_every_module_that_is_run_exists():
    named = set(re.findall(r"python3?\s+-m\s+([\w.]+)", GUIDES)) - {"venv", "colcon", "pytest"}
    assert len(named) > 3
    assert [name for name in named if importlib.util.find_spec(name) is None] == []


def test_every_extra_exists():
    extras = re.search(r"extras_require=\{(.*?)\}", (ROOT / "setup.py").read_text(), re.DOTALL)[1]
    known = set(re.findall(r'"(\w+)": ', extras))
    named = {name for group in re.findall(r"\[([\w,]+)\]'", GUIDES) for name in group.split(",")}
    assert named and named <= known


# --- ROS -----------------------------------------------------------------------------------------


def test_every_launch_argument_exists():
    launch = (ROOT / "launch" / "upsample.launch.py").read_text()
    named = {name for words in commands("ros2") for name in re.findall(r"(\w+):=", " ".join(words))}
    assert len(named) > 3
    assert [name for name in named if f'    "{name}": (' not in launch] == []


def test_every_command_that_starts_a_node_exists_with_its_parameters():
    scripts = (ROOT / "setup.py").read_text()
    for program, config in (
        ("apusmog-upsample-node", NodeConfig()),
        ("apusmog-replay", ReplayConfig()),
    ):
        [words] = commands(program)
        assert f'"{program} = ' in scripts and words[0] == "--ros-args"
        given = [words[at + 1] for at, word in enumerate(words) if word == "-p"]
        with_values(config, dict(parse_setting(text.replace(":=", "=")) for text in given))


def test_every_parameter_exists_and_takes_the_value_given():
    known = {item.name for item in settings(NodeConfig)}
    groups = {name.split(".")[0] for name in known if "." in name}
    for words in commands("ros2"):
        if words[:2] == ["param", "set"] and "$" not in words[-1]:
            with_values(NodeConfig(), dict([parse_setting(f"{words[3]}={words[4]}")]))
    named = [re.fullmatch(r"([a-z_]+(?:\.[a-z_]+)?)(?:: (\S+))?", code) for code in inline()]
    named = [match for match in named if match and match[1].split(".")[0] in groups]
    dotted = [match[1] for match in named if "." in match[1] and not match[1].endswith(".py")]
    assert len(dotted) > 10 and [name for name in dotted if name not in known] == []
    valued = [code.split(": ") for code in inline() if re.fullmatch(r"[a-z_.]+: \S+", code)]
    for name, value in valued:
        config = NodeConfig() if name in known else TrainConfig()
        with_values(config, dict([parse_setting(f"{name}={value}")]))


def test_topics_and_fields_are_those_of_the_node():
    pytest.importorskip("rclpy", reason="ROS 2 (rclpy) is not installed")
    from apusmog_ros.cloud import APPENDED
    from apusmog_ros.outputs import OUTPUTS

    assert set(re.findall(r"`~/(\w+)`", GUIDES)) == set(OUTPUTS)
    rows = re.findall(r"^\| `(\w+)` \| \w+\d+ \|", TEXT[README], re.MULTILINE)
    assert rows == list(APPENDED.names)


# --- what runs -----------------------------------------------------------------------------------


def test_what_uses_the_samples_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    on_samples = [
        words for words in commands("apusmog") if any(word.startswith("samples") for word in words)
    ]
    assert on_samples[0] == ["samples", "samples"] and len(on_samples) > 5
    for words in on_samples:
        assert cli.main(words) == 0, words
    for words in on_samples[1:]:
        out = option_values(words, "--out") or words[2:3]
        assert (tmp_path / out[0]).stat().st_size > 0, words
    capsys.readouterr()
    names = {}
    for page in PAGES:
        for code in blocks(TEXT[page], "python"):
            exec(code, names)
    assert capsys.readouterr().out.startswith("street_vlp16 ")
    assert len(names["dense"]) == round(4.93 * len(names["points"]))
