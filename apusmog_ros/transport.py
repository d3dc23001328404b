# SPDX-License-Identifier: Apache-2.0
"""Shared memory with room for whole scans.

Fast DDS gives a process half a megabyte of it, a scan has two: best-effort subscribers of the same
machine then miss most scans, and reliable ones wait for what is sent again.

`python3 -m apusmog_ros.transport` prints the profile, for drivers that are to do the same.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

PROFILE = Path(__file__).with_name("fastdds.xml")
CHOSEN_BY = (  # variables by which a user has decided otherwise
    "FASTRTPS_DEFAULT_PROFILES_FILE",
    "FASTDDS_DEFAULT_PROFILES_FILE",
    "FASTDDS_BUILTIN_TRANSPORTS",
)
ROOM = 128 << 20  # bytes of shared memory that must be free: containers may have little


def make_room_for_scans() -> None:
    """Before ROS starts, where nothing else has been chosen and the memory is there."""
    if not any(name in os.environ for name in CHOSEN_BY) and has_room():
        os.environ[CHOSEN_BY[0]] = str(PROFILE)


def has_room() -> bool:
    try:
        return shutil.disk_usage("/dev/shm").free >= ROOM
    except OSError:
        return False


if __name__ == "__main__":
    print(PROFILE)
