"""Scenes as images with exact labels: ray casting with a z-buffer, many images at once.

Camera coordinates are x right, y up, z towards the viewer. A ray through a pixel is (u, v, -1) times its depth, so that
depth is measured along the optical axis. Each solid is intersected only with the rays of the rectangle that it covers
in its image; all such pairs of solid and ray, of all images, lie in one flat array per shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedloom.data.prepare import Array
from fedloom.data.scenes import world
from fedloom.data.scenes.world import Scene

FAR = 20.0
"""Depth ends here, in metres; what is farther has none (0)."""
NEAR = 0.05
SKY = 1e3  # ground ends here, and the sky lies behind it


class _Chunk:
    """Images rendered together: B images of P = height x width pixels, S solids in all."""

    def __init__(self, scenes: Sequence[Scene], height: int, width: int) -> None:
        self.scenes, self.height, self.width = scenes, height, width
        y, x = np.mgrid[:height, :width].astype(np.float32)
        self.u, self.v = (x + 0.5 - width / 2).ravel(), (height / 2 - y - 0.5).ravel()  # P
        half = max(height, width) / 2
        # Pixels per unit of (u, v); rows of `view` are the camera's axes in the world.
        self.focal = np.array([half / math.tan(s.field_of_view / 2) for s in scenes], np.float32)  # B
        self.view = np.array([s.view for s in scenes], np.float32)  # B x 3 x 3
        self.eye = np.array([s.eye for s in scenes], np.float32)  # B x 3
        counts = np.array([len(s.numbers) for s in scenes])
        self.owner = np.repeat(np.arange(len(scenes)), counts)  # S, the image of a solid
        self.first = np.cumsum(counts) - counts  # B, the first solid of an image
        self.numbers = np.array([row for s in scenes for row in s.numbers], np.float32)  # S x 25
        self.kinds = np.array([row for s in scenes for row in s.kinds], np.int32)  # S x 5
        self.axes = self.numbers[:, 3:12].reshape(-1, 3, 3)  # rows: a solid's axes divided by its half sizes
        # World directions of all rays, one metre deep: 3 x B x P.
        scale = np.stack([self.focal, self.focal, np.ones_like(self.focal)], 1)[:, :, None]
        right, up, back = (self.view / scale).transpose(1, 2, 0)
        self.rays = right[:, :, None] * self.u + up[:, :, None] * self.v - back[:, :, None]


def render(
    scenes: Sequence[Scene], seeds: Sequence[int], height: int, width: int, shadows: bool, noise: float
) -> dict[str, Array]:
    """Render images and raw labels of the scenes, N in all; `seeds` (N) are those of the sensor's noise.

    image: N x 3 x H x W uint8. semseg, human_parts, saliency, edge: N x H x W uint8. depth: N x H x W float16, metres,
    0 beyond 20 m and in the sky. normals: N x 3 x H x W int8, 127 times the unit vector, 0 in the sky. Depth has a
    relative precision of 0.05 %, normals one of 0.4 degrees at worst and 0.2 in the mean.
    """
    chunk = _Chunk(scenes, height, width)
    depth, solid = _background(chunk)
    _intersect(chunk, depth, solid)
    local, normal, place = _surface(chunk, depth, solid)
    shape = (len(scenes), height, width)
    semseg = chunk.kinds[:, 1][solid].astype(np.uint8).reshape(shape)
    parts = chunk.kinds[:, 2][solid].astype(np.uint8).reshape(shape)
    instance = chunk.kinds[:, 3][solid].reshape(shape)
    sky = semseg == world.SKY

    seen = np.matmul(chunk.view, normal.reshape(3, len(scenes), -1).transpose(1, 0, 2))  # in camera coordinates
    seen = seen.reshape(len(scenes), 3, height, width)
    z = depth.reshape(shape)
    colour = _shade(chunk, depth, solid, local, normal, place, shadows)
    return {
        "image": _develop(colour.reshape(seen.shape), seeds, noise),
        "semseg": semseg,
        "human_parts": parts,
        "saliency": _saliency(semseg, instance),
        "normals": np.where(sky[:, None], 0, np.rint(seen * 127)).astype(np.int8),
        "depth": np.where(sky | (z > FAR), 0, z).astype(np.float16),
        "edge": _edges(z, instance, seen, chunk),
    }


def _dot(a: Array, b: Array) -> Array:
    """Return scalar products of vectors whose three coordinates come first."""
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def _background(chunk: _Chunk) -> tuple[Array, Array]:
    """Return depth (B P) and solid (B P) of walls, floors, ground and sky."""
    depth = np.empty(chunk.rays.shape[1:], np.float32)
    solid = np.empty(depth.shape, np.int64)
    for i, scene in enumerate(chunk.scenes):
        dx, dy, dz = chunk.rays[:, i]
        ex, ey, ez = scene.eye
        if scene.indoor:
            wide, high, deep = scene.room
            with np.errstate(divide="ignore"):
                walls = ((dx, ex, wide, -wide), (dy, ey, high, 0), (dz, ez, deep, -deep))
                t = np.stack([(np.where(d > 0, far, near) - e) / d for d, e, far, near in walls])
            wall = t.argmin(0)
            depth[i] = t.min(0)
            # Solids 0..5 of a room: floor, ceiling, walls at -x, +x, -z, +z.
            number = np.choose(wall, [2 + (dx > 0), dy > 0, 4 + (dz > 0)])
        else:
            below = dy < -1e-4
            depth[i] = np.where(below, -ey / np.where(below, dy, -1), 1e4)
            number = np.where(depth[i] > 300, 1, 0)
        solid[i] = chunk.first[i] + number
    return depth.reshape(-1), solid.reshape(-1)


def _intersect(chunk: _Chunk, depth: Array, solid: Array) -> None:
    """Put all solids into the z-buffer, in place."""
    axes = chunk.axes
    view = chunk.view[chunk.owner]
    # Rays in a solid's coordinates: start + t (u a + v b - c), with a, b, c the columns of `turned`.
    turned = np.einsum("sij,skj->sik", axes, view)
    turned[:, :, :2] /= chunk.focal[chunk.owner][:, None, None]
    start = np.einsum("sij,sj->si", axes, chunk.eye[chunk.owner] - chunk.numbers[:, :3])
    left, right, top, bottom = _windows(chunk, turned, start)
    pixels = chunk.height * chunk.width
    for shape in (world.CUBE, world.SPHERE, world.ROUND, world.CAPSULE):
        these = np.flatnonzero((chunk.kinds[:, 0] == shape) & (left < right) & (top < bottom))
        if not len(these):
            continue
        wide = (right - left)[these]
        size = wide * (bottom - top)[these]
        which = np.repeat(np.arange(len(these)), size)
        inside = np.arange(len(which)) - np.repeat(np.cumsum(size) - size, size)
        row, column = np.divmod(inside, wide[which])
        ray = (row + top[these][which]) * chunk.width + column + left[these][which]
        u, v = chunk.u[ray], chunk.v[ray]
        m = turned[these].reshape(-1, 9)[which].T
        d = [m[3 * i] * u + m[3 * i + 1] * v - m[3 * i + 2] for i in range(3)]
        o = list(start[these][which].T)
        length = chunk.numbers[these, 15][which]
        t = _hit(shape, o, d, length)
        pixel = ray + (chunk.owner[these] * pixels)[which]
        good = np.flatnonzero((t > NEAR) & (t < depth[pixel]))
        t, pixel, which = t[good], pixel[good], which[good]
        np.minimum.at(depth, pixel, t)
        won = depth[pixel] == t
        solid[pixel[won]] = these[which[won]]


def _windows(chunk: _Chunk, turned: Array, start: Array) -> tuple[Array, Array, Array, Array]:
    """Return the pixels that each solid may cover: left, right, top, bottom (S each, ends excluded)."""
    # Corners of the solid's own bounding box, taken to the camera: p = inv(turned') (corner - start).
    corners = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], np.float32)
    reach = np.ones((len(start), 1, 3), np.float32)
    reach[:, 0, 1] += chunk.numbers[:, 15]
    matrix = turned.copy()
    matrix[:, :, 2] *= -1
    surface = chunk.kinds[:, 0] == world.SURFACE
    ends = np.linalg.solve(matrix[:, None], (corners * reach - start[:, None])[..., None])[..., 0]
    z = ends[:, :, 2]  # the ray's parameter, which is the depth
    behind = (z < NEAR).any(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        u, v = ends[:, :, 0] / z, ends[:, :, 1] / z
    edges = []
    for low, high, size in (
        (u.min(1) + chunk.width / 2, u.max(1) + chunk.width / 2, chunk.width),
        (chunk.height / 2 - v.max(1), chunk.height / 2 - v.min(1), chunk.height),
    ):
        low, high = np.where(behind, 0, np.floor(low)), np.where(behind, size, np.ceil(high))
        high = np.where(surface | (z < NEAR).all(1), -1, high)
        edges += [np.clip(low, 0, size).astype(np.int64), np.clip(high, 0, size).astype(np.int64)]
    return edges[0], edges[1], edges[2], edges[3]


def _hit(shape: int, o: list[Array], d: list[Array], length: Array) -> Array:
    """Return t where rays o + t d first meet the unit shape; infinite where they do not."""
    ox, oy, oz = o
    dx, dy, dz = d
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if shape == world.SPHERE:
            t = _ball(ox, oy, oz, dx, dy, dz)
        elif shape == world.CUBE:
            enter, leave = _slab(ox, dx)
            for a, b in (_slab(oy, dy), _slab(oz, dz)):
                enter, leave = np.maximum(enter, a), np.minimum(leave, b)
            t = np.where(enter <= leave, enter, np.inf)
        else:
            a = dx * dx + dz * dz
            b = ox * dx + oz * dz
            root = b * b - a * (ox * ox + oz * oz - 1)
            half = np.sqrt(np.maximum(root, 0))
            enter, leave = (-b - half) / a, (-b + half) / a
            if shape == world.ROUND:
                low, high = _slab(oy, dy)
                enter, leave = np.maximum(enter, low), np.minimum(leave, high)
                t = np.where((root > 0) & (enter <= leave), enter, np.inf)
            else:
                y = oy + enter * dy
                side = (root > 0) & (np.abs(y) <= length)
                # What misses the tube between the ends can only meet the ball at an end. A ray that misses the endless
                # tube misses the balls too.
                cap = np.where(y > 0, length, -length)
                t = np.where(side, enter, np.where(root > 0, _ball(ox, oy - cap, oz, dx, dy, dz), np.inf))
    return t


def _ball(ox: Array, oy: Array, oz: Array, dx: Array, dy: Array, dz: Array) -> Array:
    a = dx * dx + dy * dy + dz * dz
    b = ox * dx + oy * dy + oz * dz
    root = b * b - a * (ox * ox + oy * oy + oz * oz - 1)
    return np.where(root > 0, (-b - np.sqrt(np.maximum(root, 0))) / a, np.inf)


def _slab(o: Array, d: Array) -> tuple[Array, Array]:
    """Return t where rays enter and leave |x| <= 1."""
    inverse = 1 / np.where(d == 0, np.float32(1e-12), d)
    near, far = (-1 - o) * inverse, (1 - o) * inverse
    return np.minimum(near, far), np.maximum(near, far)


def _surface(chunk: _Chunk, depth: Array, solid: Array) -> tuple[Array, Array, Array]:
    """Return per pixel: the point in the solid's coordinates, the unit normal and the point in the world (3 x B P)."""
    place = (chunk.eye.T[:, :, None] + depth.reshape(len(chunk.scenes), -1) * chunk.rays).reshape(3, -1)
    m = chunk.axes.reshape(-1, 9).T[:, solid]
    p = place - chunk.numbers[:, :3].T[:, solid]
    local = np.stack([_dot(m[3 * i : 3 * i + 3], p) for i in range(3)])
    shape = chunk.kinds[:, 0][solid]
    n = local.copy()
    size = np.abs(local)
    cube = shape == world.CUBE
    largest = size.argmax(0)
    for i in range(3):
        n[i] *= ~cube | (largest == i)
    tube = shape == world.ROUND
    end = tube & (size[1] > np.hypot(local[0], local[2]))
    n[0] *= ~end
    n[2] *= ~end
    n[1] *= ~tube | end
    capsule = shape == world.CAPSULE
    length = chunk.numbers[:, 15][solid]
    n[1] -= capsule * np.clip(local[1], -length, length)
    normal = np.stack([_dot(m[i::3], n) for i in range(3)])
    for i, scene in enumerate(chunk.scenes):
        # Surfaces of the background, in the order of their solids.
        inner = (
            [(0, 1, 0), (0, -1, 0), (1, 0, 0), (-1, 0, 0), (0, 0, 1), (0, 0, -1)] if scene.indoor else [(0, 1, 0)] * 2
        )
        pixels = slice(i * len(chunk.u), (i + 1) * len(chunk.u))
        number = solid[pixels] - chunk.first[i]
        behind = number < len(inner)
        normal[:, pixels][:, behind] = np.array(inner, np.float32)[number[behind]].T
    normal /= np.sqrt(_dot(normal, normal))
    return local, normal, place


