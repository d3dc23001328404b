# SPDX-License-Identifier: Apache-2.0
"""Scans at work side by side: answered in their order, and as old as they are."""

import threading
import time

import pytest

pytest.importorskip("rclpy", reason="ROS 2 (rclpy) is not installed")

from conftest import DEADLINE, wait_until  # noqa: E402
from harness import Harness, scan, street  # noqa: E402

from apusmog_ros.scan_queue import ScanQueue  # noqa: E402


def test_an_item_that_takes_longer_is_still_answered_first():
    """The second item is done, and its thread at work on the third, before the first one is."""
    begun = [threading.Event() for _ in range(3)]
    release, answered = threading.Event(), []

    def first(item: int) -> int:
        begun[item].set()
        if item == 0:
            assert release.wait(DEADLINE)
        return item

    scan_queue = ScanQueue(first, answered.append, threads=2)
    for item in range(3):
        assert not scan_queue.put(item)
        assert begun[item].wait(DEADLINE)  # so that none gives way to the next
    wait_until(lambda: len(scan_queue._results) == 2 or answered, "the results of the others")
    assert answered == []
    release.set()
    wait_until(lambda: len(answered) == 3, "all answers")
    assert answered == [0, 1, 2]
    assert scan_queue.close(DEADLINE)


def test_an_item_without_a_result_does_not_hold_up_the_others():
    answered = []
    scan_queue = ScanQueue(lambda item: item or None, answered.append, threads=1)
    for item in (0, 7):
        scan_queue.put(item)
        wait_until(lambda: scan_queue._waiting is None, "an idle thread")
    wait_until(lambda: answered == [7], "the answer")
    assert scan_queue.close(DEADLINE)


def test_the_age_of_a_scan_counts_the_nanoseconds_of_its_stamp(ros):
    under_test = Harness(ros)
    msg = scan(street(1))
    before = time.time()
    msg.header.stamp.sec, msg.header.stamp.nanosec = int(before) - 1, 999_000_000
    stamp = msg.header.stamp.sec + 0.999
    under_test.ask(under_test.listen("dense"), msg)
    wait_until(lambda: under_test.counts().get("published") == 1, "the count")
    age = under_test.node._statistics.percentile("age", 50) / 1e3
    assert before - stamp <= age <= time.time() - stamp
