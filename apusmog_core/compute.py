# SPDX-License-Identifier: Apache-2.0
"""The machine: devices, cores, memory, and loops over points as machine code."""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing.pool
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path

import numpy as np
from numba import config as numba_config
from numba import njit

PRECISIONS = ("float32", "bfloat16", "float16")
WORTH_A_THREAD = 1000  # points
CHUNK = 1024  # rows that `in_chunks` works on at once
PROGRESS_FROM = 50_000  # rows: fewer take seconds
MOST_PROCESSES = 60  # Windows cannot wait for more
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # read at start-up


def cores() -> int:
    """Those that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def even_parts(sizes: np.ndarray, parts: int) -> list[slice]:
    """At most `parts` runs of clouds with about as many points each; small work stays whole."""
    total = int(sizes.sum())
    parts = max(1, min(parts, len(sizes), total // WORTH_A_THREAD))
    if parts == 1:
        return [slice(0, len(sizes))]
    middle = np.cumsum(sizes) - sizes / 2
    cuts = np.searchsorted(middle, total * np.arange(1, parts) / parts)
    edges = np.unique(np.concatenate(([0], cuts, [len(sizes)])))
    return [slice(int(a), int(b)) for a, b in zip(edges[:-1], edges[1:], strict=True)]


def in_threads(work: Callable, parts: Sequence) -> list:
    """Results of `work` for each part, in order; each part on a thread with one core of its own."""
    if len(parts) == 1:
        return [work(parts[0])]
    import torch

    with (
        _torch_threads_kept(),
        ThreadPoolExecutor(len(parts), initializer=torch.set_num_threads, initargs=(1,)) as pool,
    ):
        return list(pool.map(work, parts))


_threads_lock, _thread_users, _threads_before = threading.Lock(), 0, 1


@contextmanager
def _torch_threads_kept() -> Iterator[None]:
    """PyTorch's number of threads is what it was, after the last of those who change it is done:
    new threads take the value that was set last, by whomever."""
    global _thread_users, _threads_before
    import torch

    with _threads_lock:
        if _thread_users == 0:
            _threads_before = torch.get_num_threads()
        _thread_users += 1
    try:
        yield
    finally:
        with _threads_lock:
            _thread_users -= 1
            if _thread_users == 0:
                torch.set_num_threads(_threads_before)


def in_chunks(work: Callable, places: np.ndarray, name: str) -> np.ndarray:
    """What `work` returns for rows of an array (n, ...), some at a time, on all cores; long work
    shows how far it is."""
    import torch
    from tqdm import tqdm

    chunks = np.split(places, range(CHUNK, len(places), CHUNK))
    sizes = np.array([len(chunk) for chunk in chunks])
    quiet = len(places) < PROGRESS_FROM or None  # None: if the output is no terminal
    with tqdm(total=len(places), desc=name, unit="point", leave=False, disable=quiet) as bar:

        def run(part: slice) -> np.ndarray:
            found = []
            for chunk in chunks[part]:
                found.append(work(chunk))
                bar.update(len(chunk))
            return np.concatenate(found)

        return np.concatenate(in_threads(run, even_parts(sizes, torch.get_num_threads())))


@contextmanager
def silenced() -> Iterator[None]:
    """Without what C++ libraries print on standard output, past Python: banners."""
    with suppress(AttributeError, ValueError, OSError):
        sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what waits in C's buffers
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


@contextmanager
def environment(**chosen: str) -> Iterator[None]:
    """Variables of the environment, set for a while."""
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def processes(most: int = MOST_PROCESSES) -> Iterator[multiprocessing.pool.Pool]:
    """A process for each core, with one thread: more of them would wait for each other.

    They start by importing the main module, which needs an `if __name__ == "__main__":`.
    """
    with (
        environment(**dict.fromkeys(ONE_THREAD, "1")),
        multiprocessing.get_context("spawn").Pool(min(cores(), most)) as pool,
    ):
        yield pool


def keep_allocations() -> None:
    """Large blocks stay with the process: without this glibc hands them back after each operation,
    and the page faults cost more than the arithmetic."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
    except OSError:  # another C library: slower, not wrong
        pass


