"""Draws a scene of the demo world with pillow: what a star, a house or a meadow looks like.

It knows shapes and pixels, and nothing of words in a prompt or of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

from PIL import Image, ImageDraw

from accel.pipelines.demo.scene import Background, Scene
from accel.pipelines.demo.vocabulary import RGB, shade_of

Point = tuple[float, float]
OVERSAMPLING = 3
"""Scenes are drawn this many times larger and averaged down: edges come out smooth."""

COLOUR_JITTER = 4
"""A drawn colour differs from its named one by at most this many levels a channel."""


class Canvas:
    """A square picture addressed in units of its side."""

    def __init__(self, side: int, colour: RGB) -> None:
        self.side = side
        self.image = Image.new("RGB", (side, side), colour)
        self._draw = ImageDraw.Draw(self.image)

    def polygon(self, points: Sequence[Point], colour: RGB) -> None:
        """Fills the polygon through `points`."""
        self._draw.polygon([(x * self.side, y * self.side) for x, y in points], fill=colour)

    def ellipse(self, x: float, y: float, across: float, down: float, colour: RGB) -> None:
        """Fills the ellipse around (x, y) with half axes `across` and `down`."""
        self._draw.ellipse(self._box(x, y, across, down), fill=colour)

    def hoop(self, x: float, y: float, radius: float, width: float, colour: RGB) -> None:
        """Draws a circle's outline, `width` thick, inwards; what is inside stays."""
        pixels = max(1, round(width * self.side))
        self._draw.ellipse(self._box(x, y, radius, radius), outline=colour, width=pixels)

    def rectangle(self, left: float, top: float, right: float, bottom: float, colour: RGB) -> None:
        """Fills the rectangle between the two corners."""
        edges = [value * self.side for value in (left, top, right, bottom)]
        self._draw.rectangle((edges[0], edges[1], edges[2] - 1, edges[3] - 1), fill=colour)

    def _box(self, x: float, y: float, across: float, down: float) -> tuple[float, ...]:
        corners = (x - across, y - down, x + across, y + down)
        return tuple(value * self.side for value in corners)


Painter = Callable[[Canvas, float, float, float, RGB], None]


def draw_scene(scene: Scene, side: int, rng: Random) -> Image.Image:
    """The scene as an RGB picture of `side` by `side` pixels; `rng` varies colours a little."""
    canvas = _draw_background(scene.background, side * OVERSAMPLING, rng)
    # A frame is drawn before what is inside it.
    groups = reversed(scene.groups) if scene.relation == "inside" else scene.groups
    for group in groups:
        colour = _jittered(group.colour, rng)
        for x, y, radius in group.spots:
            PAINTERS[group.noun](canvas, x, y, radius, colour)
    return canvas.image.reduce(OVERSAMPLING)


def _jittered(colour: str, rng: Random) -> RGB:
    red, green, blue = (
        min(255, max(0, value + rng.randint(-COLOUR_JITTER, COLOUR_JITTER)))
        for value in shade_of(colour)
    )
    return red, green, blue


def _draw_background(background: Background, side: int, rng: Random) -> Canvas:
    if background.kind in LANDSCAPE_PAINTERS:
        return LANDSCAPE_PAINTERS[background.kind](side, rng)
    colours = [_jittered(colour, rng) for colour in background.colours]
    canvas = Canvas(side, colours[0])
    if background.kind == "gradient":
        ramp = Image.linear_gradient("L").resize((side, side))
        canvas.image.paste(Image.new("RGB", (side, side), colours[1]), mask=ramp)
    if background.kind == "stripes":
        upright = rng.random() < 0.5
        for index in range(1, 8, 2):
            low, high = index / 8, (index + 1) / 8
            area = (low, 0.0, high, 1.0) if upright else (0.0, low, 1.0, high)
            canvas.rectangle(*area, colours[1])
    return canvas


def _meadow(side: int, rng: Random) -> Canvas:
    canvas = Canvas(side, (140, 208, 250))
    canvas.ellipse(rng.uniform(0.2, 0.8), 2.15, 2.4, 1.5, (92, 182, 74))
    return canvas


def _night(side: int, rng: Random) -> Canvas:
    canvas = Canvas(side, (22, 28, 72))
    for _ in range(14):
        canvas.ellipse(rng.random(), rng.uniform(0.02, 0.6), 0.008, 0.008, (240, 240, 225))
    canvas.rectangle(0, 0.78, 1, 1, (16, 44, 44))
    return canvas


