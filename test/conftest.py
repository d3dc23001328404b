# SPDX-License-Identifier: Apache-2.0
"""Fixtures over real DDS: every test has a domain of its own, on this machine only."""

import itertools
import os
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

DATA = Path(__file__).parents[2] / "shared" / "data"
DEADLINE = 30.0  # seconds that anything may take
# starting at the process id keeps test runs side by side apart; domains above 101 may lack ports
_domains = (1 + number % 100 for number in itertools.count(os.getpid()))


@pytest.fixture
def kitti():
    folder = DATA / "kitti_raw_0051"
    if not folder.is_dir():
        pytest.skip("no KITTI drive in shared/data")
    return folder


def wait_until(condition, what: str, deadline: float = DEADLINE):
    """What `condition` returns, once it is true; fails after the deadline."""
    end = time.monotonic() + deadline
    while not (result := condition()):
        assert time.monotonic() < end, f"{what}: not within {deadline:g} s"
        time.sleep(0.005)
    return result


class Ros:
    """A context in a domain of its own that spins the nodes given to it in a thread."""

    def __init__(self, domain: int):
        import rclpy
        from rclpy.executors import SingleThreadedExecutor

        self.domain = domain
        self.context = rclpy.Context()
        rclpy.init(context=self.context, domain_id=domain)
        self.options = dict(context=self.context)
        self._spinning = []
        self._executor_kind = SingleThreadedExecutor
        self.peer = self.spin(rclpy.create_node("tester", context=self.context))

    def spin(self, node):
        """Spin a node in a thread of its own until the test ends."""
        executor = self._executor_kind(context=self.context)
        executor.add_node(node)
        thread = threading.Thread(target=self._run, args=(executor,), daemon=True)
        thread.start()
        self._spinning.append((node, executor, thread))
        return node

    @staticmethod
    def _run(executor):
        from rclpy.executors import ExternalShutdownException

        try:
            executor.spin()
        except ExternalShutdownException:
            pass

    def listen(self, kind, topic: str, reliable: bool = True) -> list:
        """The list that messages of a topic are appended to."""
        from rclpy.qos import QoSProfile, ReliabilityPolicy

        policy = ReliabilityPolicy.RELIABLE if reliable else ReliabilityPolicy.BEST_EFFORT
        heard: list = []
        qos = QoSProfile(depth=200, reliability=policy)
        self.peer.create_subscription(kind, topic, heard.append, qos)
        return heard

    def call(self, kind, service: str, request, deadline: float = DEADLINE):
        """A service's answer."""
        client = self.peer.create_client(kind, service)
        wait_until(client.service_is_ready, f"service {service}")
        future = client.call_async(request)
        wait_until(future.done, f"answer of {service}", deadline)
        self.peer.destroy_client(client)
        return future.result()

    def close(self):
        for node, executor, thread in reversed(self._spinning):
            if hasattr(node, "close"):
                wait_until(node.close, "the end of the node's threads")
            executor.shutdown()
            thread.join(5)
            node.destroy_node()
        self.context.try_shutdown()


@contextmanager
def own_domain(monkeypatch):
    """ROS in a domain of its own, in this process and its children."""
    pytest.importorskip("rclpy", reason="ROS 2 (rclpy) is not installed")
    domain = next(_domains)
    monkeypatch.setenv("ROS_DOMAIN_ID", str(domain))
    monkeypatch.setenv("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    if os.environ.get("ROS_DISTRO") == "humble":
        monkeypatch.setenv("ROS_LOCALHOST_ONLY", "1")
    running = Ros(domain)
    yield running
    running.close()


@pytest.fixture
def ros(monkeypatch):
    with own_domain(monkeypatch) as running:
        yield running