def check_memory(points: int, bytes_each: int) -> None:
    """ValueError if so many points take more memory than there is."""
    room = available_memory() // bytes_each
    if points > room:
        raise ValueError(
            f"{points:,} points would not fit into memory, which has room for about {room:,}: "
            "lower the ratio"
        )


def available_memory() -> int:
    """Bytes that this process may still take."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kilobytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable"))
        return 1024 * int(kilobytes)
    except (OSError, StopIteration):  # not on Linux: what the machine has
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# --- devices --------------------------------------------------------------------------------------


def check_device(name: str) -> None:
    """ValueError with the reason if a device is not there; PyTorch is only loaded to find CUDA."""
    if name not in ("auto", "cpu"):
        parse_device(name)


def parse_device(name: str):
    """torch.device for auto, cpu, cuda or cuda:N; ValueError with the reason if it is not there."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,2})?", name):
        raise ValueError(f"device: {name!r} is not auto, cpu, cuda or cuda:N")
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ValueError(f"device: {name} is not there ({count} CUDA devices found); use cpu")
    return device


def free_memory(device) -> int:
    """Bytes that are left on a device, what PyTorch keeps there for later among them."""
    if device.type == "cpu":
        return available_memory()
    import torch

    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def parse_precision(name: str):
    """torch.dtype for float32, bfloat16 or float16; ValueError if it is another."""
    if name not in PRECISIONS:
        raise ValueError(f"precision: {name!r} is not one of {', '.join(PRECISIONS)}")
    import torch

    return getattr(torch, name)


def autocast(device, dtype):
    """The arithmetic of a training step: a context for torch's automatic mixed precision."""
    import torch

    mixed = dtype != torch.float32
    return torch.autocast(device.type, dtype=dtype if mixed else None, enabled=mixed)


def in_precision(network, dtype):
    """The network itself in float32; else a copy with layers in another precision, for inference.

    What is between the layers stays as it is: rays, offsets and mixtures in float32. Autocast would
    cast all weights again at each call.
    """
    import torch
    from torch import nn

    if dtype == torch.float32:
        return network
    network = deepcopy(network)
    for layer in network.modules():
        if isinstance(layer, (nn.Linear, nn.LayerNorm)):
            layer.to(dtype).register_forward_pre_hook(lambda _, given: given[0].to(dtype))
    return network


# --- machine code ---------------------------------------------------------------------------------

SUMS_IN_ANY_ORDER = {"reassoc", "contract", "nsz", "arcp"}  # nan and infinity stay what they are


def machine_code(function: Callable) -> Callable:
    """Compiles a function of arrays; other threads run meanwhile."""
    options = dict(nogil=True, fastmath=SUMS_IN_ANY_ORDER, error_model="numpy")
    before, numba_config.CACHE_DIR = numba_config.CACHE_DIR, CODE_FOLDER
    try:
        return njit(**options, cache=True)(function)
    except RuntimeError:  # no folder to keep it in: compiled again at each start
        return njit(**options)(function)
    finally:
        numba_config.CACHE_DIR = before


def _code_folder() -> str:
    """Where machine code is kept, for exactly these sources: numba itself would not notice that a
    function in another file, which is compiled into this one, has changed."""
    sources = (path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py")))
    digest = hashlib.sha256(b"".join(s for s in sources if b"@machine_code" in s)).hexdigest()
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    base = numba_config.CACHE_DIR or home
    return str(Path(base) / "apusmog" / digest[:16])


CODE_FOLDER = _code_folder()


def cache_complaint() -> str:
    """Why machine code cannot be kept for the next start; nothing where it can."""
    if os.access(CODE_FOLDER, os.W_OK):
        return ""
    return (
        f"{CODE_FOLDER} cannot be written, so that every start compiles; "
        "set NUMBA_CACHE_DIR to a folder that can"
    )
