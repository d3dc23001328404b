# SPDX-License-Identifier: Apache-2.0
"""What choice of rays, mixture and confidence are worth: tables for people who work on them."""

import math

import pytest

from apusmog_core.evaluation import rings
from apusmog_core.sensor import grow
from apusmog_core.upsampler import Upsampler
from tools.choice import Unlearned, f_at, score
from tools.confidence import confidence_and_truth


@pytest.fixture(scope="module")
def street():
    pytest.importorskip("open3d")
    return rings.simulated_cases(1, seed=1, sensor="OS1-64", stride=4)


def test_f_at_a_hallucination_lies_between_the_scores_around_it():
    scores = [(0.7, 0.06), (0.6, 0.04)]
    assert f_at(0.045, scores) == pytest.approx(0.625)
    assert math.isnan(f_at(0.03, scores)) and math.isnan(f_at(0.07, scores))


def test_a_higher_threshold_gives_less_hallucination_and_stays_nowhere(street):
    up, shipped = Upsampler.load("lidar", "cpu"), grow.LATTICE
    (_, much), (_, little) = (score(up, street, likely) for likely in (0.1, 0.95))
    assert little < 0.9 * much and grow.LATTICE is shipped


def test_a_mixture_that_knows_nothing_of_the_object_is_worse(street):
    up = Upsampler.load("lidar", "cpu")
    f, hallucination = score(up, street, 0.7)
    for mixture in ("shuffled", "constant"):
        up.way._rays = Unlearned(up.network, mixture)
        other = score(up, street, 0.7)
        assert other[0] < f and other[1] > 1.02 * hallucination, mixture


def test_confidence_is_about_the_share_of_right_points_on_a_whole_sensor():
    pytest.importorskip("open3d")
    cases = rings.simulated_cases(2, seed=1, sensor="VLP-16", stride=1)
    sure, right = confidence_and_truth(Upsampler.load("lidar", "cpu"), cases)
    assert len(sure) > 10_000 and right.mean() == pytest.approx(sure.mean(), abs=0.03)
    middle = (sure > 0.65) & (sure < 0.9)
    assert right[middle].mean() == pytest.approx(sure[middle].mean(), abs=0.1)
