# SPDX-License-Identifier: Apache-2.0
"""The shipped weights keep their scores, on clouds of our own that live in the repository.

Where a change means to move them: `python -m tools.shipped` writes the expectations again.
"""

import json

import pytest

pytest.importorskip("fpsample")

from tools.shipped import EXPECTED, score_shapes, score_street  # noqa: E402

KNOWN = json.loads(EXPECTED.read_text())
SAME = 2e-3  # of the score: rounding on other machines


def differences(found: dict, known: dict, tolerance: float) -> list[str]:
    return [
        f"{case} {name}: {found[case][name]:.5g}, expected {value:.5g}"
        for case, scores in known.items()
        for name, value in scores.items()
        if found[case][name] != pytest.approx(value, rel=tolerance)
    ]


def test_shape_keeps_its_scores_on_three_shapes():
    assert differences(score_shapes(), KNOWN["shape"], SAME) == []


def test_lidar_keeps_its_scores_on_a_simulated_street():
    assert differences(score_street(), KNOWN["lidar"], SAME) == []