def _beach(side: int, rng: Random) -> Canvas:
    canvas = Canvas(side, (145, 212, 250))
    canvas.rectangle(0, 0.46, 1, 1, (38, 130, 200))
    canvas.ellipse(rng.uniform(0.3, 0.7), 1.75, 2.2, 1.1, (240, 214, 150))
    return canvas


def _sea(side: int, rng: Random) -> Canvas:
    canvas = Canvas(side, (145, 212, 250))
    canvas.rectangle(0, rng.uniform(0.6, 0.64), 1, 1, (32, 118, 192))
    return canvas


LANDSCAPE_PAINTERS: dict[str, Callable[[int, Random], Canvas]] = {
    "meadow": _meadow,
    "night": _night,
    "beach": _beach,
    "sea": _sea,
}


def _regular(corners: int, inner: float = 1.0, turn: float = -90.0) -> tuple[Point, ...]:
    """A regular polygon, or a star: `inner` is the radius of every second corner."""
    angles = [math.radians(turn + 360 * index / corners) for index in range(corners)]
    radii = [1.0 if index % 2 == 0 else inner for index in range(corners)]
    return tuple((r * math.cos(a), r * math.sin(a)) for r, a in zip(radii, angles, strict=True))


def _heart_outline() -> tuple[Point, ...]:
    steps = [math.tau * index / 72 for index in range(72)]
    return tuple(
        (
            math.sin(t) ** 3,
            -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 16
            - 0.12,
        )
        for t in steps
    )


def _moon_outline() -> tuple[Point, ...]:
    """A disc less a smaller disc shifted to its right."""
    outer = [math.radians(angle) for angle in range(48, 313, 4)]
    tip_x, tip_y = math.cos(outer[0]), math.sin(outer[0])
    centre = 0.5
    radius = math.hypot(tip_x - centre, tip_y)
    start = math.atan2(tip_y, tip_x - centre)
    inner = [start + (math.tau - 2 * start) * index / 60 for index in range(60, -1, -1)]
    far = [(math.cos(a) + 0.15, math.sin(a)) for a in outer]
    near = [(centre + radius * math.cos(a) + 0.15, radius * math.sin(a)) for a in inner]
    return tuple(far + near)


_ARM = 0.34
OUTLINES: dict[str, tuple[Point, ...]] = {
    "square": ((-0.86, -0.86), (0.86, -0.86), (0.86, 0.86), (-0.86, 0.86)),
    "rectangle": ((-1.05, -0.55), (1.05, -0.55), (1.05, 0.55), (-1.05, 0.55)),
    "triangle": ((0.0, -0.92), (1.0, 0.78), (-1.0, 0.78)),
    "diamond": ((0.0, -1.05), (0.72, 0.0), (0.0, 1.05), (-0.72, 0.0)),
    "star": _regular(10, inner=0.42),
    "hexagon": _regular(6, turn=0.0),
    "cross": tuple(
        (x * side, y * side)
        for side in (1.0,)
        for x, y in (
            (-_ARM, -1), (_ARM, -1), (_ARM, -_ARM), (1, -_ARM), (1, _ARM), (_ARM, _ARM),
            (_ARM, 1), (-_ARM, 1), (-_ARM, _ARM), (-1, _ARM), (-1, -_ARM), (-_ARM, -_ARM),
        )
    ),
    "heart": _heart_outline(),
    "moon": _moon_outline(),
}  # fmt: skip


def _outlined(noun: str) -> Painter:
    def paint(canvas: Canvas, x: float, y: float, radius: float, colour: RGB) -> None:
        canvas.polygon([(x + radius * dx, y + radius * dy) for dx, dy in OUTLINES[noun]], colour)

    return paint


def _circle(canvas: Canvas, x: float, y: float, radius: float, colour: RGB) -> None:
    canvas.ellipse(x, y, radius, radius, colour)


def _oval(canvas: Canvas, x: float, y: float, radius: float, colour: RGB) -> None:
    canvas.ellipse(x, y, radius * 1.1, radius * 0.66, colour)


def _ring(canvas: Canvas, x: float, y: float, radius: float, colour: RGB) -> None:
    canvas.hoop(x, y, radius, radius * 0.34, colour)


