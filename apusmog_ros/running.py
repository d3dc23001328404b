# SPDX-License-Identifier: Apache-2.0
"""The life of a node's process: start, spin, stop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import rclpy
from rclpy.exceptions import ParameterException
from rclpy.executors import ExternalShutdownException


def run(make_node: Callable, args: list[str] | None = None) -> int:
    """Run a node until Ctrl-C or until its future `done` is; the exit code.

    The node's `close()` says whether all its threads have ended.
    """
    node, code, ended = None, 0, True
    try:
        rclpy.init(args=args)
        node = make_node()
        rclpy.spin_until_future_complete(node, node.done)
    except (KeyboardInterrupt, ExternalShutdownException):
        pass
    except (ValueError, ParameterException) as error:
        print(error, file=sys.stderr)
        code = 1
    except Exception:
        if rclpy.ok():  # else Ctrl-C came while the node was being made
            raise
    finally:
        if node is not None:
            ended = node.close()
            node.destroy_node()
        rclpy.try_shutdown()
    if not ended:  # a thread deep in a network cannot be stopped, and would crash in a dying Python
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
