# SPDX-License-Identifier: Apache-2.0
"""The input: subscribed as its publishers offer it, and only while its scans are of use."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rcl_interfaces.msg import ParameterDescriptor
from rclpy.clock import Clock, ClockType
from rclpy.node import Node
from rclpy.qos import QoSPolicyKind, QoSProfile, ReliabilityPolicy
from rclpy.qos_overriding_options import QoSOverridingOptions
from sensor_msgs.msg import PointCloud2

from apusmog_core.config import QosConfig

try:
    from rclpy.event_handler import SubscriptionEventCallbacks
except ImportError:  # Humble
    from rclpy.qos_event import SubscriptionEventCallbacks

RELIABILITY = dict(best_effort=ReliabilityPolicy.BEST_EFFORT, reliable=ReliabilityPolicy.RELIABLE)
LOOK = 0.2  # seconds between two looks at the publishers
IDLE = 5.0  # seconds without use after which scans are no longer received
OVERLAP = 1.0  # seconds that an old subscription stays beside the new one, so that none is missed
REMEMBERED = 50  # scans, to know those that both have received


class Input:
    """Hands the scans of a topic to `receive`, each once.

    With `auto` it is reliable if all publishers offer that, else best effort, and follows them as
    they come and go. `is_used` says whether anybody wants the scans.
    """

    def __init__(
        self,
        node: Node,
        topic: str,
        qos: QosConfig,
        receive: Callable[[PointCloud2], None],
        lost: Callable[[int], None],
        incompatible: Callable,
        is_used: Callable[[], bool],
    ):
        self._node, self._receive, self._is_used = node, receive, is_used
        self.topic = node.resolve_topic_name(topic)
        override = f"qos_overrides.{self.topic}.subscription.reliability"
        fixed = ParameterDescriptor(read_only=True)  # as ROS has it for the other overrides
        self.policy = node.declare_parameter(override, qos.input_reliability, fixed).value
        if self.policy not in ("auto", *RELIABILITY):
            raise ValueError(f"{override}: {self.policy!r} is not auto, best_effort or reliable")
        self._depth = qos.input_depth
        self._events = SubscriptionEventCallbacks(
            incompatible_qos=incompatible, message_lost=lambda event: lost(event.total_count_change)
        )
        self.reliability = "best_effort" if self.policy == "auto" else self.policy
        self._seen: deque[int] = deque(maxlen=REMEMBERED)
        self._old: list[tuple[float, object]] = []  # (when it ends, subscription)
        self._used_at = time.monotonic()
        self._subscription = self._subscribe()
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        node.create_timer(LOOK, self._look, clock=steady)

    def _subscribe(self):
        kinds = (QoSPolicyKind.HISTORY, QoSPolicyKind.DEPTH, QoSPolicyKind.DURABILITY)
        return self._node.create_subscription(
            PointCloud2,
            self.topic,
            self._take,
            QoSProfile(depth=self._depth, reliability=RELIABILITY[self.reliability]),
            event_callbacks=self._events,
            qos_overriding_options=QoSOverridingOptions(kinds),
        )

    def _take(self, msg: PointCloud2, info: dict) -> None:
        sent = info["source_timestamp"]
        if sent not in self._seen:
            self._seen.append(sent)
            self._receive(msg)

    def _look(self) -> None:
        now = time.monotonic()
        while self._old and self._old[0][0] < now:
            self._node.destroy_subscription(self._old.pop(0)[1])
        if self._is_used():
            self._used_at = now
        wanted = self._offered()
        if now - self._used_at > IDLE:
            self._replace(None, now)
        elif self._subscription is None or wanted != self.reliability:
            self.reliability = wanted
            self._replace(self._subscribe(), now)

    def _replace(self, subscription, now: float) -> None:
        if self._subscription is not None:
            self._old.append((now + OVERLAP, self._subscription))
        self._subscription = subscription

    def _offered(self) -> str:
        """What suits all publishers; without any, what there was."""
        if self.policy != "auto":
            return self.policy
        publishers = self._node.get_publishers_info_by_topic(self.topic)
        if not publishers:
            return self.reliability
        offers = {publisher.qos_profile.reliability for publisher in publishers}
        return "reliable" if offers == {ReliabilityPolicy.RELIABLE} else "best_effort"
