"""What a scene of the demo world is, and how a random one is composed.

A scene says which things stand where on which background, in units of the picture's side (x to
the right, y down, 0 to 1). It knows nothing of pixels (`drawing`) and nothing of sentences
(`captions`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random

from accel.pipelines.demo.vocabulary import (
    COLOURS,
    LANDSCAPES,
    PICTURES,
    PLACES,
    SHADED,
    SHADES,
    SHAPES,
    USUAL_COLOUR,
    shade_of,
)

Spot = tuple[float, float, float]
"""x, y and radius of one thing."""


@dataclass(frozen=True)
class Group:
    """One or more equal things: `spots` says where each stands, the rest how they are spoken of."""

    noun: str
    colour: str
    spots: tuple[Spot, ...]
    size: str | None = None
    place: str | None = None
    arrangement: str | None = None

    @property
    def count(self) -> int:
        return len(self.spots)


@dataclass(frozen=True)
class Background:
    """`kind` is "plain", "gradient", "stripes" or a landscape; `silent` ones go unmentioned."""

    kind: str
    colours: tuple[str, ...] = ()
    silent: bool = False


@dataclass(frozen=True)
class Scene:
    """Groups on a background; `relation` is where the first is, seen from the second."""

    background: Background
    groups: tuple[Group, ...]
    relation: str | None = None


PLACE_CENTRES = {
    "left": (0.24, 0.5),
    "right": (0.76, 0.5),
    "top": (0.5, 0.24),
    "bottom": (0.5, 0.76),
    "centre": (0.5, 0.5),
    "top left": (0.24, 0.24),
    "top right": (0.76, 0.24),
    "bottom left": (0.24, 0.76),
    "bottom right": (0.76, 0.76),
}
SIZE_FACTORS = {None: 1.0, "small": 0.58, "big": 1.42}
PAIR_COUNTS = ((1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (2, 3), (3, 2), (3, 3))
HARD_SHAPES = ("star", "heart", "cross", "hexagon", "moon")
"""Shapes whose small drawings are easily taken for others."""

FRAMES = ("circle", "square", "heart", "hexagon", "ring")


def random_scene(rng: Random) -> Scene:
    """A scene of a random kind, kinds that are hard to learn being frequent."""
    composers = {
        _single: 8,
        _placed: 12,
        _several: 18,
        _pair: 32,
        _placed_pair: 9,
        _trio: 11,
        _nested: 4,
        _landscape: 6,
    }
    compose = rng.choices(list(composers), weights=list(composers.values()))[0]
    return compose(rng)


def _single(rng: Random) -> Scene:
    background = _background(rng)
    size = _size(rng)
    noun = _noun(rng)
    spot = _spot(rng, 0.5, 0.5, 0.25 * SIZE_FACTORS[size], wobble=0.04)
    return Scene(background, (Group(noun, _colour(rng, background, noun=noun), (spot,), size),))


def _placed(rng: Random) -> Scene:
    background = _background(rng)
    return Scene(background, (_placed_group(rng, background, rng.choice(list(PLACES)), ()),))


def _placed_pair(rng: Random) -> Scene:
    background = _background(rng, plain=True)
    first_place, second_place = rng.choice(
        [
            ("left", "right"),
            ("top", "bottom"),
            ("top left", "bottom right"),
            ("top right", "bottom left"),
            ("top left", "top right"),
            ("bottom left", "bottom right"),
            ("centre", "top left"),
            ("centre", "bottom right"),
        ]
    )
    first = _placed_group(rng, background, first_place, ())
    return Scene(background, (first, _placed_group(rng, background, second_place, (first.colour,))))


def _placed_group(rng: Random, background: Background, place: str, taken: Sequence[str]) -> Group:
    noun, size = _noun(rng), _size(rng)
    x, y = PLACE_CENTRES[place]
    spot = _spot(rng, x, y, min(0.15 * SIZE_FACTORS[size], 0.2), wobble=0.025)
    return Group(noun, _colour(rng, background, taken, noun), (spot,), size, place)


def _several(rng: Random) -> Scene:
    background = _background(rng)
    count = rng.choices((2, 3, 4), weights=(3, 4, 4))[0]
    arrangement = rng.choices((None, "row", "column"), weights=(6, 2, 1))[0]
    noun, size = _noun(rng), rng.choices((None, "small", "big"), weights=(8, 1, 1))[0]
    centres, radius = _layout(rng, count, arrangement)
    # However big, neighbours stay apart: two ovals that touch are one thing.
    room = 0.39 * min(math.dist(one, other) for one, other in combinations(centres, 2))
    radius = min(room, radius * {None: 1.0, "small": 0.68, "big": 1.2}[size])
    spots = tuple(_spot(rng, x, y, radius, wobble=0.015) for x, y in centres)
    colour = _colour(rng, background, noun=noun)
    return Scene(background, (Group(noun, colour, spots, size, arrangement=arrangement),))


def _layout(
    rng: Random, count: int, arrangement: str | None
) -> tuple[list[tuple[float, float]], float]:
    """Centres of `count` things, and the radius they may have."""
    line = [(index + 0.5) / count for index in range(count)]
    stretched = [0.5 + (value - 0.5) * 0.96 for value in line]
    row = [(value, 0.5) for value in stretched]
    if arrangement == "column":
        return [(y, x) for x, y in row], min(0.36 / count, 0.17)
    if arrangement == "row" or count == 2 or rng.random() < 0.4:
        return row, min(0.36 / count, 0.17)
    if count == 3:
        return [(0.5, 0.27), (0.27, 0.71), (0.73, 0.71)], 0.155
    return [(x, y) for y in (0.28, 0.72) for x in (0.28, 0.72)], 0.155


def _pair(rng: Random) -> Scene:
    background = _background(rng)
    relation = rng.choices(
        ("left", "right", "above", "below", "beside", None), weights=(3, 3, 3, 3, 2, 4)
    )[0]
    counts = (1, 1) if rng.random() < 0.6 else rng.choice(PAIR_COUNTS)
    vertical = relation in ("above", "below")
    # What comes first in reading order stands left or on top, unless the relation says otherwise.
    first_side = {"right": 0.73, "below": 0.73}.get(relation or "", 0.27)
    if relation == "beside":
        first_side = rng.choice((0.27, 0.73))
    first = _side_group(rng, background, counts[0], first_side, vertical, ())
    second = _side_group(rng, background, counts[1], 1 - first_side, vertical, (first.colour,))
    return Scene(background, (first, second), relation)


def _side_group(
    rng: Random,
    background: Background,
    count: int,
    side: float,
    vertical: bool,
    taken: Sequence[str],
) -> Group:
    """A group on one side of the picture: across the middle axis, its things in a line along it."""
    noun = _noun(rng)
    size = _size(rng) if count == 1 else None
    along = {1: [0.5], 2: [0.27, 0.73], 3: [0.19, 0.5, 0.81]}[count]
    radius = {1: 0.16, 2: 0.14, 3: 0.115}[count] * {None: 1.0, "small": 0.62, "big": 1.3}[size]
    centres = [(value, side) if vertical else (side, value) for value in along]
    spots = tuple(_spot(rng, x, y, radius, wobble=0.015) for x, y in centres)
    return Group(noun, _colour(rng, background, taken, noun), spots, size)


def _trio(rng: Random) -> Scene:
    background = _background(rng, plain=rng.random() < 0.8)
    centres, radius = _layout(rng, 3, rng.choice(("row", "row", "column")))
    groups: list[Group] = []
    for x, y in centres:
        noun = _noun(rng)
        colour = _colour(rng, background, [group.colour for group in groups], noun)
        groups.append(Group(noun, colour, (_spot(rng, x, y, radius, wobble=0.015),)))
    return Scene(background, tuple(groups))


def _nested(rng: Random) -> Scene:
    background = _background(rng, plain=True)
    frame = rng.choice(FRAMES)
    outer = Group(frame, _colour(rng, background), (_spot(rng, 0.5, 0.5, 0.37, wobble=0.02),))
    x, y, _ = outer.spots[0]
    noun = rng.choice(list(SHAPES))
    colour = _colour(rng, background, (outer.colour,))
    inner = Group(noun, colour, (_spot(rng, x, y, 0.15, wobble=0.0),))
    return Scene(background, (inner, outer), "inside")


def _landscape(rng: Random) -> Scene:
    kind = rng.choice(list(LANDSCAPES))
    ground_nouns, sky_nouns, horizon = {
        "meadow": (("house", "tree", "flower"), ("sun", "cloud"), 0.7),
        "night": (("house", "tree"), ("moon", "star"), 0.74),
        "beach": (("tree", "house", "circle"), ("sun", "cloud"), 0.72),
        "sea": (("boat",), ("sun", "cloud"), 0.6),
    }[kind]
    background = Background(kind)
    nouns = rng.sample(ground_nouns, min(len(ground_nouns), rng.choice((1, 1, 2))))
    groups: list[Group] = []
    for index, noun in enumerate(nouns):
        middle = 0.5 if len(nouns) == 1 else (0.29, 0.71)[index]
        count = rng.choice((1, 1, 1, 2, 3)) if len(nouns) == 1 else 1
        gap, radius = (0.3, 0.13) if count > 1 else (0.0, 0.18)
        spots = tuple(
            _spot(rng, middle + gap * (step - (count - 1) / 2), horizon - 0.04, radius, 0.012)
            for step in range(count)
        )
        groups.append(Group(noun, _landscape_colour(rng, noun), spots))
    if rng.random() < 0.6:
        noun = rng.choice(sky_nouns)
        spot = _spot(rng, rng.choice((0.2, 0.5, 0.8)), 0.2, 0.13, 0.02)
        groups.append(Group(noun, _landscape_colour(rng, noun), (spot,)))
    return Scene(background, tuple(groups))


def _landscape_colour(rng: Random, noun: str) -> str:
    if noun in ("sun", "cloud", "moon", "tree", "star") and rng.random() < 0.75:
        return USUAL_COLOUR[noun]
    return rng.choice(("red", "yellow", "orange", "purple", "pink", "white", "brown"))


def _background(rng: Random, plain: bool = False) -> Background:
    if rng.random() < 0.12:
        common = ("white", "white", "white", "light gray", "light blue", "black", "blue")
        return Background("plain", (rng.choice(common),), silent=True)
    kind = "plain" if plain else rng.choices(("plain", "gradient", "stripes"), (88, 7, 5))[0]
    if kind == "plain":
        return Background(kind, (_any_colour(rng),))
    first = _any_colour(rng)
    return Background(kind, (first, _distinct(rng, (first,))))


def _noun(rng: Random) -> str:
    if rng.random() < 0.15:
        return rng.choice(list(PICTURES))
    return rng.choice(HARD_SHAPES if rng.random() < 0.25 else list(SHAPES))


def _size(rng: Random) -> str | None:
    return rng.choices((None, "small", "big"), weights=(5, 3, 2))[0]


def _any_colour(rng: Random) -> str:
    if rng.random() < 0.12:
        return f"{rng.choice(SHADES)} {rng.choice(SHADED)}"
    return rng.choice(list(COLOURS))


def _colour(
    rng: Random, background: Background, taken: Sequence[str] = (), noun: str | None = None
) -> str:
    """A colour that stands out against the background and against the colours already taken."""
    avoided = (*background.colours, *taken)
    usual = USUAL_COLOUR.get(noun or "")
    if usual is not None and rng.random() < 0.25 and _stands_out(usual, avoided):
        return usual
    return _distinct(rng, avoided)


def _distinct(rng: Random, avoided: Sequence[str]) -> str:
    while True:
        colour = _any_colour(rng)
        if _stands_out(colour, avoided):
            return colour


def _stands_out(colour: str, avoided: Sequence[str]) -> bool:
    """Whether the colour is at least 75 levels of RGB distance away from all others."""
    mine = shade_of(colour)
    return all(
        sum((a - b) ** 2 for a, b in zip(mine, shade_of(other), strict=True)) >= 75**2
        for other in avoided
    )


def _spot(rng: Random, x: float, y: float, radius: float, wobble: float) -> Spot:
    return (
        x + rng.uniform(-wobble, wobble),
        y + rng.uniform(-wobble, wobble),
        radius * rng.uniform(0.92, 1.08),
    )
