# SPDX-License-Identifier: Apache-2.0
"""The node at work, over real DDS."""

import threading
import time

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 (rclpy) is not installed")

from conftest import wait_until  # noqa: E402
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus  # noqa: E402
from harness import Harness, sample_street, scan, street  # noqa: E402
from test_cloud import legal_cloud, malformed_cloud  # noqa: E402
from visualization_msgs.msg import Marker  # noqa: E402

from apusmog_core.config import DiagnosticsConfig  # noqa: E402
from apusmog_core.interim import CONFIDENCE  # noqa: E402
from apusmog_core.pipeline import ScanPipeline  # noqa: E402
from apusmog_ros import cloud, diagnostics, subscription  # noqa: E402


def test_a_scan_comes_out_dense_with_exact_counts_and_its_own_header(ros):
    under_test = Harness(ros, ratio=4.93)
    heard = {name: under_test.listen(name) for name in ("dense", "objects", "scene", "boxes")}
    points = street(3)
    sent = scan(points)
    dense = under_test.ask(heard["dense"], sent)
    objects, scene, boxes = (
        wait_until(lambda n=name: heard[n] and heard[n][0], name)
        for name in ("objects", "scene", "boxes")
    )
    for msg in (dense, objects, scene, *boxes.markers):
        assert msg.header == sent.header
    names = ["x", "y", "z", "intensity", "instance", "generated", "confidence"]
    assert all([f.name for f in msg.fields] == names for msg in (dense, objects, scene))
    measured, made = cloud.records(objects), cloud.records(dense)
    assert len(np.unique(measured["instance"])) == 3
    assert len(made) == round(4.93 * len(measured))
    assert not measured["generated"].any()
    kept = made[made["generated"] == 0]
    assert set(kept.tolist()) == set(measured.tolist())
    assert len(scene.data) // scene.point_step == len(points) - len(measured) + len(made)
    cubes = [m for m in boxes.markers if m.type == Marker.CUBE and m.action == Marker.ADD]
    assert boxes.markers[0].action == Marker.DELETEALL
    assert sorted(m.id for m in cubes) == sorted(np.unique(measured["instance"]))


def test_a_ratio_set_between_two_scans_takes_effect_with_the_next(ros):
    under_test = Harness(ros)
    dense, objects = under_test.listen("dense"), under_test.listen("objects")
    for number, ratio in enumerate((4.0, 6.5, 6, 1.5)):
        assert under_test.set(ratio=ratio).successful
        assert under_test.get("ratio") == [float(ratio)]
        answer = under_test.ask(dense, scan(street(1), number))
        wait_until(lambda n=number: len(objects) > n, "the objects")
        assert answer.width == round(ratio * objects[number].width) > 0


def test_empty_in_is_empty_out(ros):
    under_test = Harness(ros)
    heard = {name: under_test.listen(name) for name in ("dense", "objects", "scene", "boxes")}
    under_test.ask(heard["dense"], scan(np.zeros((0, 3), np.float32)))
    for name in ("dense", "objects", "scene"):
        assert wait_until(lambda n=name: heard[n] and heard[n][0], name).width == 0
    [marker] = wait_until(lambda: heard["boxes"] and heard["boxes"][0], "boxes").markers
    assert marker.action == Marker.DELETEALL


def test_nothing_is_computed_that_nobody_subscribes_to(ros, monkeypatch):
    monkeypatch.setattr(subscription, "IDLE", 60.0)  # a network may take long to get ready
    under_test = Harness(ros)
    wait_until(under_test.publisher.get_subscription_count, "the node's subscription")
    under_test.publisher.publish(scan(street(1), 0))
    wait_until(lambda: under_test.counts().get("received") == 1, "the scan")
    under_test.ask(under_test.listen("objects"), scan(street(1), 1))
    wait_until(lambda: under_test.counts()["published"] == 1, "the count")
    assert np.isnan(under_test.node._statistics.percentile("upsample", 50))


def test_objects_are_interpolated_until_the_network_takes_over_and_every_scan_is_answered(
    ros, monkeypatch
):
    warm_up, go_on = ScanPipeline.warm_up, threading.Event()
    monkeypatch.setattr(ScanPipeline, "warm_up", lambda self: go_on.wait(30) and warm_up(self))
    under_test = Harness(ros, ready=False)
    dense, points = under_test.listen("dense"), sample_street()

    def new_points(number: int) -> np.ndarray:
        made = cloud.records(under_test.ask(dense, scan(points, number)))
        return made["confidence"][made["generated"] == 1]

    number, sure = 0, new_points(0)
    assert len(sure) > 5000 and (sure == CONFIDENCE).all()
    go_on.set()
    while under_test.node._networks.state != "ready":
        assert number < 1000, "the network is not ready"
        new_points(number := number + 1)
    sure = new_points(number := number + 1)
    assert len(sure) > 5000 and len(np.unique(sure)) > 1000
    assert [msg.header.stamp.sec - 100 for msg in dense] == list(range(number + 1))


