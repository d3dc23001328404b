# SPDX-License-Identifier: Apache-2.0
"""Every deliberate mistake of tools/mutants.yaml fits the code and names tests that are there."""

import re
from pathlib import Path

import pytest

from tools.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mistake_can_be_made_and_somebody_should_notice(mutant):
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1, "say where it is now"
    assert mutant.old != mutant.new
    file, *words = mutant.arguments()
    names = re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE)
    wanted = words[1].split(" or ") if words else [""]
    assert any(word in name for name in names for word in wanted)


def test_mistakes_are_many_and_a_stale_one_says_where_it_was(tmp_path):
    assert len(MUTANTS) >= 30 and len({m.name for m in MUTANTS}) == len(MUTANTS)
    (tmp_path / "code.py").write_text("a = 1\n")
    Mutant("one", "code.py", "a = 1", "a = 2", "x").apply(tmp_path)
    assert Path(tmp_path / "code.py").read_text() == "a = 2\n"
    with pytest.raises(ValueError, match="one: code.py has 0 places like 'a = 1'"):
        Mutant("one", "code.py", "a = 1", "a = 2", "x").apply(tmp_path)
