"""The words of the demo model's world and what they stand for: colours, shapes, counts, places.

Data only. How words are put together is in `captions`, what they look like in `drawing`, and what
becomes of a word that is not here in `words`.
"""

from __future__ import annotations

RGB = tuple[int, int, int]

COLOURS: dict[str, RGB] = {
    "red": (220, 38, 38),
    "green": (40, 165, 70),
    "blue": (40, 85, 220),
    "yellow": (250, 215, 45),
    "orange": (245, 135, 30),
    "purple": (130, 55, 180),
    "pink": (250, 140, 190),
    "white": (250, 250, 250),
    "black": (18, 18, 20),
    "gray": (140, 142, 145),
    "cyan": (55, 205, 220),
    "brown": (125, 78, 42),
}
"""The palette: what a colour's plain name means, in sRGB."""

COLOUR_WORDS: dict[str, tuple[str, ...]] = {
    "red": ("crimson", "scarlet"),
    "green": ("emerald",),
    "blue": ("cobalt",),
    "yellow": ("golden", "lemon"),
    "orange": ("tangerine",),
    "purple": ("violet",),
    "pink": ("rose",),
    "white": ("snowy",),
    "black": ("jet",),
    "gray": ("grey", "silver"),
    "cyan": ("turquoise", "aqua"),
    "brown": ("chocolate",),
}
"""Other words for the colours, all of them trained."""

SHADES = ("light", "dark")
"""Words that move a colour halfway to white or to black."""

SHADED = ("red", "green", "blue", "purple", "brown", "gray")
"""Colours that have a light and a dark shade of their own."""

SHAPES: dict[str, tuple[str, ...]] = {
    "circle": ("disc", "disk", "ball", "dot"),
    "square": ("box",),
    "triangle": (),
    "star": (),
    "ring": ("donut", "hoop"),
    "diamond": ("rhombus",),
    "heart": (),
    "cross": ("plus",),
    "hexagon": (),
    "moon": ("crescent",),
    "rectangle": ("bar",),
    "oval": ("ellipse",),
}
"""Flat shapes of one colour, with other words for them."""

PICTURES: dict[str, tuple[str, ...]] = {
    "house": ("home", "cottage"),
    "tree": (),
    "flower": ("blossom",),
    "sun": (),
    "cloud": (),
    "boat": ("ship",),
    "fish": (),
}
"""Things drawn with more than their named colour (a door, a trunk, an eye)."""

USUAL_COLOUR = {
    "house": "red",
    "tree": "green",
    "flower": "pink",
    "sun": "yellow",
    "cloud": "white",
    "boat": "brown",
    "fish": "orange",
    "heart": "red",
    "moon": "yellow",
    "star": "yellow",
}
"""The colour of a thing whose prompt names none."""

ANY_SHAPE = ("shape", "thing", "object")
"""Words for a shape that is left open."""

IRREGULAR_PLURALS = {
    "box": "boxes",
    "cross": "crosses",
    "plus": "pluses",
    "rhombus": "rhombuses",
    "fish": "fish",
}

NUMBERS: dict[int, tuple[str, ...]] = {
    1: ("one", "1", "a", "single"),
    2: ("two", "2"),
    3: ("three", "3"),
    4: ("four", "4"),
}

SIZES: dict[str, tuple[str, ...]] = {
    "small": ("tiny", "little"),
    "big": ("large", "huge"),
}

PLACES: dict[str, tuple[str, ...]] = {
    "left": ("on the left", "on the left side", "at the left"),
    "right": ("on the right", "on the right side", "at the right"),
    "top": ("at the top", "in the upper half", "on top"),
    "bottom": ("at the bottom", "in the lower half"),
    "centre": ("in the centre", "in the center", "in the middle"),
    "top left": ("in the top left corner", "in the upper left corner", "at the top left"),
    "top right": ("in the top right corner", "in the upper right corner", "at the top right"),
    "bottom left": (
        "in the bottom left corner",
        "in the lower left corner",
        "at the bottom left",
    ),
    "bottom right": (
        "in the bottom right corner",
        "in the lower right corner",
        "at the bottom right",
    ),
}

RELATIONS: dict[str, tuple[str, ...]] = {
    "left": ("to the left of", "left of", "on the left of"),
    "right": ("to the right of", "right of", "on the right of"),
    "above": ("above", "over", "on top of"),
    "below": ("below", "under", "beneath", "underneath"),
    "beside": ("next to", "beside", "near"),
    "inside": ("inside", "in", "within"),
}

ARRANGEMENTS: dict[str, tuple[str, ...]] = {
    "row": ("in a row", "side by side", "in a line"),
    "column": ("in a column", "stacked", "on top of each other"),
}

LANDSCAPES: dict[str, tuple[str, ...]] = {
    "meadow": ("on a meadow", "on green grass", "on the grass", "on grass under a blue sky"),
    "night": ("at night", "in the night", "under the night sky", "under a starry sky"),
    "beach": ("on the beach", "on a beach", "on the sand by the sea"),
    "sea": ("on the sea", "on the water", "on the ocean"),
}

OPENINGS = (
    "a picture of",
    "an image of",
    "a drawing of",
    "a photo of",
    "a painting of",
    "an illustration of",
    "draw",
    "draw me",
    "paint",
    "show",
    "show me",
    "please draw",
    "make",
    "create",
)

DECORATIONS = (
    "simple",
    "nice",
    "beautiful",
    "flat",
    "bright",
    "pretty",
    "cute",
    "solid",
    "perfect",
    "colorful",
    "colourful",
    "shiny",
    "lovely",
    "round",
)
"""Words that a prompt may hold and that change nothing."""


def plural(noun: str) -> str:
    """The plural of one of the world's nouns."""
    return IRREGULAR_PLURALS.get(noun, noun + "s")


def shade_of(colour: str) -> RGB:
    """The sRGB value of a colour name, with "light " or "dark " in front or without.

    >>> shade_of("red")
    (220, 38, 38)
    """
    shade, _, plain = colour.rpartition(" ")
    base = COLOURS[plain]
    if not shade:
        return base
    target, share = (255, 0.5) if shade == "light" else (0, 0.45)
    red, green, blue = (round(value + (target - value) * share) for value in base)
    return red, green, blue
