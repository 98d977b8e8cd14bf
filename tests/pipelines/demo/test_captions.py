"""Captions are true: a reader that knows only English words finds in the picture what they say."""

from __future__ import annotations

import re
from collections import Counter
from random import Random

from accel.pipelines.demo.captions import caption
from accel.pipelines.demo.drawing import draw_scene
from accel.pipelines.demo.measuring import Expectation, Things, complaints
from accel.pipelines.demo.scene import Scene, random_scene
from accel.pipelines.demo.vocabulary import (
    COLOUR_WORDS,
    COLOURS,
    DECORATIONS,
    NUMBERS,
    PLACES,
    SHAPES,
    SIZES,
    plural,
)
from accel.pipelines.demo.words import known_words

ORDER = {  # axis, and whether what is named first lies further left or up
    "left of": ("x", True),
    "on the left of": ("x", True),
    "to the left of": ("x", True),
    "right of": ("x", False),
    "on the right of": ("x", False),
    "to the right of": ("x", False),
    "above": ("y", True),
    "over": ("y", True),
    "on top of": ("y", True),
    "below": ("y", False),
    "under": ("y", False),
    "beneath": ("y", False),
    "underneath": ("y", False),
}
COLOUR_OF = {word: name for name, others in COLOUR_WORDS.items() for word in (name, *others)}
NOUN_OF = {
    form: noun
    for noun, others in SHAPES.items()
    for word in (noun, *others)
    for form in (word, plural(word))
}
COUNT_OF = {word: number for number, words in NUMBERS.items() for word in words}
PLACE_OF = {phrase: place for place, phrases in PLACES.items() for phrase in phrases}


def either(words: object) -> str:
    return "|".join(sorted(map(str, words), key=len, reverse=True))  # type: ignore[call-overload]


SIZE = either([*SIZES, *(word for others in SIZES.values() for word in others)])
PHRASE = re.compile(
    rf"(?:\b(?P<count>{either(COUNT_OF)}|an|the)(?: single)? )?"
    rf"(?:(?:{either(DECORATIONS)}) )?(?:(?:{SIZE}) )?"
    rf"(?P<colour>{either(COLOUR_OF)}) (?P<noun>{either(NOUN_OF)})\b"
    rf"(?: (?:in a row|side by side|in a line|in a column|stacked|on top of each other))?"
    rf"(?: (?P<place>{either(PLACE_OF)})\b(?! of\b))?"
)
GROUND = re.compile(
    rf"\b(?P<colour>{either(COLOUR_OF)}) (?:background|backdrop|wall|canvas|paper)\b"
    rf"|\b(?:on|against) (?P<last>{either(COLOUR_OF)})$"
)


def read(text: str) -> Expectation | None:
    """What a plain sentence asks for; None where it leaves something open."""
    ground = GROUND.search(text)
    found = list(PHRASE.finditer(text))
    nouns = [word for word in re.findall(r"\w+", text) if word in NOUN_OF]
    if ground is None or not found or len(nouns) != len(found):
        return None
    if re.search(r"\b(?:light|dark|shapes?|things?|objects?)\b", text) or _holds_nonsense(text):
        return None
    things = tuple(
        Things(
            COLOUR_OF[match["colour"]],
            COUNT_OF.get(match["count"] or "", 1),
            NOUN_OF[match["noun"]],
            PLACE_OF.get(match["place"] or ""),
        )
        for match in found
    )
    colour = COLOUR_OF[ground["colour"] or ground["last"]]
    return Expectation(colour, things, order_of(text, found, things))


def _holds_nonsense(text: str) -> bool:
    return not set(re.findall(r"[a-z]+|\d+", text)) <= known_words()


def order_of(
    text: str, found: list[re.Match[str]], things: tuple[Things, ...]
) -> tuple[str, str, str] | None:
    if len(things) != 2:
        return None
    between = re.sub(r"^ (?:is )?| $", "", text[found[0].end() : found[1].start()])
    if between not in ORDER:
        # A list of two that names no places reads from left to right.
        listed = between in ("and", "with", ",") and things[0].place is None
        return ("x", things[0].colour, things[1].colour) if listed else None
    axis, first = ORDER[between]
    one, other = (things[0], things[1]) if first else (things[1], things[0])
    return axis, one.colour, other.colour


def captioned(number: int) -> list[tuple[Scene, str]]:
    rng = Random(11)
    scenes = [random_scene(rng) for _ in range(number)]
    return [(scene, caption(scene, rng)) for scene in scenes]


def test_drawn_scenes_show_what_their_captions_say() -> None:
    kinds: Counter[str] = Counter()
    wrong: dict[str, list[str]] = {}
    mistaken = 0
    for scene, text in captioned(1000):
        expected = read(text)
        if expected is None or Expectation.of_scene(scene) is None:
            continue
        kinds[expected.order[0] if expected.order else "none"] += 1
        kinds["placed"] += any(things.place is not None for things in expected.things)
        picture = draw_scene(scene, 256, Random(0))
        mistaken += bool(complaints(picture, expected))
        if found := complaints(picture, expected, shapes=False):
            wrong[text] = found
    assert kinds["x"] >= 30, kinds
    assert kinds["y"] >= 30, kinds
    assert kinds["placed"] >= 60, kinds
    assert kinds.total() >= 350, kinds
    assert not wrong
    assert mistaken <= 0.02 * kinds.total()  # silhouettes of a few pixels


def test_a_reader_tells_left_from_right_and_above_from_below() -> None:
    seen = [read(text) for text in (
        "a red circle to the left of a green square on a white background",
        "draw a white ring under a yellow triangle on a green background",
        "a red disc and a cobalt box on white",
    )]  # fmt: skip
    orders = [expected.order for expected in seen if expected is not None]
    assert orders == [("x", "red", "green"), ("y", "yellow", "white"), ("x", "red", "blue")]


def test_what_is_hard_to_learn_is_frequent() -> None:
    scenes = [random_scene(Random(seed)) for seed in range(3000)]

    def share(number: int) -> float:
        return number / len(scenes)

    related = Counter(scene.relation for scene in scenes)
    corners = sum(any(" " in (g.place or "") for g in s.groups) for s in scenes)
    assert all(share(related[name]) > 0.03 for name in ("left", "right", "above", "below"))
    assert share(sum(len(scene.groups) == 3 for scene in scenes)) > 0.08
    assert share(sum(max(g.count for g in scene.groups) >= 3 for scene in scenes)) > 0.15
    assert share(corners) > 0.08
    assert set(COLOURS) <= {group.colour for scene in scenes for group in scene.groups}
