# SPDX-License-Identifier: Apache-2.0
"""The simulator: what it casts is where the meshes are, as a real sensor would see it."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("open3d")

from apusmog_core import simulate  # noqa: E402
from apusmog_core.segment import Segmenter  # noqa: E402
from apusmog_core.segment.rings import find_rings  # noqa: E402
from apusmog_core.simulate import objects, shapes  # noqa: E402
from apusmog_core.simulate.sensor import (  # noqa: E402
    BEAMS,
    Placed,
    Scene,
    Sensor,
    scan,
    visible_surface,
)
from tools.found import GROUNDS, count_objects, street_on  # noqa: E402

ROAD = Path(__file__).parents[2] / "shared" / "data" / "meshes" / "road"

ROUNDING = 5e-3  # of the ray caster's float32 on long thin triangles, metres

# Least and greatest length, width and height in metres.
SIZES = {
    "car": ((3.6, 1.6, 1.3), (5.2, 2.4, 1.9)),
    "van": ((4.7, 1.8, 1.8), (6.2, 2.2, 2.7)),
    "truck": ((6.0, 2.2, 2.2), (10.5, 2.6, 3.9)),
    "person": ((0.2, 0.35, 1.4), (1.2, 0.9, 2.1)),
    "cyclist": ((1.5, 0.5, 1.5), (2.0, 0.8, 2.1)),
    "pole": ((0.05, 0.4, 2.0), (0.4, 2.2, 8.5)),
    "wall": ((5.0, 0.2, 0.8), (14.0, 0.4, 2.4)),
    "building": ((8.0, 7.0, 3.0), (18.0, 12.0, 12.5)),
    "bush": ((0.6, 0.5, 0.5), (4.0, 2.4, 3.0)),
    "tree": ((1.5, 1.5, 3.0), (9.0, 9.0, 12.0)),
    "furniture": ((0.1, 0.1, 0.6), (2.1, 0.7, 1.6)),
}


def wall_at(x: float, width: float = 6.0, shade: float = 0.5) -> Placed:
    slab = shapes.box((0, -width / 2, 0), (0.2, width / 2, 3.0), shade)
    return Placed(slab, "wall", x, 0.0)


@pytest.fixture(scope="module")
def town() -> Scene:
    return simulate.street(1)


def distance_to(mesh: shapes.Mesh, points: np.ndarray) -> np.ndarray:
    import open3d

    caster = open3d.t.geometry.RaycastingScene()
    caster.add_triangles(mesh.vertices, mesh.triangles.astype(np.uint32))
    return caster.compute_distance(points.astype(np.float32)).numpy()


@pytest.mark.parametrize("kind", objects.BUILDERS)
def test_a_built_in_shape_stands_on_the_ground_with_sane_dimensions(kind):
    least, most = SIZES[kind]
    for seed in range(20):
        mesh = objects.BUILDERS[kind](np.random.default_rng(seed))
        assert np.isfinite(mesh.vertices).all()
        assert mesh.triangles.max() < len(mesh.vertices)
        assert len(mesh.reflectivity) == len(mesh.triangles)
        assert 0 <= mesh.reflectivity.min() and mesh.reflectivity.max() <= 1
        assert abs(mesh.vertices[:, 2].min()) < 0.35  # leaves of a bush may start above ground
        assert (mesh.size >= least).all() and (mesh.size <= most).all(), (seed, mesh.size)


def test_the_same_seed_gives_the_same_scan_and_another_seed_another(town):
    sensor = Sensor.named("VLP-16")
    first, again = (scan(simulate.street(1), sensor, seed=3) for _ in range(2))
    np.testing.assert_array_equal(first.points, again.points)
    np.testing.assert_array_equal(first.instance, again.instance)
    assert not np.array_equal(first.points, scan(town, sensor, seed=4).points)
    assert simulate.street(2).names != town.names


@pytest.mark.parametrize("name", BEAMS)
def test_rings_have_the_elevations_of_the_table(town, name):
    turn = scan(town, Sensor.named(name))
    flat = np.linalg.norm(turn.points[:, :2], axis=1)
    elevation = np.degrees(np.arctan2(turn.points[:, 2], flat))
    np.testing.assert_allclose(elevation, np.array(BEAMS[name].elevation)[turn.ring], atol=1e-3)
    assert len(np.unique(turn.ring)) > 0.5 * len(BEAMS[name].elevation)


def test_beam_tables_are_those_of_the_makers():
    rings = {name: len(beams.elevation) for name, beams in BEAMS.items()}
    published = {"HDL-64E": 64, "VLP-16": 16, "VLP-32C": 32, "OS1-64": 64, "OS1-128": 128}
    assert published.items() <= rings.items()
    for beams in BEAMS.values():
        assert (np.diff(beams.elevation) < 0).all()
    hdl = BEAMS["HDL-64E"].elevation
    assert (hdl[0], round(hdl[31], 2), round(hdl[32], 2), round(hdl[63], 2)) == (
        2.0, -8.33, -8.83, -24.33,
    )  # fmt: skip


def test_points_lie_on_the_surfaces_within_the_range_noise(town):
    turn = scan(town, Sensor.named(noise=0.02), at=(5.0, 0.0, 0.3))
    exact = scan(town, Sensor.named(noise=0.0), at=(5.0, 0.0, 0.3))
    c, s = np.cos(0.3), np.sin(0.3)
    world = exact.points @ np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]]) + (5.0, 0.0, 1.73)
    assert np.abs(world[exact.instance == 0, 2]).max() < 1e-3
    for instance in np.unique(exact.instance)[1:]:
        mine = world[exact.instance == instance]
        assert distance_to(town.objects[instance - 1].world, mine).max() < ROUNDING
    error = np.linalg.norm(turn.points, axis=1) - np.linalg.norm(exact.points, axis=1)
    assert abs(error.std() - 0.02) < 0.001 and abs(error.mean()) < 0.001


def test_the_nearer_object_hides_the_farther():
    scene = Scene([wall_at(20.0), wall_at(10.0)])
    turn = scan(scene, Sensor.named())
    assert (turn.instance == 2).sum() > 1000
    assert (turn.instance == 1).sum() == 0
    assert len(visible_surface(scene, Sensor.named(), 1)) == 0


def test_the_ground_may_rise_with_the_street_on_it():
    height = GROUNDS["rising 8 % from 15 m on"]
    scene = street_on(height, seed=1, meshes=None)
    sensor = Sensor.named()
    turn = scan(scene, sensor)
    ground = turn.points[turn.instance == 0] + (0, 0, sensor.height)
    error = ground[:, 2] - height(ground[:, 0], ground[:, 1])
    assert np.abs(error).max() < 6 * sensor.noise and ground[:, 2].max() > 1
    false, there, found = count_objects(turn, Segmenter()(turn.points, turn.ring)[1])
    assert false <= 3 and found > 0.8 * there > 20


def test_nothing_comes_back_from_glass_and_less_from_dark_surfaces():
    def returns(shade):
        turn = scan(Scene([wall_at(50.0, shade=shade)]), Sensor.named())
        return (turn.instance == 1).sum()

    assert returns(shapes.GLASS) == 0
    assert 0 < returns(0.02) < 0.9 * returns(0.8)
    window = Scene([wall_at(10.0, shade=shapes.GLASS)])
    assert len(visible_surface(window, Sensor.named(), 1)) == 0


@pytest.mark.parametrize("at", [(0.0, 0.0, 0.0), (2.0, -1.0, 2.5)])
def test_the_visible_surface_is_denser_than_the_scan_and_on_the_mesh(at):
    mesh = objects.car(np.random.default_rng(0))
    scene = Scene([Placed(mesh, "car", 12.0, 3.0, 0.7)])
    sensor = Sensor.named()
    turn = scan(scene, sensor, at=at)
    measured = turn.points[turn.instance == 1]
    surface = visible_surface(scene, sensor, 1, at=at)
    assert len(surface) > 12 * len(measured) > 1000
    c, s = np.cos(at[2]), np.sin(at[2])
    world = surface @ np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]]) + (*at[:2], sensor.height)
    assert distance_to(scene.objects[0].world, world).max() < ROUNDING
    from scipy.spatial import cKDTree

    # Every measured point has its place on the surface: the window cuts nothing off.
    assert cKDTree(surface).query(measured)[0].max() < 0.12


def test_jitter_moves_each_ring_a_little():
    sensor = Sensor.named()
    other = sensor.jittered(5)
    shift = np.degrees(np.subtract(other.elevation, sensor.elevation))
    assert 0.01 < shift.std() < 0.06
    assert other == sensor.jittered(5) != sensor.jittered(6)
    assert 0.01 < np.std(other.bias) < 0.03
    assert 0 <= min(other.phase) < max(other.phase) < sensor.azimuth_step


def test_things_of_a_street_do_not_overlap_even_when_they_move():
    for seed in range(3):
        scene = simulate.street(seed)
        for placed in (scene.objects, [o.after(1.0) for o in scene.objects]):
            prints = np.array([o.footprint for o in placed])  # (t, 2, 2)
            apart = (prints[:, None, 0] >= prints[None, :, 1]).any(-1)
            clash = ~(apart | apart.T)
            np.fill_diagonal(clash, False)
            assert not clash.any(), [
                (objects[i].name, objects[j].name) for i, j in np.argwhere(clash)
            ]
        wanted = {"car", "person", "cyclist", "building", "tree"}
        assert wanted <= set(scene.names)


def test_in_a_drive_standing_things_fall_behind_and_traffic_keeps_up():
    first, last = list(simulate.drive(6, seed=2))[::5]
    assert last.stamp == pytest.approx(0.5) and first.names == last.names
    shift = {
        i: np.subtract(*[t.points[t.instance == i, 0].mean() for t in (last, first)])
        for i in set(first.instance) & set(last.instance)
    }
    posts = [shift[i] for i in shift if first.names[i] in ("pole", "furniture")]
    assert len(posts) > 3
    np.testing.assert_allclose(posts, -0.5 * simulate.STREET_SPEED, atol=0.5)
    cars = [shift[i] for i in shift if first.names[i] in ("car", "van", "truck")]
    assert np.abs(cars).min() < 0.3


def test_a_written_drive_reads_back_as_kitti(tmp_path):
    data = pytest.importorskip("apusmog_core.data")
    turns = list(simulate.drive(2, seed=0))
    assert simulate.write_kitti(turns, tmp_path) == 2
    scans = list(data.open_scans(tmp_path))
    assert len(scans) == 2
    for turn, read in zip(turns, scans, strict=True):
        np.testing.assert_array_equal(read.points, turn.points)
        np.testing.assert_array_equal(read.intensity, turn.intensity)
        truth = np.load(tmp_path / "truth" / f"{Path(read.name).stem}.npz")
        assert len(truth["instance"]) == len(read.points)
        ring, source = find_rings(read.points)  # counted from the first that saw anything
        assert source == "order" and (ring - ring[0] == turn.ring - turn.ring[0]).mean() > 0.99
    assert scans[1].stamp - scans[0].stamp == pytest.approx(0.1, abs=1e-6)


def test_bad_requests_are_refused_with_what_is_known(town, tmp_path):
    with pytest.raises(ValueError, match="HDL-64E"):
        Sensor.named("HDL-65")
    with pytest.raises(ValueError, match="not in the scene"):
        visible_surface(town, Sensor.named(), 0)
    with pytest.raises(ValueError, match="MANIFEST.tsv"):
        simulate.street(0, tmp_path)


@pytest.mark.skipif(not ROAD.is_dir(), reason="road meshes are not here")
def test_meshes_of_a_folder_are_used_with_wheels_and_windows():
    cars = simulate.load_meshes(str(ROAD))["car"]
    assert all((mesh.reflectivity == shapes.GLASS).any() for mesh in cars if mesh.size[2] > 1.1)
    assert all(abs(mesh.vertices[:, 2].min()) < 0.15 for mesh in cars)
    scene = simulate.street(0, ROAD)
    assert any(len(o.mesh.vertices) in {len(mesh.vertices) for mesh in cars} for o in scene.objects)
