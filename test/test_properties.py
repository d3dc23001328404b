# SPDX-License-Identifier: Apache-2.0
"""What holds for any file and any message, by hypothesis."""

import tempfile
from pathlib import Path

import numpy as np
import pytest

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.extra import numpy as arrays  # noqa: E402

from apusmog_core.data import read_points, write_points  # noqa: E402
from apusmog_core.data.clouds import READERS  # noqa: E402
from apusmog_core.data.pointcloud2 import DATATYPES, decode  # noqa: E402
from apusmog_core.settings import parse_yaml  # noqa: E402

settings.register_profile("quick", max_examples=60, deadline=None, derandomize=True, database=None)
settings.load_profile("quick")

COORDINATES = st.floats(-1e7, 1e7, width=64)
CLOUDS = arrays.arrays(np.float64, st.tuples(st.integers(1, 20), st.just(3)), elements=COORDINATES)
SUFFIXES = st.sampled_from(sorted(READERS))
MAGIC = st.sampled_from(
    [
        b"",
        b"ply\nformat ascii 1.0\nelement vertex 2\nproperty float x\n",
        b"ply\nformat binary_big_endian 1.0\nelement vertex 3\nproperty double x\nend_header\n",
        b"FIELDS x y z\nSIZE 4 4 4\nTYPE F F F\nPOINTS 2\nDATA binary_compressed\n",
        b"FIELDS x y z\nSIZE 4 4 4\nTYPE F F F\nPOINTS 2\nDATA ascii\n",
        b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (2, 3)}",
        b"PK\x03\x04",
    ]
)


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@given(cloud=CLOUDS, suffix=SUFFIXES)
def test_any_cloud_comes_back_to_the_half_millimetre_or_is_refused(folder, cloud, suffix):
    path = folder / f"a{suffix}"
    try:
        write_points(path, cloud)
    except ValueError as error:
        assert suffix == ".bin" and "millimetres" in str(error)
        return
    back = read_points(path)
    assert back.dropped == 0 and np.abs(back.points - cloud).max() <= 5e-4


@given(begin=MAGIC, rest=st.binary(max_size=300), suffix=SUFFIXES)
def test_any_bytes_are_a_finite_cloud_or_one_error_that_names_the_file(folder, begin, rest, suffix):
    path = folder / f"b{suffix}"
    path.write_bytes(begin + rest)
    try:
        scan = read_points(path)
    except ValueError as error:
        assert str(error).startswith(f"{path}: ")
    else:
        assert len(scan.points) and np.isfinite(scan.points).all()
        columns = (scan.intensity, scan.ring, *scan.fields.values())
        assert all(c is None or c.shape == (len(scan.points),) for c in columns)


@given(cloud=CLOUDS, suffix=SUFFIXES, cut=st.floats(0, 1), flip=st.integers(0, 10**6))
def test_a_damaged_file_is_a_finite_cloud_or_an_error(folder, cloud, suffix, cut, flip):
    path = folder / f"c{suffix}"
    write_points(path, cloud.astype(np.float32))
    data = bytearray(path.read_bytes())
    data[flip // 8 % len(data)] ^= 1 << flip % 8
    path.write_bytes(data[: round(len(data) * cut)] if flip % 3 else data)
    try:
        assert np.isfinite(read_points(path).points).all()
    except ValueError as error:
        assert "c" + suffix in str(error)


NAMES = st.sampled_from(["x", "y", "z", "intensity", "i", "ring", "", "t"])
FIELDS = st.lists(
    st.tuples(NAMES, st.integers(0, 40), st.integers(0, 10), st.integers(0, 3)), max_size=8
)
XYZ = [("x", 0, 7, 1), ("y", 4, 7, 1), ("z", 8, 7, 1)]


@given(
    fields=FIELDS | st.just(XYZ) | FIELDS.map(lambda more: XYZ + more),
    height=st.integers(0, 4) | st.just(2**32 - 1),
    width=st.integers(0, 8) | st.just(2**32 - 1),
    point_step=st.integers(0, 48) | st.just(2**32 - 1),
    row_step=st.integers(0, 400) | st.just(2**32 - 1),
    big=st.booleans(),
    data=st.binary(max_size=800),
)
def test_any_message_decodes_to_finite_points_or_is_refused(
    fields, height, width, point_step, row_step, big, data
):
    try:
        decoded = decode(fields, height, width, point_step, row_step, big, data)
    except ValueError:
        return
    points, intensity, ring = decoded[:3]
    assert np.isfinite(points).all() and len(points) <= len(data) * 8
    assert all(c is None or len(c) == len(points) for c in (intensity, ring))


@given(
    values=arrays.arrays(np.float32, (3, 3), elements=st.floats(-100, 100, width=32)),
    datatype=st.sampled_from(sorted(DATATYPES)),
    gap=st.integers(0, 5),
    big=st.booleans(),
)
def test_any_type_offset_and_byte_order_decodes_to_the_same_points(values, datatype, gap, big):
    kind = np.dtype((">" if big else "<") + DATATYPES[datatype])
    stored = np.clip(values, 0, 100).astype(kind)
    step = 3 * kind.itemsize + gap
    data = b"".join(row.tobytes() + bytes(gap) for row in stored)
    fields = [(axis, at * kind.itemsize, datatype, 1) for at, axis in enumerate("xyz")]
    decoded = decode(fields, 1, 3, step, 3 * step, big, data)
    np.testing.assert_array_equal(decoded[0], stored.astype(np.float32))


@given(st.text(max_size=200) | st.lists(st.sampled_from(list("&*a:[]{}-? \n1!")), max_size=60))
def test_any_text_is_plain_values_or_one_error(text):
    try:
        parse_yaml("".join(text))
    except ValueError as error:
        assert str(error)