def _house(canvas: Canvas, x: float, y: float, radius: float, colour: RGB) -> None:
    roof = ((x - radius, y - 0.15 * radius), (x, y - radius), (x + radius, y - 0.15 * radius))
    canvas.rectangle(x - 0.75 * radius, y - 0.2 * radius, x + 0.75 * radius, y + radius, colour)
    canvas.polygon(roof, _darker(colour))
    canvas.rectangle(x - 0.5 * radius, y + 0.3 * radius, x - 0.1 * radius, y + radius, (96, 58, 34))
    window = (x + 0.12 * radius, y + 0.2 * radius, x + 0.52 * radius, y + 0.6 * radius)
    canvas.rectangle(*window, (252, 238, 165))


def _tree(canvas: Canvas, x: float, y: float, radius: float, colour: RGB) -> None:
    canvas.rectangle(x - 0.14 * radius, y, x + 0.14 * radius, y + radius, (110, 70, 40))
    for dx, dy, size in ((-0.36, -0.1, 0.45), (0.36, -0.1, 0.45), (0.0, -0.5, 0.5)):
        canvas.ellipse(x + dx * radius, y + dy * radius, size * radius, size * radius, colour)


def _flower(canvas: Canvas, x: float, y: float, radius: float, colour: RGB) -> None:
    canvas.rectangle(x - 0.06 * radius, y, x + 0.06 * radius, y + radius, (50, 140, 60))
    top = y - 0.35 * radius
    for dx, dy in _regular(6):
        petal = 0.27 * radius
        canvas.ellipse(x + 0.38 * radius * dx, top + 0.38 * radius * dy, petal, petal, colour)
    heart = (120, 70, 30) if colour[0] > 200 and colour[1] > 180 else (250, 210, 60)
    canvas.ellipse(x, top, 0.24 * radius, 0.24 * radius, heart)


def _sun(canvas: Canvas, x: float, y: float, radius: float, colour: RGB) -> None:
    rays = _regular(24, inner=0.68)
    canvas.polygon([(x + radius * dx, y + radius * dy) for dx, dy in rays], colour)


def _cloud(canvas: Canvas, x: float, y: float, radius: float, colour: RGB) -> None:
    for dx, dy, across in (
        (-0.6, 0.12, 0.42),
        (0.6, 0.12, 0.42),
        (-0.15, -0.15, 0.5),
        (0.3, 0, 0.45),
    ):
        canvas.ellipse(x + dx * radius, y + dy * radius, across * radius, across * radius, colour)
    canvas.rectangle(
        x - 0.6 * radius, y + 0.1 * radius, x + 0.6 * radius, y + 0.54 * radius, colour
    )


def _boat(canvas: Canvas, x: float, y: float, radius: float, colour: RGB) -> None:
    hull = ((-1.0, 0.3), (1.0, 0.3), (0.65, 0.85), (-0.65, 0.85))
    canvas.polygon([(x + radius * dx, y + radius * dy) for dx, dy in hull], colour)
    canvas.rectangle(
        x - 0.05 * radius, y - radius, x + 0.05 * radius, y + 0.3 * radius, (80, 55, 40)
    )
    sail = ((0.1, -0.95), (0.85, 0.15), (0.1, 0.15))
    canvas.polygon([(x + radius * dx, y + radius * dy) for dx, dy in sail], (246, 244, 236))


def _fish(canvas: Canvas, x: float, y: float, radius: float, colour: RGB) -> None:
    canvas.ellipse(x - 0.15 * radius, y, 0.8 * radius, 0.5 * radius, colour)
    tail = ((0.45, 0.0), (1.05, -0.5), (1.05, 0.5))
    canvas.polygon([(x + radius * dx, y + radius * dy) for dx, dy in tail], colour)
    canvas.ellipse(
        x - 0.55 * radius, y - 0.12 * radius, 0.12 * radius, 0.12 * radius, (255, 255, 255)
    )
    canvas.ellipse(x - 0.57 * radius, y - 0.12 * radius, 0.06 * radius, 0.06 * radius, (15, 15, 15))


def _darker(colour: RGB) -> RGB:
    red, green, blue = (value * 6 // 10 for value in colour)
    return red, green, blue


PAINTERS: dict[str, Painter] = {
    **{noun: _outlined(noun) for noun in OUTLINES},
    "circle": _circle,
    "oval": _oval,
    "ring": _ring,
    "house": _house,
    "tree": _tree,
    "flower": _flower,
    "sun": _sun,
    "cloud": _cloud,
    "boat": _boat,
    "fish": _fish,
}