def _noise(p: Array, q: Array, salt: Array) -> Array:
    """Return smooth noise in 0..1 of two coordinates, with a period of about one."""
    i, j = np.floor(p), np.floor(q)
    a, b = p - i, q - j
    a, b = a * a * (3 - 2 * a), b * b * (3 - 2 * b)
    x, y = i.astype(np.int64), j.astype(np.int64)
    top = _hash(x, y, salt) * (1 - a) + _hash(x + 1, y, salt) * a
    return top * (1 - b) + (_hash(x, y + 1, salt) * (1 - a) + _hash(x + 1, y + 1, salt) * a) * b


def _hash(x: Array, y: Array, salt: Array) -> Array:
    """Return a number in 0..1 for each cell (float32)."""
    n: Array = (x.astype(np.uint32) * np.uint32(374761393)) ^ (y.astype(np.uint32) * np.uint32(668265263)) ^ salt
    n = (n ^ (n >> np.uint32(13))) * np.uint32(1274126177)
    return ((n ^ (n >> np.uint32(16))) & np.uint32(0xFFFF)).astype(np.float32) / np.float32(65535)


def _pattern(kind: int, p: Array, q: Array, local: Array, salt: Array) -> Array:
    """Return the share (0..1) of the second colour at (p, q), in units of the pattern's size."""
    if kind == world.PLAIN:
        return 0.3 * _noise(p * 2, q * 2, salt)
    if kind == world.TILES:
        gap = (np.mod(p, 1) < 0.06) | (np.mod(q, 1) < 0.06)
        return np.where(gap, 1, 0.35 * _hash(np.floor(p).astype(np.int64), np.floor(q).astype(np.int64), salt))
    if kind == world.PLANKS:
        row = np.floor(q).astype(np.int64)
        board = np.floor(p / 7 + 5 * _hash(row, row, salt)).astype(np.int64)
        grain = 0.55 * _hash(row, board, salt) + 0.35 * _noise(p, q * 9, salt)
        return np.where(np.mod(q, 1) < 0.07, 1, grain)
    if kind == world.BRICKS:
        row = np.floor(q).astype(np.int64)
        along = p / 2.2 + 0.5 * (row % 2)
        gap = (np.mod(along, 1) < 0.05) | (np.mod(q, 1) < 0.1)
        return np.where(gap, 1, 0.4 * _hash(np.floor(along).astype(np.int64), row, salt))
    if kind == world.NOISE:
        return 0.6 * _noise(p, q, salt) + 0.4 * _noise(p * 2.9, q * 2.9, salt)
    if kind == world.STRIPES:
        return np.where(np.mod(q, 1) < 0.5, 1, 0)
    if kind == world.CHECKS:
        return np.mod(np.floor(p) + np.floor(q), 2)
    if kind == world.HAIR:
        return np.where((local[1] > 0.45) | (local[2] < -0.15 - 0.4 * local[1]), 1, 0.1 * _noise(p, q, salt))
    if kind == world.FACADE:
        x, y = np.mod(p, 1), np.mod(q, 1)
        pane = (x > 0.22) & (x < 0.78) & (y > 0.25) & (y < 0.8)
        shade = 0.7 + 0.3 * _hash(np.floor(p).astype(np.int64), np.floor(q).astype(np.int64), salt)
        return np.where(pane, shade, 0.06 * _noise(p * 5, q * 5, salt))
    x, y = np.abs(local[0]), np.abs(local[1])  # a window's pane between its bars
    return np.where((x > 0.88) | (y > 0.88) | (x < 0.05) | (y < 0.05), 1, 0)


