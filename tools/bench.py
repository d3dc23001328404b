# SPDX-License-Identifier: Apache-2.0
"""What matters, in one table: each figure beside a baseline measured in the same run.

python -m tools.bench                       # all of it, under ten minutes
python -m tools.bench --only segment dds    # some of it
python -m tools.bench --compare OLD NEW     # what changed between two runs
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import numpy as np
from tqdm import tqdm

from .sections import SECTIONS, Row

CHANGED = 0.1  # a difference that --compare marks; runs of one machine vary by less


def machine() -> dict[str, str]:
    """What the figures depend on."""
    import torch

    from apusmog_core.compute import cores

    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(": ")[1] for line in lines if line.startswith("model name")), cpu)
    return dict(
        cpu=cpu,
        cores=str(cores()),
        threads=str(torch.get_num_threads()),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        system=platform.platform(),
        python=platform.python_version(),
        numpy=np.__version__,
        torch=torch.__version__,
        load=" ".join(f"{load:.1f}" for load in os.getloadavg()),
    )


def bench(only: list[str] | None = None, out: str | Path = "bench") -> int:
    """Measure, print the table, save it as JSON; 1 where a bar is missed or a section fails."""
    rows: list[Row] = []
    failed = []
    started = time.monotonic()
    for name in tqdm(only or SECTIONS, desc="bench", unit="section"):
        try:
            rows += SECTIONS[name]()
        except (ImportError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
            failed.append(f"{name}: not measured, {error}")
    result = dict(
        machine=machine(),
        date=datetime.now().isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - started),
        rows=[dict(asdict(row), ratio=row.ratio) for row in rows],
    )
    file = Path(out) / f"{datetime.now():%Y%m%d-%H%M%S}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1))
    print("\n".join([table(rows), "", *failed]))
    print(f"{result['seconds']} s on {result['machine']['cpu']}; saved as {file}")
    return int(bool(failed) or not all(row.holds for row in rows))


def table(rows: list[Row]) -> str:
    """The rows as text, a blank line between sections."""
    width = max((len(row.name) for row in rows), default=0) + 2
    lines = [f"{'':{width}}{'value':>12} {'unit':9}{'baseline':>12}{'ratio':>8}"]
    section = ""
    for row in rows:
        if row.section != section:
            section = row.section
            lines += ["", section]
        verdict = f"; {row.bar}: {'yes' if row.holds else 'NO'}" if row.bar else ""
        lines.append(
            f"  {row.name:{width - 2}}{_short(row.value):>12} {row.unit:9}"
            f"{_short(row.baseline):>12}{row.ratio:8.2f}  of {row.against}{verdict}"
        )
    return "\n".join(lines)


def compare(old: str | Path, new: str | Path) -> str:
    """What changed between two saved runs, figure by figure."""
    runs = [_read(path) for path in (old, new)]
    lines = [
        f"{key}: {runs[0]['machine'].get(key)} -> {value}"
        for key, value in runs[1]["machine"].items()
        if value != runs[0]["machine"].get(key)
    ]
    before, after = ({(r["section"], r["name"]): r for r in run["rows"]} for run in runs)
    lines += ["", f"{'':56}{'old':>12}{'new':>12}{'change':>9}"]
    for key in before | after:
        a, b = before.get(key), after.get(key)
        name = f"{key[0]}: {key[1]}"
        if a is None or b is None:
            lines.append(
                f"  {name:54}{'only in the ' + ('old' if b is None else 'new') + ' run':>24}"
            )
            continue
        change = b["value"] / a["value"] - 1 if a["value"] else float("nan")
        mark = "  *" if abs(change) > CHANGED else ""
        lines.append(
            f"  {name:54}{_short(a['value']):>12}{_short(b['value']):>12}{change:+9.0%} "
            f"{b['unit']}{mark}"
        )
    return "\n".join(lines)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _read(path: str | Path) -> dict:
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a saved bench ({error}); make bench writes one") from error


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what matters, or compare two runs.")
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), help="sections to measure")
    parser.add_argument("--compare", nargs=2, metavar=("OLD", "NEW"), help="two saved runs")
    args = parser.parse_args()
    if not args.compare:
        return bench(args.only)
    try:
        print(compare(*args.compare))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
