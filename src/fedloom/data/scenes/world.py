"""Random scenes: a room or an open place as a list of simple solids.

World coordinates are metres, x right, y up, right-handed; the ground is y = 0. Everything is drawn with the standard
library's generator, one number at a time, so that a scene depends on its seed and on nothing else.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field
from typing import TypeVar

Vector = tuple[float, float, float]
Basis = tuple[Vector, Vector, Vector]
T = TypeVar("T")

CLASSES = (
    *("floor", "wall", "ceiling", "window", "table", "ground", "sky", "building", "tree"),
    *("box", "ball", "cylinder", "person"),
)
"""Names of the semantic classes 0..12."""
PARTS = ("background", "head", "torso", "upper arms", "lower arms", "upper legs", "lower legs")
"""Names of the human parts 0..6."""

FLOOR, WALL, CEILING, WINDOW, TABLE, GROUND, SKY, BUILDING, TREE, BOX, BALL, CYLINDER, PERSON = range(len(CLASSES))
HEAD, TORSO, UPPER_ARM, LOWER_ARM, UPPER_LEG, LOWER_LEG = range(1, len(PARTS))

# Shapes in their own coordinates: a surface of the background, the cube |x|, |y|, |z| <= 1, the unit ball, the cylinder
# of radius 1 and |y| <= 1, and the capsule of radius 1 around |y| <= length.
SURFACE, CUBE, SPHERE, ROUND, CAPSULE = range(5)

PLAIN, TILES, PLANKS, BRICKS, NOISE, STRIPES, PANE, FACADE, HAIR, CHECKS = range(10)
"""Patterns of a material, each a mixture of two colours."""

ORIGIN: Vector = (0.0, 0.0, 0.0)
IDENTITY: Basis = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))


@dataclass(frozen=True)
class Material:
    """A pattern of two colours (0..1), its size in metres, and how much it shines."""

    pattern: int
    first: Vector
    second: Vector
    size: float = 0.3
    gloss: float = 0.0


@dataclass
class Scene:
    """One scene. A row of `numbers` is a solid: centre (3), its axes divided by its half sizes (9), half sizes (3),
    capsule length, first and second colour (6), pattern size, phase, gloss. A row of `kinds` is its shape, class, part,
    instance and pattern. `blockers` are ellipsoids that cast shadows: centre, scaled axes, instance.

    The origin is the centre of a room's floor. `view` are the camera's axes (right, up, backward) in the world, `light`
    the strengths of the lamp and of the light from everywhere."""

    indoor: bool
    room: Vector
    """Half width, height, half depth of a room."""
    eye: Vector = ORIGIN
    view: Basis = IDENTITY
    field_of_view: float = 1.0
    """Of the longer side, in radians."""
    lamp: Vector = ORIGIN
    light: tuple[float, float] = (0.6, 0.5)
    tint: Vector = (1.0, 1.0, 1.0)
    sky: tuple[Vector, Vector] = ((0.4, 0.6, 0.9), (0.85, 0.9, 0.95))
    numbers: list[list[float]] = field(default_factory=list)
    kinds: list[list[int]] = field(default_factory=list)
    blockers: list[list[float]] = field(default_factory=list)
    instances: int = 0

    def new(self) -> int:
        """Return the number of a new instance."""
        self.instances += 1
        return self.instances - 1

    def add(
        self,
        shape: int,
        centre: Vector,
        half: Vector,
        kind: int,
        instance: int,
        look: Material,
        axes: Basis = IDENTITY,
        part: int = 0,
        length: float = 0.0,
        phase: float = 0.0,
        shade: Vector | None = None,
    ) -> None:
        """Put a solid into the scene. `shade` are the half sizes of the ellipsoid that casts its shadow, if any."""
        seen = [*look.first, *look.second, look.size, phase, look.gloss]
        self.numbers.append([*centre, *_scaled(axes, half), *half, length, *seen])
        self.kinds.append([shape, kind, part, instance, look.pattern])
        if shade is not None:
            self.block(centre, shade, instance, axes)

    def block(self, centre: Vector, half: Vector, instance: int, axes: Basis = IDENTITY) -> None:
        """Let an ellipsoid cast a shadow."""
        self.blockers.append([*centre, *_scaled(axes, half), instance])


def _scaled(axes: Basis, half: Vector) -> list[float]:
    return [a / h for axis, h in zip(axes, half, strict=True) for a in axis]


class Draw:
    """Random numbers of one scene."""

    def __init__(self, seed: int) -> None:
        self._next = random.Random(seed).random

    def real(self, low: float = 0.0, high: float = 1.0) -> float:
        """Draw uniformly from [low, high)."""
        return low + (high - low) * self._next()

    def whole(self, low: int, high: int) -> int:
        """Draw uniformly from low..high, both included."""
        return low + int((high - low + 1) * self._next())

    def chance(self, p: float) -> bool:
        """Return True with probability p."""
        return self._next() < p

    def one(self, *choices: T) -> T:
        """Draw one of the choices."""
        return choices[int(len(choices) * self._next())]

    def colour(self, low: float = 0.1, high: float = 0.9, saturation: float = 0.6) -> Vector:
        """Draw a colour of any hue: value between low and high, saturation up to `saturation`."""
        hue, s, v = self.real(0, 6), self.real(0, saturation), self.real(low, high)
        r, g, b = (v - v * s * max(0.0, min(k, 4 - k, 1.0)) for k in ((n + hue) % 6 for n in (5, 3, 1)))
        return r, g, b

    def near(self, colour: Vector, spread: float = 0.08) -> Vector:
        """Draw a colour near another."""
        shift = self.real(-spread, spread)
        r, g, b = (min(0.98, max(0.02, c + shift + self.real(-spread, spread) / 2)) for c in colour)
        return r, g, b


def darker(colour: Vector, factor: float) -> Vector:
    """Return the colour, scaled and kept in 0..1."""
    r, g, b = (min(1.0, c * factor) for c in colour)
    return r, g, b


def turned(yaw: float) -> Basis:
    """Return axes turned about the vertical."""
    c, s = math.cos(yaw), math.sin(yaw)
    return (c, 0.0, -s), (0.0, 1.0, 0.0), (s, 0.0, c)


def _plus(a: Vector, b: Vector, k: float = 1.0) -> Vector:
    return a[0] + k * b[0], a[1] + k * b[1], a[2] + k * b[2]


def _cross(a: Vector, b: Vector) -> Vector:
    return a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]


def _unit(a: Vector) -> Vector:
    n = math.sqrt(a[0] * a[0] + a[1] * a[1] + a[2] * a[2])
    return a[0] / n, a[1] / n, a[2] / n


def _along(up: Vector, near: Vector) -> Basis:
    """Return axes whose second is `up` and whose third is as near as possible to `near`."""
    if abs(up[0] * near[0] + up[1] * near[1] + up[2] * near[2]) > 0.99:
        near = (near[1], near[2], near[0])
    right = _unit(_cross(up, near))
    return right, up, _cross(right, up)


SKIN = ((0.93, 0.76, 0.65), (0.85, 0.65, 0.5), (0.7, 0.5, 0.37), (0.5, 0.34, 0.24), (0.36, 0.24, 0.17))
HAIRS = ((0.1, 0.08, 0.07), (0.25, 0.16, 0.1), (0.45, 0.3, 0.17), (0.75, 0.6, 0.35), (0.55, 0.55, 0.55))
GREENS = ((0.2, 0.4, 0.14), (0.3, 0.45, 0.16), (0.16, 0.33, 0.17), (0.42, 0.42, 0.15))


def figure(scene: Scene, draw: Draw, x: float, z: float, yaw: float, height: float) -> None:
    """Add a person of some height (metres) at (x, z), facing `yaw` (0 = towards +z), in a random pose."""
    person = scene.new()
    pose = draw.one("stand", "stand", "walk", "walk", "wave", "reach", "sit")
    ahead: Vector = (math.sin(yaw), 0.0, math.cos(yaw))
    side: Vector = (math.cos(yaw), 0.0, -math.sin(yaw))
    up, h = (0.0, 1.0, 0.0), height

    skin = Material(PLAIN, tone := draw.near(draw.one(*SKIN), 0.04), darker(tone, 0.85), 0.1)
    head = Material(HAIR, tone, draw.near(draw.one(*HAIRS), 0.04))
    colour, pattern = draw.colour(0.25, 0.95, 0.85), draw.one(PLAIN, PLAIN, STRIPES, NOISE, CHECKS)
    shirt = Material(pattern, colour, draw.near(darker(colour, 0.55), 0.15), draw.real(0.06, 0.14))
    trousers = Material(PLAIN, leg := draw.colour(0.1, 0.6, 0.55), darker(leg, 0.7), 0.1)
    shoes = Material(PLAIN, draw.colour(0.05, 0.35, 0.4), (0.05, 0.05, 0.05), 0.1)
    sleeves, shorts = draw.chance(0.5), draw.chance(0.25)

    def limb(start: Vector, end: Vector, radius: float, part: int, material: Material) -> None:
        axis = _plus(end, start, -1)
        length = math.sqrt(axis[0] ** 2 + axis[1] ** 2 + axis[2] ** 2) / 2 / radius
        centre, axes = _plus(start, axis, 0.5), _along(_unit(axis), ahead)
        scene.add(CAPSULE, centre, (radius, radius, radius), PERSON, person, material, axes, part, length)

    def toward(forward: float, outward: float, which: float) -> Vector:
        """Return the direction of a limb that hangs down, swung forward and outward (radians); `which` is the side."""
        down, front = -math.cos(outward) * math.cos(forward), math.cos(outward) * math.sin(forward)
        return _plus(_plus((0.0, down, 0.0), side, which * math.sin(outward)), ahead, front)

    thick, swing = draw.real(0.9, 1.25), draw.real(0.25, 0.6) * draw.one(-1, 1)
    lean, sitting = draw.real(-0.05, 0.15), pose == "sit"
    if sitting:
        hips, knees = [draw.real(1.3, 1.55)] * 2, [draw.real(1.2, 1.6)] * 2
    else:
        hips = [swing, -swing] if pose == "walk" else [draw.real(-0.1, 0.1), 0]
        knees = [0.15 + max(0.0, -a) for a in hips]
    spread, thigh, shin = draw.real(0.03, 0.15), 0.245 * h, 0.235 * h
    # The pelvis is as high as the lower foot demands.
    upper, lower = thigh * math.cos(spread), shin * math.cos(spread)
    reach = max(upper * math.cos(a) + lower * math.cos(a - k) for a, k in zip(hips, knees, strict=True))
    pelvis: Vector = (x, reach + 0.045 * h, z)
    for which, a, k in zip((-1.0, 1.0), hips, knees, strict=True):
        hip = _plus(pelvis, side, which * 0.06 * h)
        joint = _plus(hip, toward(a, spread, which), thigh)
        ankle = _plus(joint, toward(a - k, spread, which), shin)
        limb(hip, joint, 0.05 * h * thick, UPPER_LEG, trousers)
        limb(joint, ankle, 0.035 * h * thick, LOWER_LEG, skin if shorts else trousers)
        toe = _plus(_plus(ankle, ahead, 0.09 * h), up, -0.015 * h)
        limb(_plus(ankle, up, -0.015 * h), toe, 0.028 * h, LOWER_LEG, shoes)

    spine = _unit(_plus(up, ahead, lean))
    neck, chest = (_plus(pelvis, spine, at) for at in (0.3 * h, 0.135 * h))
    wide, deep = 0.1 * h * thick, 0.068 * h * thick
    scene.add(CAPSULE, chest, (wide, deep, deep), PERSON, person, shirt, _along(spine, ahead), TORSO, 0.14 * h / deep)
    limb(neck, _plus(neck, spine, 0.05 * h), 0.032 * h, HEAD, skin)
    skull, look = _plus(neck, spine, 0.115 * h), turned(yaw + draw.real(-0.5, 0.5))
    scene.add(SPHERE, skull, (0.052 * h, 0.072 * h, 0.06 * h), PERSON, person, head, look, HEAD)

    for number, which in enumerate((-1.0, 1.0)):
        shoulder = _plus(_plus(neck, side, which * (wide + 0.012 * h)), spine, -0.035 * h)
        forward, outward, elbow = draw.real(-0.2, 0.3), draw.real(0.1, 0.35), draw.real(0.1, 0.7)
        if pose == "walk":
            forward = -swing if number == 0 else swing
        elif pose == "wave" and number == 0:
            forward, outward, elbow = draw.real(-0.2, 0.2), draw.real(1.5, 2.3), draw.real(0.3, 0.9)
        elif pose == "reach":
            forward, elbow = draw.real(0.9, 1.7), draw.real(0, 0.5)
        elif sitting:
            forward, elbow = draw.real(0.2, 0.6), draw.real(0.6, 1.2)
        joint = _plus(shoulder, toward(forward, outward, which), 0.17 * h)
        wrist = _plus(joint, toward(forward + elbow, outward, which), 0.15 * h)
        hand = _plus(wrist, toward(forward + elbow, outward, which), 0.05 * h)
        limb(shoulder, joint, 0.033 * h * thick, UPPER_ARM, shirt)
        limb(joint, wrist, 0.027 * h * thick, LOWER_ARM, shirt if sleeves else skin)
        limb(wrist, hand, 0.025 * h, LOWER_ARM, skin)

    scene.block(_plus(pelvis, spine, 0.15 * h), (0.16 * h, 0.26 * h, 0.13 * h), person, turned(yaw))
    legs = _plus(_plus(pelvis, up, -0.5 * pelvis[1]), ahead, 0.1 * h if sitting else 0.0)
    scene.block(legs, (0.13 * h, 0.55 * pelvis[1], 0.2 * h if pose == "walk" else 0.12 * h), person, turned(yaw))
    if sitting:
        seat, half = scene.new(), (0.24, (pelvis[1] - 0.05 * h) / 2, 0.22)
        centre = (x - 0.04 * ahead[0], half[1], z - 0.04 * ahead[2])
        scene.add(CUBE, centre, half, BOX, seat, _stuff(draw), turned(yaw), shade=_blocking(half))


def _blocking(half: Vector) -> Vector:
    """Return half sizes of the ellipsoid that stands for a box when shadows are cast."""
    return half[0] * 1.15, half[1] * 1.1, half[2] * 1.15


def _stuff(draw: Draw) -> Material:
    """Draw the material of some object."""
    first, pattern = draw.colour(0.25, 0.95, 0.8), draw.one(PLAIN, PLAIN, NOISE, STRIPES, PLANKS, TILES)
    return Material(pattern, first, draw.near(darker(first, draw.real(0.4, 0.8)), 0.1), draw.real(0.08, 0.25))


def _wood(draw: Draw) -> Material:
    first = draw.near(draw.one((0.6, 0.42, 0.26), (0.45, 0.3, 0.18), (0.75, 0.6, 0.42)), 0.06)
    return Material(PLANKS, first, darker(first, 0.7), draw.real(0.08, 0.16))


def box(scene: Scene, draw: Draw, x: float, y: float, z: float, size: float) -> None:
    """Add a box that stands at height y."""
    half = (size * draw.real(0.6, 1.0), size * draw.real(0.5, 1.3), size * draw.real(0.6, 1.0))
    axes, look = turned(draw.real(0, math.pi)), _stuff(draw)
    centre, shade = (x, y + half[1], z), _blocking(half)
    scene.add(CUBE, centre, half, BOX, scene.new(), look, axes, phase=draw.real(), shade=shade)


def ball(scene: Scene, draw: Draw, x: float, y: float, z: float, radius: float) -> None:
    """Add a ball that lies at height y."""
    first, pattern = draw.colour(0.4, 0.95, 0.95), draw.one(PLAIN, STRIPES, CHECKS)
    look = Material(pattern, first, draw.one((0.95, 0.95, 0.92), darker(first, 0.5)), radius * 0.8, draw.real(0.1, 0.6))
    centre, half, thing = (x, y + radius, z), (radius, radius, radius), scene.new()
    scene.add(SPHERE, centre, half, BALL, thing, look, turned(draw.real(0, math.pi)))
    scene.block(centre, half, thing)


def cylinder(
    scene: Scene, draw: Draw, x: float, y: float, z: float, radius: float, heights: tuple[float, float] = (0.3, 1.3)
) -> None:
    """Add an upright cylinder that stands at height y."""
    high, look = draw.real(*heights) / 2, _stuff(draw)
    centre, half, shade = (x, y + high, z), (radius, high, radius), (radius, 2 * high * 0.55, radius)
    scene.add(ROUND, centre, half, CYLINDER, scene.new(), look, phase=draw.real(), shade=shade)


THINGS = ((0.14, 0.42, 1.4, 1.3, box), (0.12, 0.38, 1.0, 1.2, ball), (0.08, 0.3, 1.0, 1.3, cylinder))
"""Least and greatest size, radius of the free place in sizes, least distance, and the function that adds it."""


def table(scene: Scene, draw: Draw, x: float, z: float) -> None:
    """Add a table with four legs and up to two small things on it."""
    thing, look = scene.new(), _wood(draw)
    wide, deep, high = draw.real(0.45, 0.8), draw.real(0.32, 0.5), draw.real(0.6, 0.78)
    right, _, back = axes = turned(draw.real(-0.5, 0.5))
    shade = (wide * 1.05, 0.06, deep * 1.05)
    scene.add(CUBE, (x, high, z), (wide, 0.03, deep), TABLE, thing, look, axes, shade=shade)
    for a, b in itertools.product((-1, 1), repeat=2):
        foot = _plus(_plus((x, high / 2, z), right, a * (wide - 0.05)), back, b * (deep - 0.05))
        scene.add(CUBE, foot, (0.03, high / 2, 0.03), TABLE, thing, look, axes)
    for place in (-0.5, 0.5):
        px, _, pz = _plus((x, 0.0, z), right, place * wide * draw.real(0.6, 1.2))
        at = (px, high + 0.03, pz)
        match draw.whole(0, 3):
            case 0:
                ball(scene, draw, *at, draw.real(0.07, 0.14))
            case 1:
                box(scene, draw, *at, draw.real(0.08, 0.15))
            case 2:
                cylinder(scene, draw, *at, draw.real(0.04, 0.08), (0.12, 0.3))


def tree(scene: Scene, draw: Draw, x: float, z: float) -> None:
    """Add a tree: a trunk and a crown of two or three ellipsoids."""
    thing, height = scene.new(), draw.real(2.2, 5.5)
    bark = draw.near((0.33, 0.24, 0.16), 0.05)
    trunk, up = 0.045 * height * draw.real(0.7, 1.2), height * 0.27
    wood = Material(NOISE, bark, darker(bark, 0.6), 0.12)
    scene.add(ROUND, (x, up, z), (trunk, up, trunk), TREE, thing, wood)
    leaf = draw.near(draw.one(*GREENS), 0.05)
    leaves, slim = Material(NOISE, leaf, darker(leaf, 0.45), 0.06 * height), draw.chance(0.3)
    for number in range(draw.whole(2, 3)):
        r = height * (draw.real(0.12, 0.18) if slim else draw.real(0.17, 0.27))
        east, south = (0, 0) if slim else (draw.real(-0.12, 0.12) * height, draw.real(-0.1, 0.1) * height)
        centre, half = (x + east, height * (0.55 + 0.14 * number), z + south), (r, height * (0.26 if slim else 0.17), r)
        scene.add(SPHERE, centre, half, TREE, thing, leaves, turned(draw.real(0, 3)), phase=draw.real())
        scene.block(centre, half, thing)


def scene(seed: int, outdoor: float, people: float) -> Scene:
    """Draw the scene of a seed: outdoors with probability `outdoor`, with people in it with probability `people`."""
    draw = Draw(seed)
    place = _place(draw) if draw.chance(outdoor) else _room(draw)
    _furnish(place, draw, draw.chance(people))
    return place


def _look(place: Scene, draw: Draw, eye: Vector, yaw: float, pitch: float) -> None:
    """Put the camera at `eye`: yaw 0 looks towards -z, a negative pitch looks down."""
    roll, c, s = draw.real(-0.04, 0.04), math.cos(yaw), math.sin(yaw)
    ahead = (-s * math.cos(pitch), math.sin(pitch), -c * math.cos(pitch))
    right = _unit(_cross(ahead, (0.0, 1.0, 0.0)))
    tilted = _plus(_plus(ORIGIN, right, math.cos(roll)), _cross(right, ahead), math.sin(roll))
    backward = (-ahead[0], -ahead[1], -ahead[2])
    place.eye, place.view = eye, (tilted, _cross(backward, tilted), backward)
    place.field_of_view = draw.real(0.95, 1.25)


def _light(place: Scene, draw: Draw, lamp: Vector, light: tuple[float, float], cold: float, warm: float) -> None:
    shift = draw.real(cold, warm)
    place.lamp, place.light, place.tint = lamp, light, (1 + shift, 1.0, 1 - shift)


def _room(draw: Draw) -> Scene:
    """Draw a room seen from one end, with windows and cupboards at its walls."""
    wide, high, deep = draw.real(1.7, 3.2), draw.real(2.4, 3.0), draw.real(2.2, 3.8)
    place = Scene(True, (wide, high, deep))
    paint = draw.one(draw.colour(0.7, 0.95, 0.25), draw.colour(0.5, 0.85, 0.45))
    accent = draw.near(darker(paint, 0.85), 0.05)
    floor = draw.one(
        _wood(draw),
        Material(TILES, tile := draw.colour(0.45, 0.85, 0.2), darker(tile, 0.65), draw.real(0.3, 0.6)),
        Material(NOISE, rug := draw.colour(0.3, 0.7, 0.4), darker(rug, 0.8), 0.05),
        Material(CHECKS, darker(tile, 1.1), darker(tile, 0.6), draw.real(0.35, 0.6)),
    )
    surfaces = [(FLOOR, floor), (CEILING, Material(PLAIN, draw.near((0.92, 0.92, 0.9), 0.04), (0.8, 0.8, 0.78), 0.5))]
    for _ in range(4):
        pattern = draw.one(PLAIN, PLAIN, PLAIN, NOISE, STRIPES, BRICKS)
        size = {PLAIN: 0.6, NOISE: 0.2, STRIPES: draw.real(0.25, 0.5), BRICKS: draw.real(0.12, 0.2)}[pattern]
        shade = 0.7 if pattern == BRICKS else 0.9
        second = draw.near(darker(paint, shade), 0.03) if pattern != PLAIN else darker(paint, 0.94)
        surfaces.append((WALL, Material(pattern, accent if draw.chance(0.2) else paint, second, size)))
    for kind, material in surfaces:
        _background(place, kind, material)

    eye = (draw.real(-0.4, 0.4) * wide, draw.real(1.05, 1.75), deep - draw.real(0.15, 0.6))
    _look(place, draw, eye, draw.real(-0.4, 0.4) + 0.35 * eye[0] / wide, draw.real(-0.3, -0.02))
    lamp = (draw.real(-0.6, 0.6) * wide, high - 0.15, draw.real(-0.5, 0.6) * deep)
    _light(place, draw, lamp, (draw.real(0.45, 0.8), draw.real(0.35, 0.55)), -0.08, 0.1)

    for wall in ("back", "left", "right"):
        if draw.chance(0.45):
            pane, half, y = place.new(), (draw.real(0.35, 0.8), draw.real(0.35, 0.6), 0.02), draw.real(1.3, 1.6)
            look = Material(PANE, draw.near((0.72, 0.85, 0.97), 0.06), draw.near((0.9, 0.88, 0.84), 0.08))
            if wall == "back":
                centre, axes = (draw.real(-0.6, 0.6) * wide, y, -deep + 0.02), IDENTITY
            else:
                sign = -1 if wall == "left" else 1
                centre, axes = (sign * (wide - 0.02), y, draw.real(-0.7, 0.3) * deep), turned(math.pi / 2)
            place.add(CUBE, centre, half, WINDOW, pane, look, axes)
    for _ in range(draw.whole(0, 2)):
        half = (draw.real(0.3, 0.6), draw.real(0.4, 1.0), draw.real(0.2, 0.3))
        centre = (draw.real(-0.8, 0.8) * (wide - half[0]), half[1], -deep + half[2])
        place.add(CUBE, centre, half, BOX, place.new(), draw.one(_wood(draw), _stuff(draw)), shade=_blocking(half))
    return place


def _background(place: Scene, kind: int, material: Material) -> None:
    place.add(SURFACE, ORIGIN, (1.0, 1.0, 1.0), kind, place.new(), material)


def _place(draw: Draw) -> Scene:
    """Draw an open place with houses, trees and a sky."""
    place = Scene(False, ORIGIN)
    grass = draw.near(draw.one((0.36, 0.48, 0.22), (0.45, 0.5, 0.28), (0.55, 0.52, 0.45), (0.5, 0.5, 0.5)), 0.05)
    ground = draw.one(
        *(Material(NOISE, grass, darker(grass, 0.7), draw.real(0.15, 0.5)) for _ in range(2)),
        Material(TILES, stone := draw.colour(0.45, 0.75, 0.15), darker(stone, 0.75), draw.real(0.5, 1.0)),
    )
    _background(place, GROUND, ground)
    grey = draw.chance(0.3)
    top = draw.near((0.62, 0.68, 0.75) if grey else (0.3, 0.52, 0.88), 0.06)
    place.sky = (top, draw.near((0.85, 0.88, 0.9), 0.04))
    _background(place, SKY, Material(PLAIN, top, place.sky[1]))

    _look(place, draw, (0.0, draw.real(1.2, 2.0), 0.0), 0.0, draw.real(-0.16, 0.0))
    around, rise = draw.real(0, 2 * math.pi), draw.real(0.55, 1.2)
    flat = math.cos(rise)
    lamp = (80 * math.cos(around) * flat, 80 * math.sin(rise), 80 * math.sin(around) * flat)
    _light(place, draw, lamp, (0.3, 0.7) if grey else (draw.real(0.6, 0.85), draw.real(0.35, 0.5)), -0.04, 0.08)

    for _ in range(draw.whole(0, 3)):
        house, half = place.new(), (draw.real(2, 5), draw.real(1.5, 5), draw.real(2, 4))
        z = -draw.real(9, 18) - half[2]
        centre = (draw.real(-0.8, 0.8) * -z * 0.7, half[1], z)
        look = Material(FACADE, draw.colour(0.5, 0.9, 0.4), draw.near((0.25, 0.32, 0.42), 0.08), draw.real(1.2, 2.2))
        axes = turned(draw.real(-0.5, 0.5))
        place.add(CUBE, centre, half, BUILDING, house, look, axes, phase=draw.real(), shade=half)
        roof = Material(TILES, red := draw.near((0.5, 0.27, 0.2), 0.1), darker(red, 0.7), 0.4)
        top, flat_top = (centre[0], 2 * half[1] + 0.12, z), (half[0] + 0.2, 0.12, half[2] + 0.2)
        place.add(CUBE, top, flat_top, BUILDING, house, roof, axes)
    for _ in range(draw.whole(1, 4)):
        z = -draw.real(5, 15)
        tree(place, draw, draw.real(-0.75, 0.75) * -z * 0.75, z)
    if draw.chance(0.4):
        z, leaf = -draw.real(7, 12), draw.near(draw.one(*GREENS), 0.05)
        axes, half = turned(draw.real(-0.2, 0.2)), (draw.real(2, 6), draw.real(0.4, 0.8), 0.35)
        centre, hedge = (draw.real(-3, 3), half[1], z), Material(NOISE, leaf, darker(leaf, 0.5), 0.25)
        place.add(CUBE, centre, half, TREE, place.new(), hedge, axes, shade=_blocking(half))
    return place


def _furnish(place: Scene, draw: Draw, people: bool) -> None:
    """Put people and things where the camera sees them, apart from each other."""
    taken: list[tuple[float, float, float]] = []
    across, backward = place.view[0], place.view[2]
    far = min(2 * place.room[2] - 0.4, 5.0) if place.indoor else 7.0

    def spot(radius: float, near: float, until: float, edge: float) -> tuple[float, float] | None:
        """Find a free place of some radius at a distance from near to until; `edge` 1 is the border of the view."""
        for _ in range(12):
            ahead = draw.real(near, max(near + 0.1, min(until, far)))
            beside = draw.real(-edge, edge) * ahead * math.tan(place.field_of_view / 2)
            x = place.eye[0] - backward[0] * ahead + across[0] * beside
            z = place.eye[2] - backward[2] * ahead + across[2] * beside
            inside = not place.indoor or (
                abs(x) < place.room[0] - radius - 0.05 and -place.room[2] + radius + 0.35 < z < place.room[2] - radius
            )
            if inside and all(math.hypot(x - a, z - b) > radius + r for a, b, r in taken):
                taken.append((x, z, radius))
                return x, z
        return None

    for number in range(draw.one(1, 1, 1, 2, 2, 3) if people else 0):
        if at := spot(0.35, 1.7, 3.2, 0.45) if number == 0 else spot(0.35, 2.0, 5.0, 0.8):
            height = draw.real(1.05, 1.4) if draw.chance(0.15) else draw.real(1.5, 1.9)
            figure(place, draw, *at, yaw=draw.real(-1.9, 1.9), height=height)
    if place.indoor and draw.chance(0.45) and (at := spot(0.75, 1.9, 4.0, 0.8)):
        table(place, draw, *at)
    for _ in range(draw.whole(1, 4) + (0 if people else 2)):
        low, high, room, near, put = THINGS[draw.whole(0, 2)]
        size = draw.real(low, high)
        if at := spot(size * room, near, 5.0, 0.9):
            put(place, draw, at[0], 0.0, at[1], size)
