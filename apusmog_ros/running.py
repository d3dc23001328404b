# SPDX-License-Identifier: Apache-2.0
"""The life of a node's process: start, spin, stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import rclpy
from rclpy.exceptions import ParameterException
from rclpy.executors import ExternalShutdownException
from rclpy.signals import SignalHandlerOptions, install_signal_handlers

from .transport import make_room_for_scans


def run(make_node: Callable, args: list[str] | None = None) -> int:
    """Run a node until its future `done` is, or until Ctrl-C; the exit code."""
    node, interrupted = None, False

    def interrupt(*_) -> None:
        """Ends what is being done, however long it takes; ROS would only take note."""
        nonlocal interrupted
        if not interrupted:  # `ros2 launch` passes Ctrl-C on to who has heard it already
            interrupted = True
            raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGINT, interrupt)
        changed = make_room_for_scans()
        rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
        node = make_node()
        if changed and "fastrtps" in rclpy.get_rmw_implementation_identifier():
            node.get_logger().info(changed)
        install_signal_handlers()
        rclpy.spin_until_future_complete(node, node.done)
        if node.done.done():
            node.done.result()  # raises what went wrong
        interrupted = not node.done.done()
    except (KeyboardInterrupt, ExternalShutdownException):
        interrupted = True
    except (ValueError, ParameterException) as error:
        if not interrupted:
            print(error, file=sys.stderr)
            return 1
    except Exception:
        if not interrupted and (node is None or rclpy.ok()):
            raise
        interrupted = True  # ROS went down meanwhile, or C++ was what KeyboardInterrupt ended
    finally:
        if node is not None:
            node.close()
            node.destroy_node()
        with suppress(RuntimeError):  # Ctrl-C may be doing the same at this moment
            rclpy.try_shutdown()
    if interrupted:
        _leave()
    return 0


@contextmanager
def child(
    module: str, *remap: str, stdout, stderr=None, **parameters
) -> Iterator[subprocess.Popen]:
    """A node of ours as a process (a Popen), ended with Ctrl-C when the block is left."""
    given = [part for name, value in parameters.items() for part in ("-p", f"{name}:={value}")]
    names = [part for rule in remap for part in ("-r", rule)]
    command = [sys.executable, "-m", f"apusmog_ros.{module}", "--ros-args", *names, *given]
    process = subprocess.Popen(command, stdout=stdout, stderr=stderr)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _leave() -> None:
    """End the process now, all entities being closed.

    A thread deep in the network cannot be stopped and would crash a dying interpreter, and to take
    PyTorch apart would by itself cost the second that Ctrl-C may take.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