MEAN = {world.PLAIN: 0.15, world.STRIPES: 0.5, world.CHECKS: 0.5, world.NOISE: 0.5}


def _albedo(chunk: _Chunk, depth: Array, solid: Array, local: Array, normal: Array, place: Array) -> Array:
    """Return colours of the surfaces (3 x B P), before any light."""
    pattern = chunk.kinds[:, 4][solid]
    surface = chunk.kinds[:, 0][solid] == world.SURFACE
    metric = np.where(surface, place, local * chunk.numbers[:, 12:15].T[:, solid])
    # A pattern lies on the two axes that the surface follows best.
    m = (chunk.axes * chunk.numbers[:, 12:15, None]).reshape(-1, 9).T[:, solid]
    own = np.stack([_dot(m[3 * i : 3 * i + 3], normal) for i in range(3)])  # along a solid's axes, unscaled
    axis = np.abs(np.where(surface, normal, own)).argmax(0)
    p = np.where(axis == 0, metric[2], metric[0])
    q = np.where(axis == 1, metric[2], metric[1])
    size = chunk.numbers[:, 22][solid]
    phase = 7 * chunk.numbers[:, 23][solid]
    p, q = p / size + phase, q / size + phase
    salt = (np.arange(len(chunk.owner)) - chunk.first[chunk.owner] + 1).astype(np.uint32)[solid]
    mix = np.zeros(len(solid), np.float32)
    # What is finer than a pixel fades into its mean, or distant floors would flicker.
    pixel = (depth.reshape(len(chunk.scenes), -1) / chunk.focal[:, None]).reshape(-1)
    fade = np.clip(1.6 - 2.5 * pixel / size, 0, 1)
    for kind in range(10):
        these = np.flatnonzero(pattern == kind)
        if not len(these):
            continue
        share = _pattern(kind, p[these], q[these], local[:, these], salt[these])
        if kind in (world.PANE, world.HAIR):
            mix[these] = share
        else:
            mean = MEAN.get(kind, 0.3)
            mix[these] = mean + (share - mean) * fade[these]
    first, second = chunk.numbers[:, 16:19].T, chunk.numbers[:, 19:22].T
    return first[:, solid] + (second - first)[:, solid] * mix