def test_two_nodes_live_side_by_side_in_two_namespaces(ros):
    left = Harness(ros, "/left/upsampler", "/left/points", ratio=2.0)
    right = Harness(ros, "/right/upsampler", "/right/points", ratio=3.0)
    heard = left.listen("dense"), right.listen("dense")
    widths = [n.ask(h, scan(street(1))).width for n, h in zip((left, right), heard, strict=True)]
    assert widths[0] / 2 == widths[1] / 3 > 0


# --- too much, too fast, too broken ---


def test_two_hundred_malformed_clouds_are_survived(ros):
    rng = np.random.default_rng(3)
    under_test = Harness(ros)
    dense = under_test.listen("dense")
    wrong = [malformed_cloud(rng) for _ in range(160)]
    odd = [legal_cloud(rng)[0] for _ in range(60)]
    odd.append(scan(np.full((1000, 3), np.nan, np.float32)))
    odd.append(scan(rng.normal(scale=1e30, size=(1000, 3)).astype(np.float32)))
    odd.append(scan(np.zeros((5000, 3), np.float32)))
    odd.append(scan(rng.uniform(-80, 80, (1_000_000, 3)).astype(np.float32)))
    for number, msg in enumerate([*wrong, *odd]):  # one by one, so that none is dropped
        under_test.publisher.publish(msg)

        def handled(n=number):
            c = under_test.counts()
            done = sum(c.get(k, 0) for k in ("published", "rejected", "failed", "dropped"))
            return done == n + 1

        wait_until(handled, f"cloud {number}")
    counts = under_test.counts()
    assert counts["rejected"] == len(wrong) and counts["published"] == len(odd)
    assert counts.get("failed", 0) == counts["dropped"] == 0
    good = under_test.ask(dense, scan(street(2), 7))
    assert good.width > 0


def test_of_a_burst_the_newest_is_answered_and_the_rest_counted(ros):
    under_test = Harness(ros)
    dense = under_test.listen("dense")
    for number in range(50):
        under_test.publisher.publish(scan(street(3), number))
    wait_until(lambda: dense and dense[-1].header.stamp.sec == 149, "the answer to the newest")
    ends = ("published", "dropped")
    done = lambda: sum(under_test.counts().get(n, 0) for n in ends)  # noqa: E731
    wait_until(lambda: done() == 50, "the count, which follows the message")
    counts = under_test.counts()
    assert counts["received"] == 50
    assert counts["published"] + counts["dropped"] == 50 and counts["dropped"] > 0
    stamps = [m.header.stamp.sec for m in dense]
    assert stamps == sorted(stamps) and len(stamps) == counts["published"]


def test_output_that_is_not_finite_is_counted_as_failed_and_never_published(ros, monkeypatch):
    under_test = Harness(ros)
    dense = under_test.listen("dense")
    upsampler = under_test.node._networks.pipeline().upsampler
    grow = upsampler.upsample_scan

    def broken(*args):
        results = grow(*args)
        results.points[-1] = np.nan
        return results

    monkeypatch.setattr(upsampler, "upsample_scan", broken)
    under_test.publisher.publish(scan(street(1), 0))
    wait_until(lambda: under_test.counts().get("failed") == 1, "the count")
    monkeypatch.undo()
    under_test.ask(dense, scan(street(1), 1))
    assert len(dense) == 1


# --- diagnostics ---


def report(status: list) -> dict:
    """Names and values of the latest diagnostics."""
    return {p.key: p.value for p in status[-1].status[0].values} if status else {}


