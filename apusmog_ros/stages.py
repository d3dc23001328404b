# SPDX-License-Identifier: Apache-2.0
"""Two threads in a row: the next scan is segmented while the network works on the current one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


class Slot:
    """Room for one item: the newest waits, an older one gives way."""

    def __init__(self):
        self._changed = threading.Condition()
        self._item: Any = None
        self._closed = False

    def put(self, item: Any) -> bool:
        """Leave an item; True when one that nobody took gave way to it."""
        with self._changed:
            replaced, self._item = self._item is not None, item
            self._changed.notify_all()
            return replaced

    def hand(self, item: Any) -> None:
        """Leave an item and wait until it is taken."""
        with self._changed:
            self._item = item
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._item is None or self._closed)

    def take(self) -> Any:
        """The item, waited for; None when the slot is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._item is not None or self._closed)
            item, self._item = self._item, None
            self._changed.notify_all()
            return None if self._closed else item

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Stages:
    """Runs `second(first(item))` for the newest items put in; None from `first` ends an item."""

    def __init__(self, first: Callable[[Any], Any], second: Callable[[Any], None]):
        self._inbox, self._between = Slot(), Slot()
        self._first, self._second = first, second
        self._threads = [
            threading.Thread(target=target, daemon=True)
            for target in (self._run_first, self._run_second)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, item: Any) -> bool:
        """Leave the newest item; True when an older one is dropped for it."""
        return self._inbox.put(item)

    def close(self, timeout: float) -> bool:
        """Take no more items; True when both threads have ended in time."""
        self._inbox.close()
        self._between.close()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _run_first(self) -> None:
        while (item := self._inbox.take()) is not None:
            result = self._first(item)
            if result is not None:
                # not earlier than the second stage takes it: the next item is then the newest
                self._between.hand(result)

    def _run_second(self) -> None:
        while (item := self._between.take()) is not None:
            self._second(item)
