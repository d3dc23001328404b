# SPDX-License-Identifier: Apache-2.0
import threading

import numpy as np
import pytest

from apusmog_core import cli, weights
from apusmog_core.config import PRESETS
from apusmog_core.data import write_points
from apusmog_core.sensor.calibrate import Calibration
from apusmog_core.sensor.view import ObjectScan, look_around
from apusmog_core.upsampler import Upsampler

RINGS, COLUMNS = 32, 900
ELEVATION = np.radians(np.linspace(-10, 10, RINGS))
BIAS = 0.02 * (-1.0) ** np.arange(RINGS) + np.random.default_rng(7).normal(0, 0.015, RINGS)


def room(seed: int, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (n, 3) from the walls of a room, with a centimetre of noise, and their rings."""
    rng = np.random.default_rng(seed)
    ring, column = (a.ravel() for a in np.meshgrid(range(RINGS), range(COLUMNS), indexing="ij"))
    azimuth, elevation = column * (2 * np.pi / COLUMNS), ELEVATION[ring]
    axes = (np.cos(elevation) * np.cos(azimuth), np.cos(elevation) * np.sin(azimuth))
    ray = np.stack((*axes, np.sin(elevation)), axis=1)
    sides = rng.uniform(6, 14, (2, 2))  # where the walls are, left and right, behind and ahead
    with np.errstate(divide="ignore"):
        walls = [np.where(ray[:, i] > 0, *sides[i]) / np.abs(ray[:, i]) for i in range(2)]
    reach = np.minimum(*walls) + bias[ring] + rng.normal(0, 0.01, len(ring))
    return (ray * reach[:, None]).astype(np.float32), ring


def calibrated(bias: np.ndarray, scans: int = 10) -> Calibration:
    calibration = Calibration()
    for seed in range(scans):
        calibration.update(*room(seed, bias))
    return calibration


def test_planted_biases_are_found_within_ten_scans():
    found = calibrated(BIAS)
    assert found.converged
    # what all rings have in common, or what rises evenly, no plane can tell
    bend = np.diff(found.bias - BIAS, 2) / 2
    assert np.abs(np.diff(BIAS, 2) / 2).max() > 0.04
    assert np.abs(bend).max() < 0.005
    assert np.corrcoef(found.bias, BIAS)[0, 1] > 0.9


def test_a_sensor_without_faults_is_left_as_it_is():
    found = calibrated(np.zeros(RINGS))
    assert found.converged
    assert np.abs(found.bias).max() < 0.003


def test_nothing_is_corrected_before_enough_was_seen():
    points, ring = room(0, BIAS)
    calibration = Calibration()
    calibration.update(points, ring)
    assert not calibration.converged
    assert calibration.of_points(ring) is None
    assert calibrated(BIAS).of_points(None) is None


def test_rings_may_have_any_numbers_and_unknown_ones_have_no_bias():
    shuffled = np.random.default_rng(1).permutation(3 * RINGS)[:RINGS]
    calibration = Calibration()
    for seed in range(10):
        points, ring = room(seed, BIAS)
        calibration.update(points, shuffled[ring])
    np.testing.assert_allclose(calibration.bias[shuffled], calibrated(BIAS).bias, atol=1e-9)
    assert calibration.of_points(np.array([-1, 10_000])).tolist() == [0, 0]
    calibration.update(points, ring - 5)  # negative numbers are no rings: ignored
    calibration.update(points[:0], ring[:0])


def without(missing: int, points: np.ndarray, ring: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A scan in which one ring sees nothing, so that those above it are counted one lower."""
    there = ring != missing
    return points[there], ring[there] - (ring[there] > missing)


@pytest.mark.parametrize("missing", [0, RINGS // 2, 3 * RINGS // 4])
def test_counted_rings_that_look_elsewhere_are_neither_corrected_nor_learned(missing):
    calibration = calibrated(BIAS)
    points, ring = room(10, BIAS)
    np.testing.assert_array_equal(calibration.update(points, ring), calibration.bias[ring])
    learned = calibration.bias
    assert calibration.update(*without(missing, points, ring)) is None
    assert calibration.bias is learned and calibration.of_points(ring) is not None
    assert calibration.left_out == 1
    # a field tells which rings they are, wherever they look
    assert calibration.update(points[:, [0, 2, 1]], ring, counted=False) is not None


def test_rings_that_most_scans_show_are_learned_in_the_end():
    calibration = Calibration()
    for seed in range(60):  # the first scan is one of the few that lack a ring
        scan = room(seed, BIAS)
        bias = calibration.update(*(without(0, *scan) if seed % 4 == 0 else scan))
    assert bias is not None and np.corrcoef(bias, BIAS[scan[1]])[0, 1] > 0.9
    for seed in range(30):  # another sensor
        points, ring = room(seed, -BIAS)
        bias = calibration.update(points, RINGS - ring)
    assert np.corrcoef(bias, -BIAS[ring])[0, 1] > 0.9
    assert calibration.scans == 90


def test_several_threads_may_update_one_calibration():
    calibration = Calibration()
    scans = [room(seed, BIAS) for seed in range(10)]
    threads = [threading.Thread(target=calibration.update, args=scan) for scan in scans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert calibration.scans == 10
    np.testing.assert_allclose(calibration.bias, calibrated(BIAS).bias, atol=2e-3)


def test_the_network_sees_ranges_without_bias():
    points, ring = room(0, BIAS)
    instance = (np.abs(np.arctan2(points[:, 1], points[:, 0])) < 0.3).astype(np.int64)
    bias = BIAS[ring]
    plain = look_around(ObjectScan(points, instance, ring))
    seen = look_around(ObjectScan(points, instance, ring, bias=bias))
    reach = np.linalg.norm(points[seen.rows], axis=1)
    np.testing.assert_allclose(np.exp(seen.polar[:, 2]), reach - bias[seen.rows], atol=1e-5)
    np.testing.assert_array_equal(seen.polar[:, :2], plain.polar[:, :2])
    # the wall gets smoother: neighbours on other rings lie where they should
    across = np.abs(seen.offsets[:, 3:, 2]).mean()
    assert across < 0.7 * np.abs(plain.offsets[:, 3:, 2]).mean()


def test_measured_points_stay_bit_by_bit_and_new_ones_are_corrected():
    points, ring = room(0, np.full(RINGS, 0.5))
    instance = (np.abs(np.arctan2(points[:, 1], points[:, 0])) < 0.1).astype(np.int64)
    mine = points[instance == 1]
    up = Upsampler(weights.build_network(PRESETS["lidar"]))
    plain, corrected = (
        up.upsample_scan(ObjectScan(points, instance, ring, bias=bias), [2 * len(mine)]).points
        for bias in (None, np.full(len(points), 0.5))
    )
    for dense in (plain, corrected):
        np.testing.assert_array_equal(dense[: len(mine)].astype(np.float32), mine)
    far, near = (np.linalg.norm(d[len(mine) :], axis=1).mean() for d in (plain, corrected))
    assert far - near == pytest.approx(0.5, abs=0.1)


@pytest.fixture(scope="module")
def drive(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scans")
    for seed in range(9):
        points, ring = room(seed, BIAS)
        write_points(folder / f"{seed}.pcd", points, ring=ring.astype(np.uint16))
    return folder


def test_the_command_prints_a_table_and_draws_a_picture(drive, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    out = tmp_path / "lasers.png"
    assert cli.main(["calibrate", str(drive), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "converged after 8 of 9 scans" in said
    assert len(said.splitlines()) == RINGS + 3
    assert out.read_bytes()[:4] == b"\x89PNG"


def test_the_command_says_what_it_left_out(tmp_path, capsys):
    for seed in range(12):
        points, ring = room(seed, BIAS)
        points = points[ring != 3] if seed == 11 else points
        rows = np.pad(points, ((0, 0), (0, 1)))
        rows.astype(np.float32).tofile(tmp_path / f"{seed:03}.bin")
    assert cli.main(["calibrate", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert "converged after 8 of 12 scans" in told.out
    assert "1 scan left out: their rings look elsewhere" in told.err


def test_the_command_says_when_scans_are_too_few(drive, capsys):
    assert cli.main(["calibrate", str(drive / "0.pcd")]) == 1
    assert "not converged after 1 scans" in capsys.readouterr().err
    assert cli.main(["calibrate", str(drive), "--out", "lasers.jpg"]) == 2
