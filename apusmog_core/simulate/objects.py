# SPDX-License-Identifier: Apache-2.0
"""Parametric street objects as triangle meshes: metres, z up, ground at z = 0, heading along x."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .shapes import (
    RUBBER,
    Mesh,
    box,
    ellipsoid,
    hoop,
    join,
    leaves,
    panes,
    skin,
    solid,
    tube,
    wheel,
)


def _foliage(rng, centre, radii, count) -> np.ndarray:
    """Leaf positions in a few overlapping ellipsoids, denser towards their skin."""
    lobes = rng.integers(3, 7)
    middle = np.asarray(centre) + rng.uniform(-0.5, 0.5, (lobes, 3)) * radii
    which = rng.integers(0, lobes, count)
    direction = rng.normal(size=(count, 3))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    reach = rng.uniform(0.2, 1, (count, 1)) ** 0.4
    return middle[which] + direction * reach * radii * rng.uniform(0.45, 0.7, (lobes, 1))[which]


# --- vehicles ------------------------------------------------------------------------------------


def _hull(stations: Sequence[tuple], shade: float, sharpness: float = 5.0) -> Mesh:
    """A body through stations (x, bottom, top, half width) with rounded cross-sections."""
    turn = np.linspace(0, 2 * np.pi, 20, endpoint=False) + np.pi / 20
    y = np.sign(np.cos(turn)) * np.abs(np.cos(turn)) ** (2 / sharpness)
    z = np.sign(np.sin(turn)) * np.abs(np.sin(turn)) ** (2 / sharpness)
    rings = [
        np.stack([np.full(20, x), y * w, (low + high) / 2 + z * (high - low) / 2], -1)
        for x, low, high, w in stations
    ]
    return skin(np.array(rings), shade)


def _cabin(base: tuple, roof: tuple, z: tuple, widths: tuple, side: int, shade: float) -> Mesh:
    """Windscreen, rear and `side` panes a side (0: bare metal) under a roof.

    `base` and `roof` give their back and front ends, `z` and `widths` (half) both levels."""
    (x0, x1), (r0, r1), (low, high), (w, v) = base, roof, z, widths
    bottom = [(x0, -w, low), (x1, -w, low), (x1, w, low), (x0, w, low)]
    top = [(r0, -v, high), (r1, -v, high), (r1, v, high), (r0, v, high)]

    def face(i: int, j: int, across: int) -> Mesh:
        quad = [bottom[i], bottom[j], top[j], top[i]]
        return panes(quad, max(across, 1), 1, 0.16 if across else 1.0, shade)

    faces = [face(1, 2, 1), face(3, 0, min(side, 1)), face(0, 1, side), face(2, 3, side)]
    lid = _hull([(x, high - 0.02, high + 0.03, v) for x in (r0, r1)], shade)
    return join(*faces, lid)


def paint(rng) -> float:
    """Car paint from black to white."""
    return float(rng.choice([0.05, 0.12, 0.3, 0.5, 0.7]) * rng.uniform(0.8, 1.2))


def wheels(length: float, width: float, radius: float) -> Mesh:
    """Four wheels for a car of this length and width."""
    x, y, thick = 0.30 * length, width / 2 - 0.12, 0.22
    return join(*[wheel(sx * x, sy * y, radius, thick) for sx in (-1, 1) for sy in (-1, 1)])


def car(rng: np.random.Generator) -> Mesh:
    """A saloon, hatchback, estate or off-roader."""
    kind = rng.choice(["saloon", "hatchback", "estate", "offroad"])
    length = {"saloon": 4.7, "hatchback": 4.0, "estate": 4.7, "offroad": 4.6}[kind]
    length *= rng.uniform(0.93, 1.07)
    width = rng.uniform(1.70, 1.86) + (0.08 if kind == "offroad" else 0)
    height = rng.uniform(1.40, 1.52) + (0.25 if kind == "offroad" else 0)
    shade, radius = paint(rng), rng.uniform(0.29, 0.34) + (0.04 if kind == "offroad" else 0)
    front, back, w = length / 2, -length / 2, width / 2
    floor, belt = 0.2 + (0.08 if kind == "offroad" else 0), 0.62 * height
    scuttle = front - rng.uniform(0.95, 1.2)  # where bonnet meets windscreen
    boot = back + {"saloon": rng.uniform(0.6, 0.8)}.get(str(kind), 0.06)
    nose = belt - rng.uniform(0.14, 0.24)
    body = _hull(
        [
            (front, floor + 0.12, nose - 0.14, 0.78 * w),
            (front - 0.08, floor, nose - 0.04, 0.9 * w),
            (front - 0.35, floor, nose + 0.02, 0.98 * w),
            (scuttle, floor, belt, w),
            (0.0, floor, belt, w),
            (boot, floor, belt + 0.02, w),
            (back + 0.05, floor, belt - 0.02, 0.93 * w),
            (back, floor + 0.15, belt - 0.12, 0.86 * w),
        ],
        shade,
    )
    rear_slope = {"saloon": 0.65, "hatchback": 0.35, "estate": 0.25, "offroad": 0.2}[kind]
    cabin = _cabin(
        (boot, scuttle),
        (boot + rear_slope, scuttle - rng.uniform(0.65, 0.85)),
        (belt - 0.02, height - 0.03),
        (0.95 * w, 0.72 * w),
        2,
        shade,
    )
    mirrors = [
        ellipsoid((scuttle - 0.35, s * (w + 0.07), belt + 0.05), (0.06, 0.1, 0.07), shade, 6)
        for s in (-1, 1)
    ]
    return join(body, cabin, wheels(length, width, radius), *mirrors)


def van(rng: np.random.Generator) -> Mesh:
    """A panel van or minibus."""
    length, width, height = rng.uniform(4.8, 6.0), rng.uniform(1.9, 2.05), rng.uniform(1.95, 2.6)
    shade, w = paint(rng), width / 2
    front, back, belt = length / 2, -length / 2, 1.15
    scuttle = front - rng.uniform(0.5, 0.8)
    body = _hull(
        [
            (front, 0.4, 0.8, 0.85 * w),
            (front - 0.1, 0.28, 0.95, 0.95 * w),
            (scuttle, 0.25, belt, w),
            (back + 0.04, 0.25, belt, w),
            (back, 0.35, belt, 0.97 * w),
        ],
        shade,
        8.0,
    )
    side = int(rng.choice([0, 3]))
    top = (back + 0.05, scuttle - rng.uniform(0.5, 0.8))
    rise, widths = (belt - 0.03, height - 0.03), (0.98 * w, 0.86 * w)
    cabin = _cabin((back, scuttle), top, rise, widths, side, shade)
    return join(body, cabin, wheels(length, width, rng.uniform(0.32, 0.36)))


def truck(rng: np.random.Generator) -> Mesh:
    """A lorry: cab, box or flat bed, six wheels."""
    length, width, height = rng.uniform(6.5, 10.0), rng.uniform(2.3, 2.5), rng.uniform(2.9, 3.7)
    colour, cargo, w = paint(rng), paint(rng), width / 2
    front, back, cab = length / 2, -length / 2, rng.uniform(1.6, 2.1)
    cab_top = rng.uniform(2.5, 2.9)
    nose = [(front, 0.5, 1.35, 0.95 * w), (front - 0.1, 0.4, 1.4, w), (front - cab, 0.5, 1.4, w)]
    base, roof = (front - cab, front - 0.05), (front - cab + 0.1, front - 0.35)
    parts = [
        _hull(nose, colour, 8.0),
        _cabin(base, roof, (1.38, cab_top), (w, 0.92 * w), 1, colour),
        box((back, -0.45, 0.6), (front - cab, 0.45, 0.95), 0.1),
    ]
    bed = (back, front - cab - 0.15)
    if rng.random() < 0.75:
        parts.append(box((bed[0], -w, 1.0), (bed[1], w, height), cargo))
    else:
        parts += [
            box((bed[0], -w, 1.0), (bed[1], w, 1.15), cargo),
            box((bed[1] - 0.1, -w, 1.15), (bed[1], w, 2.2), cargo),
            box((bed[0] + 1, -0.7 * w, 1.15), (bed[1] - 0.8, 0.7 * w, rng.uniform(1.5, 2.4)), 0.3),
        ]
    radius = rng.uniform(0.42, 0.5)
    for x in (front - 0.75 * cab, back + 1.2, back + 2.3):
        parts += [wheel(x, s * (w - 0.17), radius, 0.32) for s in (-1, 1)]
    return join(*parts)


# --- persons -------------------------------------------------------------------------------------


def _torso(hip: np.ndarray, neck: np.ndarray, stout: float, shade: float) -> Mesh:
    """An oval trunk from hip to neck, wider at the shoulders."""
    up = (neck - hip) / np.linalg.norm(neck - hip)
    ahead, across = np.cross((0, 1, 0), up), np.array([0, 1, 0])
    turn = np.linspace(0, 2 * np.pi, 12, endpoint=False)[:, None]
    rings = [
        hip + t * (neck - hip) + stout * (np.cos(turn) * ahead * d + np.sin(turn) * across * w)
        for t, w, d in [
            (0, 0.16, 0.115), (0.25, 0.165, 0.115), (0.5, 0.18, 0.12), (0.8, 0.2, 0.12),
            (1, 0.07, 0.08),
        ]
    ]  # fmt: skip
    return skin(np.array(rings), shade)


def person(rng: np.random.Generator) -> Mesh:
    """A person standing or walking along x."""
    height = np.clip(rng.normal(1.72, 0.09), 1.45, 1.98)
    h, stout = height / 1.75, rng.uniform(0.9, 1.25)
    cloth, trousers, skin = rng.uniform(0.1, 0.7), rng.uniform(0.05, 0.4), 0.45
    swing = rng.uniform(-0.45, 0.45)  # half the angle between the legs
    hip, neck = np.array([0, 0, 0.92]), np.array([rng.uniform(0, 0.05), 0, 1.47])
    parts = [_torso(hip, neck, stout, cloth)]
    parts += [
        tube([neck, neck + (0, 0, 0.1)], 0.055, skin),
        ellipsoid(neck + (0.01, 0, 0.17), (0.1, 0.08, 0.125), skin),
    ]
    for side, angle in ((-1, swing), (1, -swing)):
        top = hip + (0, side * 0.095, 0.02)
        knee = top + 0.45 * np.array([np.sin(angle), 0, -np.cos(angle)])
        bend = angle - max(0, -angle) * 0.7
        foot = knee + 0.43 * np.array([np.sin(bend), 0, -np.cos(bend)])
        parts.append(tube([top, knee, foot], np.array([0.085, 0.06, 0.045]) * stout, trousers))
        parts.append(ellipsoid(foot + (0.06, 0, -0.01), (0.13, 0.045, 0.05), 0.08, 8))
        shoulder = neck + (0, side * 0.19 * stout, -0.06)
        elbow = shoulder + 0.3 * np.array([np.sin(-angle), side * 0.12, -np.cos(angle)])
        hand = elbow + 0.29 * np.array([np.sin(0.25 - angle), 0.05 * side, -np.cos(0.25 - angle)])
        parts.append(tube([shoulder, elbow, hand], np.array([0.058, 0.045, 0.035]) * stout, cloth))
    if rng.random() < 0.3:
        parts.append(box((-0.34, -0.15, 1.0), (-0.1, 0.15, 1.45), 0.15))
    body = join(*parts).scaled(h)
    return body.moved((0, 0, -body.vertices[:, 2].min()))


def cyclist(rng: np.random.Generator) -> Mesh:
    """A person on a bicycle."""
    metal, cloth, trousers = rng.uniform(0.1, 0.6), rng.uniform(0.1, 0.7), rng.uniform(0.05, 0.4)
    r, base = 0.34, rng.uniform(0.5, 0.54)
    rear, axle = np.array([-base, 0, r]), np.array([base, 0, r])
    crank, seat = np.array([-0.08, 0, 0.3]), np.array([-0.28, 0, 0.95])
    head, bar = np.array([0.36, 0, 0.82]), np.array([0.36, 0, rng.uniform(0.98, 1.08)])
    parts = [hoop(rear, r, 0.022, RUBBER), hoop(axle, r, 0.022, RUBBER)]
    lug = seat * (1, 1, 0.85)  # where saddle tube, top tube and rear stays meet
    tubes = [(rear, crank), (rear, lug), (crank, seat), (crank, head), (head, axle), (lug, head)]
    parts += [tube(pair, 0.018, metal, 6) for pair in [*tubes, (head, bar)]]
    parts += [
        tube([bar + (0, -0.28, 0), bar + (0, 0.28, 0)], 0.016, 0.1, 6),
        ellipsoid(seat + (0, 0, 0.02), (0.13, 0.08, 0.04), 0.1, 8),
    ]
    lean = rng.uniform(0.2, 0.6)
    hip = seat + (0, 0, 0.12)
    neck = hip + 0.54 * np.array([np.sin(lean), 0, np.cos(lean)])
    parts.append(_torso(hip, neck, 1.0, cloth))
    parts += [
        tube([neck, neck + (0.03, 0, 0.1)], 0.055, 0.45),
        ellipsoid(neck + (0.06, 0, 0.17), (0.11, 0.09, 0.14), 0.4),
    ]
    pedal = rng.uniform(0, 2 * np.pi)
    for side in (-1, 1):
        turn = pedal + (np.pi if side > 0 else 0)
        foot = crank + (0.17 * np.cos(turn), side * 0.11, 0.17 * np.sin(turn) + 0.05)
        top = hip + (0, side * 0.09, -0.03)
        knee = _joint(top, foot, 0.45, 1)
        parts.append(tube([top, knee, foot], (0.085, 0.06, 0.045), trousers))
        parts.append(ellipsoid(foot + (0.06, 0, -0.03), (0.13, 0.045, 0.045), 0.08, 8))
        shoulder, hand = neck + (0, side * 0.19, -0.05), bar + (0, side * 0.25, 0.02)
        elbow = _joint(shoulder, hand, 0.32, -1)
        parts.append(tube([shoulder, elbow, hand], (0.055, 0.045, 0.035), cloth))
    body = join(*parts).scaled(rng.uniform(0.95, 1.05))
    return body.moved((0, 0, -body.vertices[:, 2].min()))


def _joint(a: np.ndarray, b: np.ndarray, bone: float, forward: int) -> np.ndarray:
    """Knee (forward 1) or elbow (-1) between the ends of a limb of two equal bones."""
    gap = np.linalg.norm(b - a)
    bend = np.cross((0, 1, 0), (a - b) / gap) * forward
    return (a + b) / 2 + bend * np.sqrt(max(bone**2 - gap**2 / 4, 0))


# --- what stands still ---------------------------------------------------------------------------


def pole(rng: np.random.Generator) -> Mesh:
    """A lamp post, or a traffic sign on its post."""
    shade = rng.uniform(0.2, 0.6)
    if rng.random() < 0.5:
        high, radius = rng.uniform(4.5, 8.0), rng.uniform(0.06, 0.11)
        post = tube([(0, 0, 0), (0, 0, high)], (radius, 0.6 * radius), shade, 12)
        arm = tube([(0, 0, high), (0, 1.4, high + 0.2)], 0.04, shade)
        return join(post, arm, box((-0.12, 1.2, high + 0.1), (0.12, 1.8, high + 0.22), shade))
    high, half = rng.uniform(2.2, 3.0), rng.uniform(0.25, 0.4)
    board = box((0.04, -half, high - 2 * half), (0.06, half, high), 0.9)
    return join(tube([(0, 0, 0), (0, 0, high)], 0.035, shade, 10), board)


def wall(rng: np.random.Generator) -> Mesh:
    """A free-standing wall along x."""
    half, thick = rng.uniform(2.5, 7.0), rng.uniform(0.1, 0.2)
    high = rng.uniform(0.8, 2.4)
    return box((-half, -thick, 0), (half, thick, high), rng.uniform(0.2, 0.6))


def building(rng: np.random.Generator) -> Mesh:
    """A house with windows on all sides and a ridged or flat roof."""
    x, y, storeys = rng.uniform(4, 9), rng.uniform(3.5, 6), int(rng.integers(1, 4))
    high, shade = 3.0 * storeys, rng.uniform(0.2, 0.6)
    floor = [(-x, -y, 0), (x, -y, 0), (x, y, 0), (-x, y, 0)]
    top = [(a, b, high) for a, b, _ in floor]
    parts = []
    for i, j in ((0, 1), (1, 2), (2, 3), (3, 0)):
        across = int(np.linalg.norm(np.subtract(floor[i], floor[j])) / rng.uniform(2.4, 4))
        parts.append(panes([floor[i], floor[j], top[j], top[i]], across, storeys, 0.6, shade))
    ridge = high + (rng.uniform(1.5, 3) if rng.random() < 0.6 else 0.05)
    roof = [*top, (-x, 0, ridge), (x, 0, ridge)]
    faces = [(0, 1, 5), (0, 5, 4), (2, 3, 4), (2, 4, 5), (1, 2, 5), (3, 0, 4)]
    return join(*parts, solid(roof, faces, 0.25))


def bush(rng: np.random.Generator) -> Mesh:
    """A soup of small leaves."""
    radii = np.array([rng.uniform(0.5, 1.6), rng.uniform(0.4, 0.9), rng.uniform(0.4, 1.0)])
    count = int(900 * np.prod(radii) ** (2 / 3)) + 300
    centres = _foliage(rng, (0, 0, radii[2] * 0.9), radii, count)
    return leaves(centres, rng.uniform(0.05, 0.09), rng.uniform(0.2, 0.5), rng)


def tree(rng: np.random.Generator) -> Mesh:
    """A trunk, a few branches and a crown of leaves."""
    high, radius = rng.uniform(4.0, 9.0), rng.uniform(0.1, 0.3)
    fork = rng.uniform(0.35, 0.5) * high
    bend = rng.normal(0, 0.12, (3, 3)) * (1, 1, 0)
    path = np.array([(0, 0, 0), (0, 0, fork), (0, 0, 0.9 * high)]) + bend * [[0], [1], [2]]
    parts = [tube(path, (1.2 * radius, 0.8 * radius, 0.2 * radius), 0.25, 10)]
    crown = np.array([0.28, 0.28, 0.3]) * high * rng.uniform(0.8, 1.2)
    for _ in range(rng.integers(3, 7)):
        start = path[1] + (path[2] - path[1]) * rng.uniform(0, 0.5)
        turn = rng.uniform(0, 2 * np.pi)
        tip = start + crown * 0.8 * np.array([np.cos(turn), np.sin(turn), rng.uniform(0.4, 1)])
        parts.append(tube([start, tip], (0.45 * radius, 0.15 * radius), 0.25, 6))
    middle = (*path[2, :2], fork + 0.9 * crown[2])
    centres = _foliage(rng, middle, crown, int(rng.integers(1500, 3000)))
    return join(*parts, leaves(centres, rng.uniform(0.08, 0.13), rng.uniform(0.2, 0.5), rng))


def furniture(rng: np.random.Generator) -> Mesh:
    """A litter bin, bollard, bench or switch box."""
    kind = rng.choice(["bin", "bollard", "bench", "cabinet"])
    shade = rng.uniform(0.1, 0.6)
    if kind == "bin":
        return tube([(0, 0, 0), (0, 0, rng.uniform(0.8, 1.1))], rng.uniform(0.2, 0.32), shade, 14)
    if kind == "bollard":
        return tube([(0, 0, 0), (0, 0, rng.uniform(0.7, 1.1))], rng.uniform(0.06, 0.12), shade, 10)
    if kind == "cabinet":
        x, y, z = rng.uniform(0.3, 0.7), rng.uniform(0.15, 0.25), rng.uniform(0.9, 1.5)
        return box((-x, -y, 0), (x, y, z), shade)
    half = rng.uniform(0.7, 1.0)
    legs = [
        box((x - 0.04, -0.2, 0), (x + 0.04, 0.2, 0.42), shade) for x in (0.8 * half, -0.8 * half)
    ]
    seat, rest = ((-half, -0.22, 0.42), (half, 0.22, 0.47)), ((-half, 0.2, 0.5), (half, 0.25, 0.9))
    return join(*legs, box(*seat, shade), box(*rest, shade))


BUILDERS: dict[str, Callable[[np.random.Generator], Mesh]] = {
    "car": car,
    "van": van,
    "truck": truck,
    "person": person,
    "cyclist": cyclist,
    "pole": pole,
    "wall": wall,
    "building": building,
    "bush": bush,
    "tree": tree,
    "furniture": furniture,
}
