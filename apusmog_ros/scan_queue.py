# SPDX-License-Identifier: Apache-2.0
"""Several scans at once, the newest first to be taken, and answered in their order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

MOST_UNANSWERED = 16  # items: `second` may wait for transforms, and memory is not endless


class ScanQueue:
    """Runs `second(first(item))` for the newest items put in; None from `first` ends an item.

    Each of a few threads does `first` on its own. That is quicker than to share one item among
    them: there is nothing to wait for in between. `second` has a thread of its own and follows the
    order of the items, so that it may wait while the next ones are worked on.
    """

    def __init__(self, first: Callable[[Any], Any], second: Callable[[Any], None], threads: int):
        self._first, self._second = first, second
        self._changed = threading.Condition()
        self._waiting: Any = None  # room for one item: an older one gives way
        self._results: dict[int, Any] = {}  # by the number of the item
        self._taken = self._answered = 0
        self._closed = False
        work = [self._work] * threads + [self._answer]
        self._threads = [threading.Thread(target=target, daemon=True) for target in work]
        for thread in self._threads:
            thread.start()

    def put(self, item: Any) -> bool:
        """Leave the newest item; True when an older one is dropped for it."""
        with self._changed:
            replaced, self._waiting = self._waiting is not None, item
            self._changed.notify_all()
            return replaced

    def close(self, timeout: float) -> bool:
        """Take no more items; True when all threads have ended in time."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            number, item = taken
            result = self._first(item)
            with self._changed:
                self._results[number] = result
                self._changed.notify_all()

    def _answer(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._answered in self._results or self._closed)
                if self._closed:
                    return
                result = self._results.pop(self._answered)
            if result is not None:
                self._second(result)
            with self._changed:
                self._answered += 1
                self._changed.notify_all()

    def _take(self) -> tuple[int, Any] | None:
        """The item and its place in the order, waited for; None when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready() or self._closed)
            if self._closed:
                return None
            item, self._waiting = self._waiting, None
            self._taken += 1
            return self._taken - 1, item

    def _ready(self) -> bool:
        return self._waiting is not None and self._taken - self._answered < MOST_UNANSWERED
