# SPDX-License-Identifier: Apache-2.0
"""The page, in a real browser: a script added to a copy of it moves its controls and reports."""

import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

from apusmog_core import cli
from apusmog_core.data import write_points
from apusmog_core.show.page import DrawnObjects, Moment, renumbered, write_page
from apusmog_core.show.picture import choose_objects, picture

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
FLAGS = """--headless --no-sandbox --disable-gpu --use-angle=swiftshader --enable-unsafe-swiftshader
    --disable-quic --no-first-run --disable-background-networking --disable-component-update
    --disable-sync --enable-logging=stderr --window-size=800,600 --virtual-time-budget=20000
    --dump-dom""".split()

PROBE = """<script>
const report = { errors: [] };
addEventListener("error", (e) => report.errors.push(e.message));
addEventListener("unhandledrejection", (e) => report.errors.push(String(e.reason)));
const settled = () => new Promise((done) => setTimeout(done, 300));
function drawn() {                       // how many pixels are lit, and a sum that any change moves
  const pixels = new Uint8Array(4 * canvas.width * canvas.height);
  gl.readPixels(0, 0, canvas.width, canvas.height, gl.RGBA, gl.UNSIGNED_BYTE, pixels);
  let lit = 0, sum = 0, box = [1e9, -1, 1e9, -1];
  for (let i = 0; i < pixels.length; i += 4) {
    if (pixels[i] + pixels[i + 1] + pixels[i + 2] < 90) continue;
    lit++;
    sum = (sum * 31 + i + pixels[i]) % 1e9;
    const x = (i / 4) % canvas.width, y = Math.floor(i / 4 / canvas.width);
    box = [Math.min(box[0], x), Math.max(box[1], x), Math.min(box[2], y), Math.max(box[3], y)];
  }
  const text = (id) => $(id).textContent;
  const size = [canvas.width, canvas.height];
  return { lit, sum, box, size, ratio: text("ratio-text"), generated: text("generated-count") };
}
async function set(id, value) {
  const box = $(id);
  if (box.type === "checkbox") box.checked = value; else box.value = value;
  box.dispatchEvent(new Event("input"));
  await settled();
  return drawn();
}
function drag(kind, x, y) {
  const pointer = { pointerId: 1, clientX: x, clientY: y, buttons: 1 };
  canvas.dispatchEvent(new PointerEvent(kind, pointer));
}
(async () => {
  canvas.setPointerCapture = () => {};   // a made-up pointer cannot be captured
  await settled();
  report.start = drawn();
  report.title = document.title;
  /*BODY*/
  const end = document.createElement("pre");
  end.id = "report";
  end.textContent = JSON.stringify(report);
  document.body.append(end);
})();
</script>"""

CONTROLS = """
  report.ratios = [];
  for (let i = 0; i <= $("ratio").max; i++) report.ratios.push(await set("ratio", i));
  report.moment = await set("moment", 1);
  await set("moment", 0);
  report.no_scan = await set("scan", false);
  report.no_generated = await set("generated", false);
  report.nothing = await set("measured", false);
  await set("scan", true);
  report.before_drag = drawn();
  drag("pointerdown", 400, 300); drag("pointermove", 500, 300); drag("pointerup", 500, 300);
  draw();                                // under virtual time no animation frame may come
  report.after_drag = drawn();
  canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -600 }));
  draw();
  report.after_zoom = drawn();
"""


def street(seed: int) -> Moment:
    """A flat scan with two boxes on it, dense by 2 and by 8."""
    rng = np.random.default_rng(seed)
    scan = rng.uniform((-20, -20, 0), (20, 20, 0.05), (4000, 3)).astype(np.float32)
    corners = np.array([(5, 2, 0), (8, -4, 0)], np.float32)
    dense = {}
    for ratio in (2.0, 8.0):
        count = int(100 * ratio)
        points = [corner + rng.uniform(0, (4, 2, 1.5), (count, 3)) for corner in corners]
        instance = np.repeat([1, 2], count)
        generated = np.tile(np.arange(count) >= 100, 2)
        dense[ratio] = DrawnObjects(np.vstack(points).astype(np.float32), instance, generated)
    return Moment(f"moment {seed}", scan, dense)