def _shade(
    chunk: _Chunk, depth: Array, solid: Array, local: Array, normal: Array, place: Array, shadows: bool
) -> Array:
    """Return colours as light makes them (B x 3 x P, about 0..1)."""
    albedo = _albedo(chunk, depth, solid, local, normal, place)
    out = np.empty((len(chunk.scenes), 3, len(chunk.u)), np.float32)
    glosses, kinds = chunk.numbers[:, 24][solid], chunk.kinds[:, 1][solid]
    for i, scene in enumerate(chunk.scenes):
        pixels = slice(i * len(chunk.u), (i + 1) * len(chunk.u))
        n, at, d, kind = normal[:, pixels], place[:, pixels], chunk.rays[:, i], kinds[pixels]
        to = np.array(scene.lamp, np.float32)[:, None] - at
        distance = np.sqrt(_dot(to, to))
        facing = np.maximum(_dot(n, to) / distance, 0)
        seen = _lit(chunk, i, solid[pixels], at, to) if shadows else np.ones(len(kind), np.float32)
        strong, around = scene.light
        if scene.indoor:
            facing = facing * np.minimum(2.5, 10 / (2 + distance * distance)) + 0.15
        light = around * (0.82 + 0.18 * n[1])
        if scene.indoor:
            wide, high, deep = scene.room
            corner = np.float32(1)
            for gap in (at[1], high - at[1], wide - np.abs(at[0]), deep - np.abs(at[2])):
                corner = corner * (1 - 0.22 * np.exp(-np.abs(gap) / 0.22))
            # A surface has one gap of zero to itself, which must not darken it.
            light = light * corner / np.where(kind <= world.CEILING, 0.78, 1)
        light = light + strong * facing * seen
        colour = albedo[:, pixels] * light * np.array(scene.tint, np.float32)[:, None]
        gloss = glosses[pixels]
        shiny = np.flatnonzero(gloss)
        if len(shiny):
            away = d[:, shiny]
            half = to[:, shiny] / distance[shiny] - away / np.sqrt(_dot(away, away))
            half /= np.sqrt(_dot(half, half))
            spot = np.maximum(_dot(n[:, shiny], half), 0) ** 40 * gloss[shiny]
            colour[:, shiny] += spot * seen[shiny]
        if scene.indoor:
            bright = np.flatnonzero(kind == world.WINDOW)
            colour[:, bright] = albedo[:, pixels][:, bright] * (1.0 + 0.1 * local[:, pixels][1, bright])
        else:
            colour = _outside(scene, colour, d, depth[pixels], kind)
        out[i] = colour
    return out


