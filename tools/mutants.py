# SPDX-License-Identifier: Apache-2.0
"""Deliberate mistakes, one at a time, in a copy of the code: which of them do the tests not notice?

python -m tools.mutants                 # all of them
python -m tools.mutants prior weights   # those with one of these words in their name
python -m tools.mutants --list
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".yaml")
TIME = 600  # seconds for the tests of one mistake
COPIED = ("apusmog_core", "apusmog_ros", "config", "launch", "test", "tools", "pyproject.toml")


@dataclass(frozen=True)
class Mutant:
    """A mistake, as the list describes it."""

    name: str
    file: str
    old: str
    new: str
    tests: str  # file::words

    def apply(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text()
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(
                f"{self.name}: {self.file} has {text.count(self.old)} places like {self.old!r}; "
                "say in tools/mutants.yaml where it is now"
            )
        path.write_text(text.replace(self.old, self.new))

    def arguments(self) -> list[str]:
        """Of pytest."""
        file, _, words = self.tests.partition("::")
        return [f"test/test_{file}.py", *(["-k", words] if words else [])]


MUTANTS = [Mutant(**row) for row in yaml.safe_load(LIST.read_text())]


def survives(mutant: Mutant, root: Path) -> bool:
    """Whether the tests pass with the mistake in `root`, which is as it was afterwards."""
    path = root / mutant.file
    before = path.read_text()
    mutant.apply(root)
    try:
        return run_tests(mutant, root).returncode == 0
    except subprocess.TimeoutExpired:
        return False  # a mistake that hangs is noticed
    finally:
        path.write_text(before)


def run_tests(mutant: Mutant, root: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [*command, *mutant.arguments()],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIME,
    )
    if done.returncode not in (0, 1):  # 5: no test of this name
        raise RuntimeError(f"{mutant.name}: {' '.join(mutant.arguments())}: {done.stdout[-500:]}")
    return done


def copy_of_the_code(folder: Path) -> Path:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    return folder


def judge(mutants: list[Mutant], jobs: int) -> list[str]:
    """Names of the survivors; prints one line for each mistake."""
    with tempfile.TemporaryDirectory() as place:
        roots = [copy_of_the_code(Path(place) / str(job)) for job in range(jobs)]

        def work(share: int) -> list[str]:
            lived = []
            for mutant in mutants[share::jobs]:
                start = time.monotonic()
                alive = survives(mutant, roots[share])
                verdict = "SURVIVES" if alive else "noticed"
                print(f"{verdict:8}  {time.monotonic() - start:4.0f} s  {mutant.name}", flush=True)
                lived += [mutant.name] if alive else []
            return lived

        with ThreadPoolExecutor(jobs) as pool:
            return [name for names in pool.map(work, range(jobs)) for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mistakes with one of these in their name")
    parser.add_argument("--list", action="store_true", help="only print them")
    parser.add_argument("--jobs", type=int, default=1, help="mistakes tried at once")
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if not given.words or any(word in m.name for word in given.words)]
    if given.list:
        print("\n".join(f"{m.name}: {m.file}; {' '.join(m.arguments())}" for m in chosen))
        return 0
    survivors = judge(chosen, max(1, given.jobs))
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} noticed", *survivors, sep="\n")
    return len(survivors)


if __name__ == "__main__":
    sys.exit(main())