def test_diagnostics_tell_rates_stages_and_what_is_wrong(ros):
    under_test = Harness(ros, diagnostics__warn_silence=1.0)
    status = ros.listen(DiagnosticArray, "/diagnostics")
    points = street(2)
    points[:5], points[5:8] = np.nan, 0.0
    under_test.ask(under_test.listen("dense"), scan(points))
    wait_until(lambda: report(status).get("published") == "1", "the count")
    values = report(status)
    latest = status[-1].status[0]
    assert (latest.name, latest.hardware_id) == ("/upsampler", "lidar")
    for key in ("rate in [Hz]", "rate out [Hz]", "dropped", "lost", "points in", "points out"):
        assert float(values[key]) >= 0
    for stage in ("age", "publish", "upsample", "read"):
        assert float(values[f"{stage} p50 [ms]"]) <= float(values[f"{stage} p99 [ms]"])
    assert (values["points not finite"], values["points without return"]) == ("5", "3")
    told = (values["instances"], values["network"], values["device"])
    assert told == ("2", "ready", "cpu")
    assert {
        "ratio",
        "memory [MB]",
        "ring source",
        "range bias",
        "input reliability",
        "mounting",
    } <= set(values)
    levels = lambda: [(s.level, s.message) for m in status for s in m.status]  # noqa: E731
    warn = DiagnosticStatus.WARN
    silent = lambda: [m for lv, m in levels() if lv == warn and "no scan" in m]  # noqa: E731
    assert "more than 1 s" in wait_until(silent, "a warning")[0]


def test_scans_in_another_frame_are_seen_from_where_the_sensor_stands_in_it(ros):
    under_test = Harness(ros)
    status, heard = ros.listen(DiagnosticArray, "/diagnostics"), under_test.listen("objects")
    frames = (("lidar", (0, 0, 0)), ("base_link", (1.3, 0, 1.9)), ("lidar", (0, 0, 0)))
    for turn, (frame, moved) in enumerate(frames):
        for number in range(2):
            msg = scan(sample_street() + np.float32(moved), 10 * turn + number)
            msg.header.frame_id = frame
            assert len(cloud.records(under_test.ask(heard, msg)))
        wait_until(lambda f=frame: status and status[-1].status[0].hardware_id == f, "diagnostics")
        status.clear()  # the next report is of this frame's last scan
        wait_until(lambda: status, "diagnostics")
        told = [float(metres) for metres in report(status)["sensor at"].split()]
        assert told == pytest.approx(moved, abs=0.1), frame


def test_scans_that_are_far_from_their_origin_raise_the_level_and_say_why(ros):
    under_test = Harness(ros)
    status, heard = ros.listen(DiagnosticArray, "/diagnostics"), under_test.listen("dense")
    under_test.ask(heard, scan(street(2) + np.float32([12_000, -9_000, 20])))
    wait_until(lambda: status and "in the frame of" in status[-1].status[0].message, "a warning")
    assert status[-1].status[0].level == DiagnosticStatus.WARN
    under_test.ask(heard, scan(street(2), 1))
    wait_until(lambda: "in the frame of" not in status[-1].status[0].message, "all well again")


def test_a_node_without_subscribers_is_idle_and_receives_nothing_until_one_comes(ros, monkeypatch):
    monkeypatch.setattr(subscription, "IDLE", 0.5)
    monkeypatch.setattr(subscription, "OVERLAP", 0.1)
    under_test = Harness(ros, diagnostics__warn_silence=0.1)
    status = ros.listen(DiagnosticArray, "/diagnostics")
    wait_until(lambda: not under_test.publisher.get_subscription_count(), "the end of reception")
    wait_until(lambda: status, "diagnostics")
    assert status[-1].status[0].level == DiagnosticStatus.OK
    assert "idle" in status[-1].status[0].message
    assert under_test.ask(under_test.listen("dense"), scan(street(1))).width > 0


def test_statistics_forget_what_is_longer_ago_than_their_window(monkeypatch):
    statistics, now = diagnostics.Statistics(), time.monotonic()
    statistics.note_times(age=5000.0)
    statistics.count("failed")
    limits = DiagnosticsConfig(warn_silence=3600.0)
    assert statistics.status("n", limits, "ready").level == DiagnosticStatus.ERROR
    monkeypatch.setattr(diagnostics.time, "monotonic", lambda: now + 2 * diagnostics.WINDOW)
    later = statistics.status("n", limits, "ready")
    assert later.level == DiagnosticStatus.OK
    assert {p.key: p.value for p in later.values}["failed"] == "1"  # counts are since the start
    assert not any(p.key.startswith("age") for p in later.values)


def test_lost_scans_raise_the_level_above_their_share():
    statistics = diagnostics.Statistics()
    for _ in range(20):
        statistics.count("received")
    statistics.count("lost")
    limits = DiagnosticsConfig(warn_lost=0.05)
    assert statistics.status("n", limits, "ready").level == DiagnosticStatus.OK
    statistics.count("lost")
    told = statistics.status("n", limits, "ready")
    assert told.level == DiagnosticStatus.WARN and "9% of the scans lost" in told.message
