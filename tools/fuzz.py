# SPDX-License-Identifier: Apache-2.0
"""Mutate real files for every reader and command: python -m tools.fuzz SECONDS [MORE_FILES]

A finding is anything but a result, or one line and exit code 1 or 2: a traceback, a crash, 30 s,
2 GB, remains of an output. Each is printed with its command, and its input is kept.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

SECONDS, MEMORY = 30, 2 << 30  # that a command may take on a small file
LARGEST = 1 << 20  # bytes of a file to mutate
NUMBERS = (b"0", b"-1", b"1", b"255", b"65536", b"2147483648", b"99999999999999999999", b"1e9")
NUMBERS += (b"nan", b"inf", b"-inf", b"1e308", b"")
WORDS = (0, 1, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63)
CONFIGS = Path(__file__).parents[1] / "config" / "train"


# --- files to begin with --------------------------------------------------------------------------


def write_seeds(folder: Path) -> None:
    """A small file of every kind that something reads."""
    from apusmog_core import sample_clouds, weights
    from apusmog_core.data import read_points
    from apusmog_core.data.bag_writer import convert
    from apusmog_core.data.clouds import WRITERS, write_columns

    folder.mkdir()
    scans = sample_clouds.write_sample_clouds(folder / "samples")
    scan = read_points(max(scans, key=lambda path: path.stat().st_size))
    near = np.argsort(np.linalg.norm(scan.points - np.median(scan.points, axis=0), axis=1))[:200]
    columns = dict(zip("xyz", scan.points[near].T, strict=True))
    columns |= {"intensity": columns["x"], "ring": np.arange(200, dtype=np.uint16) % 8}
    for suffix in WRITERS:
        write_columns(folder / f"cloud{suffix}", columns)
    write_columns(folder / "wide.ply", columns | {"x": columns["x"] + 4.5e6})
    _write_with_open3d(folder, scan.points[near])
    _write_drive(folder / "drive", scan.points[near])
    for format in ("mcap", "sqlite3"):
        convert(folder / "drive", folder / format, format)
    for name in ("lidar", "shape"):
        shutil.copy(weights.find(name), folder / f"{name}.pt")
    for path in CONFIGS.glob("*.yaml"):
        shutil.copy(path, folder)


def _write_with_open3d(folder: Path, points: np.ndarray) -> None:
    """Other layouts of the same formats, where Open3D is installed."""
    with contextlib.suppress(ImportError, OSError):
        import open3d as o3d

        cloud = o3d.t.geometry.PointCloud(o3d.core.Tensor(points))
        for name, form in (("text", {"write_ascii": True}), ("packed", {"compressed": True})):
            o3d.t.io.write_point_cloud(str(folder / f"{name}.pcd"), cloud, **form)
            o3d.t.io.write_point_cloud(str(folder / f"{name}.ply"), cloud, **form)


def _write_drive(folder: Path, points: np.ndarray) -> None:
    """A raw drive with everything that a real one has."""
    from apusmog_core.data import write_points

    data, oxts = folder / "velodyne_points" / "data", folder / "oxts" / "data"
    oxts.mkdir(parents=True)
    for number in range(2):
        write_points(data / f"{number:010d}.bin", points)
        (oxts / f"{number:010d}.txt").write_text("49.0 8.4 110.0 0.01 0.02 0.3 1 2 3\n")
    stamps = "".join(f"2011-09-26 13:00:0{number}.250000000\n" for number in range(2))
    (folder / "velodyne_points" / "timestamps.txt").write_text(stamps)
    (folder / "calib_imu_to_velo.txt").write_text("R: 1 0 0 0 1 0 0 0 1\nT: -0.8 0.3 -0.8\n")
    pose = "<poses><item><tx>1</tx><ty>2</ty><tz>-1</tz><rz>0.5</rz></item></poses>"
    item = f"<objectType>Car</objectType><h>1</h><w>2</w><l>4</l><first_frame>0</first_frame>{pose}"
    text = f"<boost_serialization><tracklets><item>{item}</item></tracklets></boost_serialization>"
    (folder / "tracklet_labels.xml").write_text(text)


# --- mutations ------------------------------------------------------------------------------------


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to eight changes, of a kind that headers, counts and values are sensitive to."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        rng.choice(CHANGES)(out, rng, _place(out, rng))
    return bytes(out[: 2 * LARGEST])


def _place(out: bytearray, rng: random.Random) -> int:
    """Anywhere; as often in the first kilobyte, where headers are, or at the end, as in zips."""
    size = max(len(out), 1)
    return rng.choice((rng.randrange(size), rng.randrange(min(size, 1024)), -1 - rng.randrange(99)))


def _flip(out, rng, at) -> None:
    if -len(out) <= at < len(out):
        out[at] ^= 1 << rng.randrange(8)


def _word(out, rng, at) -> None:
    size = rng.choice((1, 2, 4, 8))
    out[at : at + size or None] = (rng.choice(WORDS) % 256**size).to_bytes(size, "little")


def _cut(out, rng, at) -> None:
    del out[at : at + rng.choice((1, 4, 100, len(out)))]


def _repeat(out, rng, at) -> None:
    out[at:at] = out[at : at + rng.choice((1, 8, 64, 1000))] * rng.choice((1, 2, 50))


def _insert(out, rng, at) -> None:
    out[at:at] = rng.randbytes(rng.choice((1, 4, 30)))


def _number(out, rng, at) -> None:
    """Another number where the text has one."""
    digits = [i for i in range(min(len(out), 4096)) if 48 <= out[i] < 58]
    if digits:
        start = end = rng.choice(digits)
        while end < len(out) and 48 <= out[end] < 58:
            end += 1
        out[start:end] = rng.choice(NUMBERS)


def _line(out, rng, at) -> None:
    """A line is gone, doubled, or elsewhere."""
    lines = bytes(out).split(b"\n")
    one = lines.pop(rng.randrange(min(len(lines), 20)))
    for _ in range(rng.randrange(3)):
        lines.insert(rng.randrange(min(len(lines), 20) + 1), one)
    out[:] = b"\n".join(lines)


CHANGES: list[Callable] = [_flip, _flip, _word, _word, _cut, _repeat, _insert, _number, _line]


# --- what reads them ------------------------------------------------------------------------------


def case(seed: Path, rng: random.Random, place: Path) -> list[str]:
    """Puts a mutated copy of a seed, a file or a folder, into `place`; a command that reads it."""
    source = place / seed.name
    if seed.is_dir():
        shutil.copytree(seed, source)
        victim = rng.choice([path for path in sorted(source.rglob("*")) if path.is_file()])
    else:
        shutil.copy(seed, source)
        victim = source
    victim.write_bytes(mutate(victim.read_bytes(), rng))
    page = ["--out", str(place / "out.html")]
    if seed.suffix == ".pt":
        clouds = [str(seed.with_name("cloud.npy")), str(place / "out.ply")]
        origin = ["--origin", "0", "0", "0"] if seed.stem == "lidar" else []
        upsample = ["upsample", *clouds, "--weights", str(source), *origin]
        return rng.choice((["info", str(source)], upsample))
    if seed.suffix == ".yaml":
        return ["settings", str(source)]
    if seed.suffix in (".off", ".obj", ".stl"):
        return ["read-mesh", str(source)]
    commands = [["view", str(source), *page]] * 6
    if seed.name == "drive":
        commands += [["bag", str(source), str(place / "out")], ["boxes", str(source)]] * 3
    elif seed.is_file() and seed.suffix not in (".bag", ".mcap", ".db3"):
        commands += [["upsample", str(source), str(place / "out.ply"), "--ratio", "1.5"]] * 2
        commands += [["mesh", str(source), str(place / "out.obj"), "--depth", "4"]]
    commands += [["scan", str(source), str(place / "out")]]
    return rng.choice(commands)


def run(command: list[str]) -> str:
    """What is wrong with how a command ended; empty if nothing is."""
    from apusmog_core import cli

    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            name, source = command[0], Path(command[1])
            code = OTHERS[name](source) if name in OTHERS else cli.main(command)
    except TimeoutError:
        return f"took more than {SECONDS} s"
    except ValueError as error:
        return "" if command[0] in OTHERS and str(error) else traceback.format_exc()
    except BaseException:
        return traceback.format_exc()
    lines = err.getvalue().splitlines()
    errors = [line for line in lines if line.startswith("apusmog: error: ")]
    said = [line for line in lines if line in errors or not line.endswith(" ...")]
    if "not enough memory" in err.getvalue():
        return "took more than 2 GB"
    if code == 2 and (len(errors) != 1 or said[-1] != errors[0]):
        return f"exit code 2, but said {said}"
    return "" if code in (0, 1, 2, None) else f"exit code {code}"


def _settings(path: Path) -> None:
    from apusmog_core.config import TrainConfig
    from apusmog_core.settings import load_yaml

    load_yaml(TrainConfig, path)


def _boxes(path: Path) -> None:
    from apusmog_core.data import KittiDrive

    drive = KittiDrive(path)
    _ = drive.boxes, drive.poses


def _read_mesh(path: Path) -> None:
    from apusmog_core.surface.mesh import read_mesh

    read_mesh(path)


OTHERS = {"settings": _settings, "boxes": _boxes, "read-mesh": _read_mesh}


# --- the loop -------------------------------------------------------------------------------------


def work(seeds: list[Path], place: Path, seed: int, findings, counts) -> None:
    """Case after case, until the parent ends this process."""

    def stop(*_):
        raise TimeoutError

    def limit_memory() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what C libraries print
    signal.signal(signal.SIGALRM, stop)
    run(["upsample", str(seeds[0].with_name("cloud.npy")), str(place / "warm.ply")])  # imports
    run(["scan", str(seeds[0].with_name("cloud.npy")), str(place / "warm.pcd")])
    limit_memory()
    rng = random.Random(seed)
    while True:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        chosen = rng.choice(seeds)
        command = case(chosen, rng, place)
        (place / "command").write_text("\n".join(command))
        counts["now"] = time.monotonic()
        signal.alarm(SECONDS)
        wrong = run(command)
        signal.alarm(0)
        left = [path.name for path in place.rglob(".partial-*")]
        if wrong or left:
            findings.append((command, wrong or f"left {left}", keep(place)))
        counts["cases"] = counts.get("cases", 0) + 1


def keep(place: Path) -> str:
    """A copy of the input that something was found with."""
    kept = Path(tempfile.mkdtemp(prefix="fuzz-finding-"))
    shutil.copytree(place, kept / "case")
    return str(kept / "case")


def fuzz(seconds: float, more: Path | None = None, seed: int | None = None) -> int:
    """Fuzz for so long; the number of findings, printed."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    write_seeds(folder / "seeds")
    own = [folder / "seeds" / name for name in sorted(os.listdir(folder / "seeds"))]
    seeds = [path for path in own if path.name != "samples"]
    if more:
        every = (path for path in sorted(more.rglob("*")) if path.is_file())
        seeds += [path for path in every if path.stat().st_size <= LARGEST]
    context = multiprocessing.get_context("spawn")
    seed = time.time_ns() if seed is None else seed
    print(f"{len(seeds)} files to mutate, seed {seed}", flush=True)
    with context.Manager() as manager:
        findings, counts = manager.list(), manager.dict()
        end, number = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            place = folder / f"work{number}"
            place.mkdir()
            counts["now"] = time.monotonic() + 300  # imports and machine code
            arguments = (seeds, place, seed + number, findings, counts)
            child = context.Process(target=work, args=arguments, daemon=True)
            child.start()
            number += 1
            while child.is_alive() and time.monotonic() < end:
                child.join(1.0)
                if time.monotonic() > counts["now"] + 2 * SECONDS:  # deep in C, deaf to the alarm
                    child.kill()
            if time.monotonic() < end:
                command = (place / "command").read_text().split("\n")
                findings.append((command, f"process ended, code {child.exitcode}", keep(place)))
            child.kill()
            child.join()
        distinct = {wrong.strip().splitlines()[-1][:100] for _, wrong, _ in findings}
        for command, wrong, kept in findings:
            print(f"\n{' '.join(command)}\n  input: {kept}\n{wrong.rstrip()}")
        print(
            f"\n{counts.get('cases', 0)} cases, {len(findings)} findings, {len(distinct)} distinct"
        )
        shutil.rmtree(folder, ignore_errors=True)
        return len(findings)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    raise SystemExit(1 if fuzz(float(sys.argv[1]), *map(Path, sys.argv[2:])) else 0)
