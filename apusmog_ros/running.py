# SPDX-License-Identifier: Apache-2.0
"""The life of a node's process: start, spin, stop. `python -m apusmog_ros.running NODE` starts one.

ROS is imported where it is used, so that Ctrl-C is heard from the first moment.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PAUSE = 0.01  # seconds after a message that failed: many of them must not take a whole core


def upsample_node() -> None:
    """The command `apusmog-upsample-node`, and `ros2 run apusmog_ros upsample_node`."""
    start("upsample_node")


def replay_node() -> None:
    """The command `apusmog-replay`, and `ros2 run apusmog_ros replay_node`."""
    start("replay_node")


def start(module: str) -> None:
    """Import a node's module, which takes its time, and run it; the process ends with it."""
    for number in SIGNALS:
        signal.signal(number, lambda *_: os._exit(0))  # nothing is open yet
    if os.environ.get("RCUTILS_LOGGING_USE_STDOUT") != "1":  # else only libraries print there
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        importlib.import_module(f"apusmog_ros.{module}").main()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        _leave(1 if isinstance(ended.code, str) else ended.code or 0)


def run(make_node: Callable, args: list[str] | None = None) -> int:
    """Run a node until its future `done` is, or until Ctrl-C; the exit code."""
    node, interrupted, being_made = None, False, False

    def interrupt(*_) -> None:
        """Ends what is being done, however long it takes; ROS would only take note."""
        nonlocal interrupted
        if not interrupted:  # `ros2 launch` passes Ctrl-C on to who has heard it already
            interrupted = True
            if not being_made:  # half a node could not be destroyed, and would leave shared memory
                raise KeyboardInterrupt

    for number in SIGNALS:
        signal.signal(number, interrupt)
    try:
        import rclpy
        from rclpy.exceptions import ParameterException
        from rclpy.executors import ExternalShutdownException
        from rclpy.signals import SignalHandlerOptions, install_signal_handlers

        from . import transport
    except KeyboardInterrupt:
        _leave()
    try:
        profile = transport.choose_transport()
        transport.clean_up()
        try:
            rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
        except Exception as error:  # arguments or a parameter file that ROS cannot parse
            raise ValueError(f"ROS did not start: {' '.join(str(error).split())}") from error
        being_made = True
        node = make_node()
        being_made = False
        if interrupted:
            raise KeyboardInterrupt
        if profile and "fastrtps" in rclpy.get_rmw_implementation_identifier():
            node.get_logger().debug(f"Fast DDS is set up by {transport.PROFILE}")
            for complaint in transport.complaints():
                node.get_logger().warning(complaint)
        install_signal_handlers()
        _spin(node, lambda: interrupted)
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


def _spin(node, interrupted: Callable[[], bool]) -> None:
    """Spin until the node is done; what rclpy cannot take, such as text that is not UTF-8 or a
    parameter of an unknown type, is logged and does not end the node."""
    import rclpy
    from rclpy.executors import ExternalShutdownException

    from apusmog_core.text import log_line

    while True:
        try:
            return rclpy.spin_until_future_complete(node, node.done)
        except ExternalShutdownException:
            raise
        except Exception as error:
            if interrupted() or not rclpy.ok():
                raise
            text = log_line(f"ignored a message: {type(error).__name__}: {error}")
            node.get_logger().error(text, throttle_duration_sec=1.0)
            time.sleep(PAUSE)


@contextmanager
def child(
    module: str, *remap: str, stdout, stderr=None, env: dict | None = None, **parameters
) -> Iterator[subprocess.Popen]:
    """A node of ours as a process (a Popen), ended with Ctrl-C when the block is left."""
    import subprocess

    given = [part for name, value in parameters.items() for part in ("-p", f"{name}:={value}")]
    names = [part for rule in remap for part in ("-r", rule)]
    command = [sys.executable, "-m", "apusmog_ros.running", module, "--ros-args", *names, *given]
    environment = {**os.environ, **(env or {})}
    process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _leave(code: int = 0) -> None:
    """End the process now, all entities being closed.

    A thread deep in the network cannot be stopped and would crash a dying interpreter, and to take
    PyTorch apart would by itself cost the second that Ctrl-C may take.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    start(sys.argv.pop(1))