def _outside(scene: Scene, colour: Array, d: Array, depth: Array, kind: Array) -> Array:
    """Add haze in the distance, and a sky with clouds, to colours (3 x P)."""
    top, low = (np.array(c, np.float32)[:, None] for c in scene.sky)
    haze = 1 - np.exp(-np.maximum(depth - 4, 0) / 60)
    colour = colour + (low - colour) * haze
    sky = np.flatnonzero(kind == world.SKY)
    away = d[:, sky]
    rise = away[1] / np.sqrt(_dot(away, away))
    flat = np.maximum(rise, 0.03)
    salt = np.full(len(sky), int(1e6 * scene.field_of_view) & 0xFFFF, np.uint32)
    p, q = away[0] / flat * 0.9, away[2] / flat * 0.9
    cloud = np.clip(2.2 * (0.6 * _noise(p, q, salt) + 0.4 * _noise(p * 2.3, q * 2.3, salt)) - 1.05, 0, 0.8)
    air = low + (top - low) * np.clip(rise * 2.2, 0, 1)
    colour[:, sky] = air + (np.float32(0.96) - air) * (cloud * np.clip(rise * 5, 0, 1))
    return colour


def _lit(chunk: _Chunk, image: int, solid: Array, at: Array, to: Array) -> Array:
    """Return the share of the lamp that each point (P) sees: ellipsoids stand for the solids, with a soft rim."""
    free = np.ones(len(solid), np.float32)
    instance = chunk.kinds[:, 3][solid]
    lamp = np.array(chunk.scenes[image].lamp, np.float32)
    for row in chunk.scenes[image].blockers:
        m = np.array(row[3:12], np.float32).reshape(3, 3)
        centre = np.array(row[:3], np.float32)
        p = m @ at - (m @ centre)[:, None]
        d = (m @ lamp - m @ centre)[:, None] - p
        square = _dot(d, d)
        along = -_dot(p, d) / square
        # |p + along d|^2, the square of the distance at which the ray passes the centre
        away = np.sqrt(np.maximum(_dot(p, p) - along * along * square, 0))
        soft = np.clip((away - 0.75) / 0.4, 0.25, 1)
        free *= np.where((along > 0.002) & (along < 1) & (instance != int(row[12])), soft, 1)
    return free


