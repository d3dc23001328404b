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

FOLDER = Path(__file__).parent
FILE = ("FASTRTPS_DEFAULT_PROFILES_FILE", "FASTDDS_DEFAULT_PROFILES_FILE")  # up to Jazzy, and later
CHOSEN_BY = (*FILE, "FASTDDS_BUILTIN_TRANSPORTS")  # by any of these a user has decided otherwise
ROOM = 256 << 20  # bytes of shared memory that must be free: containers may have little


def make_room_for_scans() -> str:
    """Before ROS starts, where nothing else is chosen and the memory is there: what was done."""
    if any(name in os.environ for name in CHOSEN_BY) or not has_room():
        return ""
    os.environ.update(dict.fromkeys(FILE, str(profile())))
    return f"Fast DDS has more shared memory by {profile()}; {FILE[0]} chooses otherwise"


def profile() -> Path:
    """The profile for Fast DDS; one that reaches other machines only where ROS may."""
    alone = (
        os.environ.get("ROS_LOCALHOST_ONLY") == "1"
        or os.environ.get("ROS_AUTOMATIC_DISCOVERY_RANGE", "").upper() == "LOCALHOST"
    )
    return FOLDER / ("fastdds_localhost.xml" if alone else "fastdds.xml")


def has_room() -> bool:
    try:
        return shutil.disk_usage("/dev/shm").free >= ROOM
    except OSError:
        return False


if __name__ == "__main__":
    print(profile())
