# SPDX-License-Identifier: Apache-2.0
"""How soon the node is useful: seconds from its start to a dense cloud, and to its network.

python -m tools.starting    # the first start, which compiles, and a later one
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from subprocess import DEVNULL

import rclpy

from apusmog_core.sample_clouds import write_sample_clouds
from apusmog_ros.running import child

from .throughput import Listener, own_domain

PATIENCE = 300.0  # seconds
SETTLED = 3.0  # seconds after which the player has started


def starting(code: str | Path) -> dict[str, float]:
    """Seconds until the first dense cloud and until the network is ready, and scans dropped.

    `code` is the folder for machine code: the first start is one with an empty folder. A simulated
    scan of a VLP-16 is played at 10 Hz.
    """
    with tempfile.TemporaryDirectory() as folder, own_domain():
        write_sample_clouds(folder)
        played = {"path": Path(folder) / "street_vlp16.pcd", "loop": "true", "stamps": "now"}
        rclpy.init()
        listener = Listener()
        try:
            with child("replay_node", stdout=DEVNULL, wait="true", **played):
                listener.spin_for(SETTLED)
                begin = time.monotonic()
                with child("upsample_node", stdout=DEVNULL, env={"NUMBA_CACHE_DIR": str(code)}):
                    listener.spin_until(lambda: any(listener.widths), PATIENCE)
                    dense = time.monotonic() - begin
                    listener.spin_until(listener.is_ready, PATIENCE)
                    ready = time.monotonic() - begin
                    return dict(dense=dense, ready=ready, dropped=listener.report("dropped"))
        finally:
            listener.destroy_node()
            rclpy.try_shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as empty:
        for which in ("first start", "later start"):
            seen = starting(empty)
            print(
                f"{which}: dense objects after {seen['dense']:.1f} s, the network after "
                f"{seen['ready']:.1f} s, {seen['dropped']:.0f} scans dropped"
            )