def _develop(colour: Array, seeds: Sequence[int], noise: float) -> Array:
    """Return colours (N x 3 x H x W) as a camera's 8 bits: a slightly soft lens, a curve, noise."""
    for axis in (2, 3):
        size = colour.shape[axis]
        before = np.take(colour, np.maximum(np.arange(size) - 1, 0), axis)
        after = np.take(colour, np.minimum(np.arange(size) + 1, size - 1), axis)
        colour = 0.8 * colour + 0.1 * (before + after)
    bright = np.flatnonzero(colour > 0.7)
    flat = colour.reshape(-1)
    flat[bright] = 1 - 0.3 * np.exp(-(flat[bright] - 0.7) / 0.3)
    # The square root of x and x in equal parts: close to a power of 0.8, and faster.
    colour = 0.6 * colour + 0.4 * np.sqrt(np.maximum(colour, 0))
    if noise > 0:
        for picture, seed in zip(colour, seeds, strict=True):
            picture += noise * np.random.default_rng(seed).standard_normal(picture.shape, np.float32)
    return np.rint(np.clip(colour, 0, 1) * 255).astype(np.uint8)


def _edges(z: Array, instance: Array, normal: Array, chunk: _Chunk) -> Array:
    """Return boundaries (N x H x W, 0 or 1), one pixel wide, on the nearer side. Between two pixels there is one where
    the instances differ, or where neither surface, continued as a plane, comes near the other's depth."""
    edge = np.zeros(z.shape, np.uint8)
    focal = chunk.focal[:, None, None]
    u = chunk.u.reshape(1, chunk.height, chunk.width) / focal
    v = chunk.v.reshape(1, chunk.height, chunk.width) / focal
    for a, b in ((np.s_[:, :-1], np.s_[:, 1:]), (np.s_[:, :, :-1], np.s_[:, :, 1:])):
        ahead, back = _continued(z, normal, u, v, a, b), _continued(z, normal, u, v, b, a)
        gap = np.minimum(np.abs(ahead - z[b]), np.abs(back - z[a]))
        jump = (gap > 0.05 + 0.02 * np.minimum(z[a], z[b])) & (z[a] < SKY)
        between = (instance[a] != instance[b]) | jump
        nearer = z[a] <= z[b]
        edge[a] |= between & nearer
        edge[b] |= between & ~nearer
    return edge


