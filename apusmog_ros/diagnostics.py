# SPDX-License-Identifier: Apache-2.0
"""What the node has done lately, as numbers and as a diagnostic_msgs status."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from pathlib import Path

import numpy as np
from diagnostic_msgs.msg import DiagnosticStatus, KeyValue

from apusmog_core.config import DiagnosticsConfig

WINDOW = 100  # scans that the percentiles look back
PROBLEMS = ("rejected", "untransformed", "failed")  # counts that raise the level
FOREIGN = 3600.0  # an age beyond this, seconds, is a stamp of another clock


class Statistics:
    """Counts since the start and samples of the latest scans; safe to use from any thread."""

    def __init__(self):
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._samples: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._values: dict[str, str] = {}
        self._told: Counter[str] = Counter()  # the counts of the report before
        self._told_at = self._heard_at = time.monotonic()

    def count(self, name: str, by: int = 1) -> None:
        """Count `received`, `published`, `dropped` or one of PROBLEMS."""
        with self._lock:
            self._counts[name] += by
            if name == "received":
                self._heard_at = time.monotonic()

    def sample(self, **values: float) -> None:
        """Remember times in milliseconds, for the percentiles."""
        with self._lock:
            for name, value in values.items():
                self._samples[name].append(value)

    def tell(self, values: dict[str, object]) -> None:
        """Set lines of the report that are not statistics."""
        with self._lock:
            self._values.update({name: str(value) for name, value in values.items()})

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def percentile(self, name: str, q: float) -> float:
        """Of the latest samples; nan where there are none."""
        with self._lock:
            return float(np.percentile(self._samples[name], q)) if self._samples[name] else np.nan

    def status(self, name: str, limits: DiagnosticsConfig) -> DiagnosticStatus:
        """The report since the one before, its level judged by `limits`."""
        with self._lock:
            now = time.monotonic()
            seconds, silence = max(now - self._told_at, 1e-6), now - self._heard_at
            counts, recent = Counter(self._counts), self._counts - self._told
            samples = {name: np.array(values) for name, values in self._samples.items() if values}
            values = dict(self._values)
            self._told, self._told_at = counts, now
        age = float(np.median(samples["age"])) if "age" in samples else np.nan
        level, message = _judge(limits, recent, age, silence)
        lines = {
            "rate in [Hz]": f"{recent['received'] / seconds:.1f}",
            "rate out [Hz]": f"{recent['published'] / seconds:.1f}",
            **{n: str(counts[n]) for n in ("received", "published", "dropped", *PROBLEMS)},
            **{
                f"{stage} p50/p99 [ms]": "{:.1f} / {:.1f}".format(*np.percentile(s, (50, 99)))
                for stage, s in samples.items()
            },
            **values,
            "memory [MB]": f"{memory_mb():.0f}",
        }
        pairs = [KeyValue(key=key, value=value) for key, value in lines.items()]
        return DiagnosticStatus(level=level, name=name, message=message, values=pairs)


def _judge(
    limits: DiagnosticsConfig, recent: Counter, age: float, silence: float
) -> tuple[bytes, str]:
    """The level and the reasons for it, each with the value measured and its threshold."""
    share = recent["dropped"] / max(recent["received"], 1)
    errors, warnings = [], []
    if recent["failed"]:
        errors.append(f"{recent['failed']} scans failed (more than 0), see the log")
    if abs(age) > FOREIGN * 1e3:
        warnings.append("age unknown: stamps are not of this clock (use_sim_time?)")
    elif age > limits.error_age_ms:
        errors.append(f"age {age:.0f} ms (more than {limits.error_age_ms:g} ms)")
    elif age > limits.warn_age_ms:
        warnings.append(f"age {age:.0f} ms (more than {limits.warn_age_ms:g} ms)")
    if share > limits.warn_dropped:
        warnings.append(f"{share:.0%} of the scans dropped (more than {limits.warn_dropped:.0%})")
    if silence > limits.warn_silence:
        warnings.append(f"no scan for {silence:.0f} s (more than {limits.warn_silence:g} s)")
    for name in PROBLEMS[:2]:
        if recent[name]:
            warnings.append(f"{recent[name]} scans {name} (more than 0), see the log")
    if errors:
        return DiagnosticStatus.ERROR, "; ".join(errors + warnings)
    if warnings:
        return DiagnosticStatus.WARN, "; ".join(warnings)
    return DiagnosticStatus.OK, "upsampling" if recent["published"] else "waiting"


def memory_mb() -> float:
    """Resident memory of this process; its peak where the system does not tell the present."""
    import resource  # not everywhere

    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 1e6
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
