# SPDX-License-Identifier: Apache-2.0
"""Boxes around instances."""

import numpy as np
import pytest

from apusmog_core.segment.boxes import oriented_boxes


def test_a_box_is_as_long_wide_high_and_turned_as_what_it_holds():
    rng = np.random.default_rng(0)
    car = rng.uniform(-0.5, 0.5, (4000, 3)) * [4.0, 2.0, 1.5]
    angle = np.radians(30)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    turned = np.column_stack([car[:, :2] @ turn.T + [10, 5], car[:, 2]])
    pole = rng.uniform(-0.5, 0.5, (50, 3)) * [0.1, 0.1, 3.0] - [4, 0, 0]
    points = np.concatenate([turned, pole]).astype(np.float32)
    boxes = oriented_boxes(points, np.repeat([7, 2], [4000, 50]))
    assert boxes.instance.tolist() == [2, 7]
    np.testing.assert_allclose(boxes.size[1], [4.0, 2.0, 1.5], atol=0.05)
    np.testing.assert_allclose(boxes.centre, [[-4, 0, 0], [10, 5, 0]], atol=0.1)
    assert boxes.yaw[1] == pytest.approx(angle, abs=0.01)


def test_no_points_have_no_boxes_and_one_point_has_a_box_of_no_size():
    assert len(oriented_boxes(np.zeros((0, 3)), np.zeros(0, int)).instance) == 0
    one = oriented_boxes(np.ones((1, 3), np.float32), np.array([3]))
    assert one.instance.tolist() == [3] and not one.size.any()
