"""Says what a scene shows, in one of many wordings: the sentences that the demo model learns.

It knows scenes and grammar, not pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from accel.pipelines.demo.scene import Background, Group, Scene
from accel.pipelines.demo.vocabulary import (
    ANY_SHAPE,
    ARRANGEMENTS,
    COLOUR_WORDS,
    DECORATIONS,
    LANDSCAPES,
    NUMBERS,
    OPENINGS,
    PICTURES,
    PLACES,
    RELATIONS,
    SHAPES,
    SIZES,
    USUAL_COLOUR,
    plural,
)

OPPOSITES = {"left": "right", "right": "left", "above": "below", "below": "above"}
SKY = ("sun", "cloud", "moon", "star")
PLAIN_PHRASES = (
    "on {a} background",
    "on {a} background",
    "on {a} background",
    "on {c}",
    "on a plain {c} background",
    "on {a} backdrop",
    "against {a} background",
    "against {c}",
    "against {a} wall",
    "over {a} background",
    "with {a} background",
    "in front of {a} background",
    "in front of {a} wall",
    "on {a} canvas",
    "on {c} paper",
)
BACKGROUND_FIRST = ("{a} background with {x}", "{c} background, {x}", "on {a} background, {x}")
GRADIENT_PHRASES = (
    "on a gradient from {c} to {d}",
    "on a {c} to {d} gradient",
    "on a {c} to {d} gradient background",
    "with a gradient background from {c} to {d}",
)
STRIPE_PHRASES = (
    "on a striped {c} and {d} background",
    "on {c} and {d} stripes",
    "with {c} and {d} stripes behind",
)


def caption(scene: Scene, rng: Random) -> str:
    """One sentence for the scene; another `rng` state gives another wording."""
    terse = rng.random() < 0.12
    body = _body(scene, rng, terse)
    opening = "" if terse or rng.random() < 0.6 else rng.choice(OPENINGS) + " "
    sentence = _with_background(body, scene.background, rng)
    if not sentence.startswith("on "):
        sentence = opening + sentence
    if rng.random() < 0.03:
        sentence = _with_nonsense(sentence, rng)
    return " ".join(sentence.split())


def _body(scene: Scene, rng: Random, terse: bool) -> str:
    groups = list(scene.groups)
    if len(groups) == 1:
        return _noun_phrase(groups[0], rng, terse)
    if scene.background.kind in LANDSCAPES:
        return _landscape_body(groups, rng)
    relation = scene.relation
    if relation in OPPOSITES and rng.random() < 0.4:
        groups.reverse()
        relation = OPPOSITES[relation]
    phrases = [_noun_phrase(group, rng, terse) for group in groups]
    # A bare list always reads from left to right.
    if relation is None or (relation == "left" and rng.random() < 0.15):
        return _listed(phrases, rng)
    if relation in ("left", "right") and rng.random() < 0.1:
        relation = "beside"
    link = rng.choice(RELATIONS[relation])
    verb = " is" if rng.random() < 0.05 else ""
    return f"{phrases[0]}{verb} {link} {phrases[1]}"


def _landscape_body(groups: Sequence[Group], rng: Random) -> str:
    phrases = [_noun_phrase(group, rng) for group in groups]
    if groups[-1].noun in SKY and rng.random() < 0.5:
        return f"{_listed(phrases[:-1], rng)} {rng.choice(('under', 'below'))} {phrases[-1]}"
    return _listed(phrases, rng)


def _listed(phrases: Sequence[str], rng: Random) -> str:
    if len(phrases) == 1:
        return phrases[0]
    last = rng.choice((" and ", " and ", " and ", " with ", ", "))
    return ", ".join(phrases[:-1]) + last + phrases[-1]


def _noun_phrase(group: Group, rng: Random, terse: bool = False) -> str:
    """ "two small red circles in a row", "the star at the top": a group in words."""
    words = _adjectives(group, rng)
    words.append(_noun(group, rng))
    words.insert(0, _counted(group.count, words[0], rng, terse))
    if group.arrangement is not None:
        words.append(rng.choice(ARRANGEMENTS[group.arrangement]))
    if group.place is not None and not (group.place == "centre" and rng.random() < 0.2):
        words.append(rng.choice(PLACES[group.place]))
    return " ".join(words)


def _adjectives(group: Group, rng: Random) -> list[str]:
    words = []
    if rng.random() < 0.05:
        words.append(rng.choice(DECORATIONS))
    if group.size is not None:
        words.append(group.size if rng.random() < 0.6 else rng.choice(SIZES[group.size]))
    usual = group.colour == USUAL_COLOUR.get(group.noun)
    if rng.random() >= (0.35 if usual else 0.02):
        words.append(colour_words(group.colour, rng))
    return words


def _noun(group: Group, rng: Random) -> str:
    others = {**SHAPES, **PICTURES}[group.noun]
    noun = rng.choice(others) if others and rng.random() < 0.18 else group.noun
    if rng.random() < 0.015:
        noun = rng.choice(ANY_SHAPE)
    return noun if group.count == 1 else plural(noun)


def _counted(count: int, next_word: str, rng: Random, terse: bool) -> str:
    if count > 1:
        return rng.choices(NUMBERS[count], weights=(4, 1))[0]
    if terse:
        return ""
    return rng.choices((article(next_word), "one", "the", "1", "a single"), (80, 7, 7, 3, 3))[0]


def article(word: str) -> str:
    """The indefinite article before `word`.

    >>> article("orange"), article("red")
    ('an', 'a')
    """
    return "an" if word[0] in "aeiou" else "a"


def colour_words(colour: str, rng: Random) -> str:
    """The colour's own name, or now and then another word for it."""
    shade, _, plain = colour.rpartition(" ")
    name = rng.choice(COLOUR_WORDS[plain]) if rng.random() < 0.15 else plain
    return f"{shade} {name}".strip()


def _with_background(body: str, background: Background, rng: Random) -> str:
    if background.silent or (background.kind == "plain" and rng.random() < 0.01):
        return body
    if background.kind in LANDSCAPES:
        return f"{body} {rng.choice(LANDSCAPES[background.kind])}"
    names = [colour_words(colour, rng) for colour in background.colours]
    if background.kind == "gradient":
        return f"{body} {rng.choice(GRADIENT_PHRASES).format(c=names[0], d=names[1])}"
    if background.kind == "stripes":
        rng.shuffle(names)
        return f"{body} {rng.choice(STRIPE_PHRASES).format(c=names[0], d=names[1])}"
    fields = {"c": names[0], "a": f"{article(names[0])} {names[0]}"}
    if rng.random() < 0.2:
        return rng.choice(BACKGROUND_FIRST).format(x=body, **fields)
    comma = "," if rng.random() < 0.06 else ""
    if rng.random() < 0.06:
        return f"{body}, {names[0]} background"
    return f"{body}{comma} {rng.choice(PLAIN_PHRASES).format(**fields)}"


def _with_nonsense(sentence: str, rng: Random) -> str:
    """A made-up word put somewhere, so that unknown words move the picture little."""
    words = sentence.split()
    letters = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 8)))
    words.insert(rng.randint(0, len(words)), letters)
    return " ".join(words)
