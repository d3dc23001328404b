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

WINDOW = 10.0  # seconds that rates, percentiles and levels look back
COUNTS = ("received", "lost", "dropped", "published")
PROBLEMS = ("rejected", "untransformed", "failed")  # counts that raise the level
FOREIGN = 3600.0  # an age beyond this, seconds, is a stamp of another clock


class Statistics:
    """Counts since the start and what the last seconds had; safe to use from any thread."""

    def __init__(self):
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        # name: (time, number) of the last seconds
        self._recent: dict[str, deque[tuple[float, float]]] = defaultdict(deque)
        self._times: dict[str, deque[tuple[float, float]]] = defaultdict(deque)
        self._values: dict[str, str] = {}
        self._started = self._heard_at = time.monotonic()

    def count(self, name: str, by: int = 1) -> None:
        """Count one of COUNTS or PROBLEMS."""
        with self._lock:
            self._counts[name] += by
            _add(self._recent[name], by)
            if name == "received":
                self._heard_at = time.monotonic()

    def note_times(self, **values: float) -> None:
        """Remember times in milliseconds, for the percentiles."""
        with self._lock:
            for name, value in values.items():
                _add(self._times[name], value)

    def tell(self, values: dict[str, object]) -> None:
        """Set lines of the report that are not statistics."""
        with self._lock:
            self._values.update({name: str(value) for name, value in values.items()})

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def percentile(self, name: str, q: float) -> float:
        """Of the last seconds; nan where there was nothing."""
        with self._lock:
            values = _numbers(self._times[name])
        return float(np.percentile(values, q)) if values else np.nan

    def status(
        self, name: str, limits: DiagnosticsConfig, state: str, hardware_id: str = ""
    ) -> DiagnosticStatus:
        """The report, its level judged by `limits`; `state` is idle, ready or what comes before."""
        with self._lock:
            now = time.monotonic()
            seconds, silence = min(now - self._started, WINDOW), now - self._heard_at
            recent = Counter({n: int(sum(_numbers(d))) for n, d in self._recent.items()})
            times = {n: values for n, d in self._times.items() if (values := _numbers(d))}
            counts, values = Counter(self._counts), dict(self._values)
        level, message = DiagnosticStatus.OK, "idle: nobody subscribes to an output"
        if state != "idle":
            age = float(np.median(times["age"])) if "age" in times else np.nan
            level, message = _judge(limits, recent, age, silence, state, values.get("warning", ""))
        percentiles = {
            f"{stage} p{q} [ms]": f"{np.percentile(numbers, q):.1f}"
            for stage, numbers in times.items()
            for q in (50, 99)
        }
        lines = {
            "rate in [Hz]": f"{recent['received'] / max(seconds, 1e-6):.1f}",
            "rate out [Hz]": f"{recent['published'] / max(seconds, 1e-6):.1f}",
            **{n: str(counts[n]) for n in (*COUNTS, *PROBLEMS)},
            **percentiles,
            **values,
            "memory [MB]": f"{memory_mb():.0f}",
        }
        pairs = [KeyValue(key=key, value=value) for key, value in lines.items()]
        return DiagnosticStatus(
            level=level, name=name, message=message, hardware_id=hardware_id, values=pairs
        )


def _add(history: deque, value: float) -> None:
    history.append((time.monotonic(), value))
    _numbers(history)


def _numbers(history: deque) -> list[float]:
    """The numbers of the last seconds; older ones are forgotten."""
    while history and history[0][0] < time.monotonic() - WINDOW:
        history.popleft()
    return [value for _, value in history]


def _judge(
    limits: DiagnosticsConfig,
    recent: Counter,
    age: float,
    silence: float,
    state: str,
    of_scan: str,
) -> tuple[bytes, str]:
    """The level and the reasons for it, each with the value measured and its threshold."""
    errors, warnings = [], [of_scan] if of_scan else []
    if recent["failed"]:
        errors.append(f"{recent['failed']} scans failed (more than 0), see the log")
    if abs(age) > FOREIGN * 1e3:
        warnings.append("age unknown: stamps are not of this clock (use_sim_time?)")
    elif age > limits.error_age_ms:
        errors.append(f"age {age:.0f} ms (more than {limits.error_age_ms:g} ms)")
    elif age > limits.warn_age_ms:
        warnings.append(f"age {age:.0f} ms (more than {limits.warn_age_ms:g} ms)")
    shares = {"lost on the way here": ("lost", recent["received"] + recent["lost"])}
    if state == "ready":  # a network that loads takes the time of others
        shares["dropped"] = ("dropped", recent["received"])
    for what, (name, scans) in shares.items():
        share, limit = recent[name] / max(scans, 1), getattr(limits, f"warn_{name}")
        if share > limit:
            warnings.append(f"{share:.0%} of the scans {what} (more than {limit:.0%})")
    if silence > limits.warn_silence:
        warnings.append(f"no scan for {silence:.0f} s (more than {limits.warn_silence:g} s)")
    for name in PROBLEMS[:2]:
        if recent[name]:
            warnings.append(f"{recent[name]} scans {name} (more than 0), see the log")
    if errors:
        return DiagnosticStatus.ERROR, "; ".join(errors + warnings)
    if warnings:
        return DiagnosticStatus.WARN, "; ".join(warnings)
    if state != "ready":
        return DiagnosticStatus.OK, f"{state}: objects are interpolated"
    return DiagnosticStatus.OK, "upsampling" if recent["published"] else "waiting"


def memory_mb() -> float:
    """Resident memory of this process; its peak where the system does not tell the present."""
    import resource  # not everywhere

    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 1e6
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