def in_browser(page, tmp_path, body: str = "") -> SimpleNamespace:
    """What a probe added to a copy of the page reported, and what the console said."""
    probe = PROBE.replace("/*BODY*/", body)
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text().replace("</body>", probe + "</body>"))
    profile = tmp_path / "profile"
    run = subprocess.run(
        [BROWSER, *FLAGS, f"--user-data-dir={profile}", probed.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r"<pre id=\"report\">(.*?)</pre>", run.stdout, re.S)
    assert found, f"the page did not get to its end:\n{run.stdout[-500:]}\n{run.stderr[-2000:]}"
    console = [line for line in run.stderr.splitlines() if "CONSOLE" in line]
    # reading pixels back is slow, and the software driver says so: that is this test, not the page
    console = [line for line in console if "GPU stall due to ReadPixels" not in line]
    return SimpleNamespace(**json.loads(found[1]), console=console)


@needs_browser
def test_the_page_draws_and_its_controls_change_what_is_drawn(tmp_path):
    page = write_page([street(0), street(1)], tmp_path / "view.html", title="</script> & 'x'")
    seen = in_browser(page, tmp_path, CONTROLS)
    assert seen.console == [] and seen.errors == []
    assert seen.start["lit"] > 1000
    assert [stop["ratio"] for stop in seen.ratios] == ["as measured", "× 2", "× 8"]
    assert [stop["generated"] for stop in seen.ratios] == ["0", "200", "1,400"]
    assert seen.ratios[0]["lit"] < seen.ratios[1]["lit"] < seen.ratios[2]["lit"]
    assert seen.moment["sum"] != seen.ratios[2]["sum"]
    assert seen.nothing["lit"] == 0 < seen.no_generated["lit"] < seen.no_scan["lit"]
    assert seen.before_drag["sum"] != seen.after_drag["sum"] != seen.after_zoom["sum"]


@needs_browser
def test_a_cloud_without_objects_is_shown_alone(tmp_path):
    sphere = np.random.default_rng(0).normal(size=(3000, 3))
    sphere /= np.linalg.norm(sphere, axis=1, keepdims=True)
    page = write_page([Moment("sphere", sphere)], tmp_path / "view.html")
    seen = in_browser(page, tmp_path)
    assert seen.console == [] and seen.errors == [] and seen.start["lit"] > 10_000
    assert_whole(seen.start)


def assert_whole(drawn: dict) -> None:
    """Everything lit is inside the canvas, and fills a good part of it."""
    (left, right, low, high), (width, height) = drawn["box"], drawn["size"]
    assert 0 < left and right < width - 1 and 0 < low and high < height - 1
    assert high - low > 0.5 * height or right - left > 0.5 * width


@needs_browser
def test_two_clouds_are_compared_side_by_side_or_one_at_a_time(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for name, count in (("cloud", 500), ("dense", 4000)):
        sphere = rng.normal(size=(count, 3))
        write_points(
            tmp_path / f"{name}.ply", sphere / np.linalg.norm(sphere, axis=1, keepdims=True)
        )
    files = [str(tmp_path / f"{name}.ply") for name in ("cloud", "dense")]
    assert cli.main(["view", *files, "--out", str(tmp_path / "view.html")]) == 0
    body = """
  report.labels = [...$("labels").children].map((e) => e.textContent);
  report.key = $("key-low").textContent;
  report.alone = await set("beside", false);
  report.second = await set("moment", 1);"""
    seen = in_browser(tmp_path / "view.html", tmp_path, body)
    assert seen.title.startswith("cloud.ply, dense.ply")
    assert seen.labels == ["cloud500 points", "dense4,000 points"] and seen.key == "z -0.99"
    assert seen.console == [] and seen.errors == []
    for drawn in (seen.start, seen.alone, seen.second):
        assert_whole(drawn)
    assert seen.alone["lit"] < seen.second["lit"]


@needs_browser
def test_points_are_coloured_and_hidden_by_confidence_and_arrows_move_the_camera(tmp_path):
    moment = street(0)
    dense = moment.dense[8.0]
    sure = np.where(dense.generated, np.linspace(0, 0.9, len(dense.points)), 1.0)
    changed = DrawnObjects(dense.points, dense.instance, dense.generated, sure)
    page = write_page([Moment("street", moment.scan, {8.0: changed})], tmp_path / "view.html")
    body = """
  report.by_confidence = await set("colour", "confidence");
  report.half = await set("sure", 115);
  report.by_height = await set("colour", "height");
  report.moved = [];
  for (const [key, shiftKey] of [["ArrowLeft", 0], ["ArrowUp", 1], ["+", 0], ["0", 0]]) {
    dispatchEvent(new KeyboardEvent("keydown", { key, shiftKey }));
    draw();
    report.moved.push(drawn().sum);
  }
  report.beside = await set("beside", true);
  report.labels = [...$("labels").children].map((e) => e.firstChild.textContent);"""
    seen = in_browser(page, tmp_path, body)
    assert seen.console == [] and seen.errors == []
    assert seen.start["generated"] == seen.by_confidence["generated"] == "1,400"
    kept = np.rint(255 * sure[dense.generated]) >= 115
    assert int(seen.half["generated"].replace(",", "")) == kept.sum()
    sums = [seen.start, seen.by_confidence, seen.half, seen.by_height]
    assert len({drawn["sum"] for drawn in sums} | set(seen.moved[:3])) == 7
    assert seen.moved[3] == seen.by_height["sum"]  # reset
    assert seen.labels == ["measured", "dense, × 8"]


def test_objects_and_their_colours_do_not_change_with_the_ratio(tmp_path, monkeypatch):
    from apusmog_core.show import page

    assert cli.main(["samples", str(tmp_path)]) == 0
    seen = {}
    monkeypatch.setattr(page, "write_page", lambda moments, *_, **__: seen.update(moments[0].dense))
    scan = str(tmp_path / "street_vlp16.pcd")
    assert cli.main(["view", scan, "--ratio", "1", "4", "--set", "cluster.min_points=8"]) == 0
    one, four = seen[1.0], seen[4.0]
    measured = ~four.generated
    assert (one.points == four.points[measured]).all()
    assert (one.instance == four.instance[measured]).all()
    assert np.bincount(one.instance)[1:].min() < 16  # the setting reached the pipeline


@needs_browser
def test_a_dense_file_shows_its_objects_also_beside_what_it_was_made_from(tmp_path, capsys):
    assert cli.main(["samples", str(tmp_path)]) == 0
    scan, out = str(tmp_path / "street_vlp16.pcd"), str(tmp_path / "dense.ply")
    page = tmp_path / "view.html"
    assert cli.main(["scan", scan, out, "--ratio", "2", "--scene"]) == 0
    assert cli.main(["view", out, "--out", str(page)]) == 0
    text = page.read_text()
    assert '"ratio": 2.0' in text and '"confidence": true' in text
    assert cli.main(["view", scan, out, "--out", str(page)]) == 0
    body = """
  report.labels = [...$("labels").children].map((e) => e.firstChild.textContent);"""
    seen = in_browser(page, tmp_path, body)
    assert seen.console == [] and seen.errors == []
    assert seen.labels == ["street_vlp16", "dense"]
    assert seen.start["generated"] != "0" and seen.start["lit"] > 1000


def test_nothing_found_is_said_on_the_page_and_on_the_terminal(tmp_path, capsys):
    assert cli.main(["samples", str(tmp_path)]) == 0
    page, scan = tmp_path / "view.html", str(tmp_path / "person_vlp16.pcd")
    options = ["--ratio", "4", "--out", str(page), "--set", "range.max=3"]
    assert cli.main(["view", scan, *options]) == 0
    assert "no objects found in 1 scan: try --set" in capsys.readouterr().err
    assert "no objects found in 1 scan: try --set" in page.read_text()


def test_the_page_needs_no_network(tmp_path):
    text = write_page([street(0)], tmp_path / "view.html").read_text()
    assert not re.search(r"https?://|src=|@import|fetch\(", text)


def test_big_scans_are_thinned_to_keep_the_page_small(tmp_path):
    scan = np.random.default_rng(0).uniform(-60, 60, (200_000, 3)).astype(np.float32)
    moments = [Moment(str(i), scan) for i in range(10)]
    small = write_page(moments, tmp_path / "small.html", scan_points=100_000).stat().st_size
    assert small < 1_500_000  # 10 x 10 000 points of 8 bytes in base64


def test_the_page_refuses_to_be_empty(tmp_path):
    with pytest.raises(ValueError, match="no point"):
        write_page([Moment("empty", np.zeros((0, 3)))], tmp_path / "view.html")


def test_the_picture_shows_more_on_the_right_than_on_the_left(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    moment = street(0)
    pixels = image.imread(picture(moment.scan, moment.dense[8.0], tmp_path / "out.png", 8.0))[
        ..., :3
    ]
    coloured = np.ptp(pixels, axis=2) > 0.2  # the scan and the background are grey
    half = pixels.shape[1] // 2
    top = slice(0, pixels.shape[0] // 2)
    assert 0 < coloured[top, :half].sum() < coloured[top, half:].sum()


def test_objects_found_anew_keep_the_colours_they_had():
    moment = street(0)
    before, after = moment.dense[2.0], moment.dense[8.0]
    points = after.points.copy()
    points[~after.generated] = before.points[~before.generated]  # measured twice
    swapped = DrawnObjects(points, 3 - after.instance, after.generated)
    again = renumbered(swapped, before)
    assert (again.instance == after.instance).all()
    other = renumbered(DrawnObjects(points + 1, after.instance, after.generated), before)
    assert set(other.instance) == {3, 4}


def test_the_picture_chooses_a_car_a_cyclist_and_a_person():
    rng = np.random.default_rng(0)
    sizes = [(9, 9, 5), (0.6, 0.4, 1.7), (4.2, 1.7, 1.4), (1.7, 0.5, 1.7)]
    points = np.vstack([rng.uniform(0, size, (400, 3)) + (20, 0, 0) for size in sizes])
    generated = np.tile(np.arange(400) >= 200, 4)
    dense = DrawnObjects(points, np.repeat([1, 2, 3, 4], 400), generated)
    assert choose_objects(dense, {}, 4) == [3, 4, 2, 1]
    assert choose_objects(dense, {3: "bush"}, 4)[:2] == [4, 2]  # the name counts more than the size
