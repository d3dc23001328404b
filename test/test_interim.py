# SPDX-License-Identifier: Apache-2.0
"""What answers scans while the network loads: real objects, interpolated, nothing compiled."""

import os
import subprocess
import sys

import numpy as np
import pytest
from scipy.spatial import cKDTree

from apusmog_core.config import PipelineConfig
from apusmog_core.data import open_scans
from apusmog_core.interim import CONFIDENCE, InterimPipeline, neighbours
from apusmog_core.sample_clouds import STORED, unpack
from apusmog_core.segment import Segmenter
from apusmog_core.segment.rings import find_rings
from apusmog_core.settings import with_values


def sample(name: str = "street_hdl64e") -> dict[str, np.ndarray]:
    with np.load(STORED) as stored:
        return unpack(stored[name])


def answer(scan: dict, **values):
    """The dense scan that the interim pipeline gives with some settings."""
    pipeline = InterimPipeline(with_values(PipelineConfig(), values))
    return pipeline.densify(pipeline.segment(**scan))


@pytest.mark.parametrize("name", ["street_hdl64e", "street_vlp16"])
def test_counts_are_exact_and_measured_points_are_kept_bit_by_bit(name):
    scan = sample(name)
    dense = answer(scan, ratio=4.93)
    segments = dense.segments
    objects = segments.instance > 0
    assert len(dense.points) == round(4.93 * np.count_nonzero(objects)) > 10_000
    measured = ~dense.generated
    assert np.array_equal(np.sort(dense.source[measured]), np.flatnonzero(objects))
    assert np.array_equal(dense.points[measured], scan["points"][dense.source[measured]])
    assert np.array_equal(dense.instance, segments.instance[dense.source])
    assert np.array_equal(dense.intensity, scan["intensity"][dense.source])
    assert (np.diff(dense.instance.astype(int)) >= 0).all()


def test_most_objects_that_the_pipeline_finds_are_found():
    scan = sample()
    _, wanted = Segmenter()(scan["points"], scan["ring"])
    found = answer(scan).segments.instance

    def whole(number: int) -> bool:
        mine = np.bincount(found[wanted == number])
        return mine[1:].max(initial=0) > mine.sum() / 2

    objects = range(1, wanted.max() + 1)
    assert np.mean([whole(number) for number in objects]) > 0.85


def test_new_points_lie_where_rings_that_were_held_out_saw_a_surface():
    scan = sample()
    kept = scan["ring"] % 2 == 0
    dense = answer({name: column[kept] for name, column in scan.items()}, ratio=2.0)
    away, _ = cKDTree(scan["points"]).query(dense.points[dense.generated])
    assert np.mean(away < 0.1) > 0.9


def test_the_confidence_is_what_it_is_on_real_scans(kitti):
    near = []
    for scan in open_scans(kitti):
        ring, _ = find_rings(scan.points, scan.ring)
        kept = ring % 2 == 0
        dense = answer(dict(points=scan.points[kept], ring=ring[kept]), ratio=2.0)
        away, _ = cKDTree(scan.points).query(dense.points[dense.generated])
        near.append(np.mean(away < 0.1))
    assert abs(np.mean(near) - CONFIDENCE) < 0.05


def test_settings_that_limit_the_output_hold():
    scan = sample("street_vlp16")
    count = int(np.count_nonzero(answer(scan).segments.instance))
    assert len(answer(scan, ratio=0.5).points) == round(0.5 * count)
    assert len(answer(scan, max_points_out=count + 100).points) == count + 100
    assert not answer(scan, min_confidence=0.9).generated.any()
    new = answer(scan, keep_measured=False)
    assert new.generated.all() and len(new.points) == 4 * count
    near = answer(scan, **{"range.max": 10.0})
    assert len(near.points) and np.linalg.norm(near.points, axis=1).max() < 10.1


def test_rings_may_be_numbered_in_any_order():
    scan = sample("street_vlp16")
    shuffled = np.random.default_rng(0).permutation(16)[scan["ring"]]
    for one, other in zip(
        neighbours(scan["points"], scan["ring"]), neighbours(scan["points"], shuffled), strict=True
    ):
        assert np.array_equal(one, other)


def test_scans_without_rings_or_points_pass_through():
    rng = np.random.default_rng(0)
    for points in (rng.normal(scale=10, size=(5000, 3)), np.zeros((0, 3)), np.full((9, 3), np.nan)):
        dense = answer(dict(points=points.astype(np.float32)))
        assert len(dense.points) == 0 and not dense.segments.instance.any()
        assert dense.segments.not_finite == np.isnan(points).any(axis=1).sum()


def test_nothing_is_compiled(tmp_path):
    code = (
        "from test_interim import answer, sample; import sys; "
        "assert answer(sample()).generated.any(); assert 'torch' not in sys.modules"
    )
    folder = os.path.dirname(__file__)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True)
    assert not list(tmp_path.rglob("*.nb*"))
