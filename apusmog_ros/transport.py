# SPDX-License-Identifier: Apache-2.0
"""Fast DDS such that whole scans arrive, whatever the driver's settings are; see fastdds.xml.

`python3 -m apusmog_ros.transport` prints the profile, for subscribers that are to do the same.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

PROFILE = Path(__file__).with_name("fastdds.xml")
BEFORE_KILTED, SINCE_KILTED = "FASTRTPS_DEFAULT_PROFILES_FILE", "FASTDDS_DEFAULT_PROFILES_FILE"
# by any of these a user has decided otherwise
CHOSEN_BY = (BEFORE_KILTED, SINCE_KILTED, "FASTDDS_BUILTIN_TRANSPORTS")
BUFFER = 4 << 20  # bytes: receiveBufferSize of the profile
SEGMENT = 32 << 20  # bytes: segment_size of the profile
MEMORY, KERNEL = Path("/dev/shm"), Path("/proc/sys/net/core/rmem_max")
SETTLED = 10.0  # seconds after which whoever makes a segment has locked it


def choose_transport() -> bool:
    """Before ROS starts, where the user has chosen nothing: whether the profile is used."""
    kept_here = os.environ.get("ROS_DISTRO") == "humble" and "ROS_LOCALHOST_ONLY" in os.environ
    if kept_here or any(name in os.environ for name in CHOSEN_BY):
        return False  # Humble keeps to this machine by transports of its own
    os.environ[SINCE_KILTED] = str(PROFILE)
    if _before_kilted():  # later ones warn of this name
        os.environ[BEFORE_KILTED] = str(PROFILE)
    return True


def _before_kilted() -> bool:
    if distro := os.environ.get("ROS_DISTRO"):
        return distro in ("humble", "iron", "jazzy")
    try:  # wheels from PyPI
        return bool(metadata.version("ros-fastrtps"))
    except metadata.PackageNotFoundError:
        return False


def complaints(memory: Path = MEMORY, kernel: Path = KERNEL) -> Iterator[str]:
    """What of the profile this machine cannot give, each with the command that cures it."""
    with suppress(OSError, ValueError):
        allowed = int(kernel.read_text())
        if allowed < BUFFER:
            yield (
                f"the kernel allows a receive buffer of {allowed >> 10} kB, so that scans of "
                f"best-effort drivers get lost; run: sudo sysctl -w net.core.rmem_max={BUFFER}"
            )
    with suppress(OSError):
        free = shutil.disk_usage(memory).free
        if free < SEGMENT:
            yield (
                f"{memory} has {free >> 20} MB free and {SEGMENT >> 20} are needed, so that dense "
                f"clouds go by UDP; run: sudo mount -o remount,size=512m {memory}, or start the "
                "container with --shm-size=512m"
            )


def clean_up(memory: Path = MEMORY) -> list[str]:
    """Remove the shared memory of Fast DDS processes that were killed; its names.

    A living process holds a lock on the file beside each segment.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows, nor such files
        return []
    removed = []
    for lock in memory.glob(f"fast*_{16 * '[0-9a-f]'}_el"):
        with suppress(OSError), lock.open("rb") as file:
            if time.time() - lock.stat().st_mtime < SETTLED:
                continue
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: it is in use
            for left in (lock.with_name(lock.name.removesuffix("_el")), lock):
                left.unlink(missing_ok=True)
                removed.append(left.name)
    return removed


if __name__ == "__main__":
    print(PROFILE)