def _continued(z: Array, normal: Array, u: Array, v: Array, a: tuple[slice, ...], b: tuple[slice, ...]) -> Array:
    """Return the depth at pixels `b` of the planes that touch the surfaces at their neighbours `a`."""
    n = normal.swapaxes(0, 1)
    n = n[(slice(None), *a)]
    here = n[0] * u[a] + n[1] * v[a] - n[2]
    there = n[0] * u[b] + n[1] * v[b] - n[2]
    with np.errstate(divide="ignore", invalid="ignore"):
        depth = z[a] * here / there
    return np.where(np.isfinite(depth), depth, np.inf)


# How much a class draws the eye, per pixel; what is not named does not.
DRAW = np.zeros(len(world.CLASSES), np.float32)
DRAW[[world.PERSON, world.BALL, world.BOX, world.CYLINDER, world.TABLE, world.TREE]] = 3, 1.2, 1, 1, 0.8, 0.02


def _saliency(semseg: Array, instance: Array) -> Array:
    """Return the most salient object (N x H x W, 0 or 1): large, central, people first; and people like it."""
    n, height, width = semseg.shape
    y, x = np.mgrid[:height, :width]
    centre = np.exp(-2 * (((x + 0.5) / width - 0.5) ** 2 + ((y + 0.5) / height - 0.5) ** 2) / 0.5).astype(np.float32)
    many = int(instance.max()) + 1
    number = (instance + many * np.arange(n)[:, None, None]).reshape(-1)
    weight = (DRAW[semseg] * centre).reshape(-1)
    score = np.bincount(number, weight, n * many).reshape(n, many)
    person = np.bincount(number, (semseg == world.PERSON).reshape(-1), n * many).reshape(n, many) > 0
    best = score.max(1, keepdims=True)
    chosen = (score == best) | (person & (score > 0.5 * best))
    return (chosen & (score > 0)).reshape(-1)[number].reshape(semseg.shape).astype(np.uint8)
