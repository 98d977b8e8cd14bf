"""Which words the demo model knows, and the nearest known one for a word that it does not know.

It works on text alone: tables of neighbours for common words, spelling distance for typing errors.
It never looks at the model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import chain

from accel.pipelines.demo import captions, vocabulary
from accel.pipelines.demo.neighbours import NEIGHBOURS, QUIET

_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?|\d+|[^\w\s]")
FALLBACK_NOUN = "circle"
"""What is drawn for a prompt that names nothing the model knows."""


@dataclass(frozen=True)
class Translation:
    """A prompt in known words, what was drawn as what, and what was left out."""

    prompt: str
    replaced: tuple[tuple[str, str], ...]
    dropped: tuple[str, ...]


@cache
def known_words() -> frozenset[str]:
    """Every word that the model was trained on, in lower case."""
    nouns = list(chain.from_iterable((n, *others) for n, others in _all_nouns().items()))
    texts = chain(
        vocabulary.COLOURS,
        chain.from_iterable(vocabulary.COLOUR_WORDS.values()),
        vocabulary.SHADES,
        nouns,
        map(vocabulary.plural, nouns),
        *(
            chain(table, chain.from_iterable(table.values()))
            for table in (vocabulary.SIZES, vocabulary.PLACES, vocabulary.RELATIONS)
        ),
        chain.from_iterable(vocabulary.NUMBERS.values()),
        chain.from_iterable(vocabulary.ARRANGEMENTS.values()),
        chain.from_iterable(vocabulary.LANDSCAPES.values()),
        vocabulary.OPENINGS,
        vocabulary.DECORATIONS,
        captions.PLAIN_PHRASES,
        captions.BACKGROUND_FIRST,
        captions.GRADIENT_PHRASES,
        captions.STRIPE_PHRASES,
        ("a an the is and with under below",),
    )
    found = {word for text in texts for word in re.findall(r"[a-z]+|\d+", text)}
    return frozenset(found - {"c", "d", "x"})


def translate(prompt: str) -> str:
    """The prompt with every unknown word replaced by its nearest known one, or left out.

    A prompt of known words comes back as it is.

    >>> translate("a navy ball"), translate("a fluffy red sqare")
    ('a dark blue ball', 'a red square')
    """
    return _translated(prompt).prompt


def notice(prompt: str) -> str | None:
    """One line on the words of the prompt that the model does not know; None if it knows all."""
    translation = _translated(prompt)
    parts = [f'"{word}" drawn as "{known}"' for word, known in translation.replaced]
    parts += [f'"{word}" left out' for word in translation.dropped]
    if not parts:
        return None
    return (
        f"the demo model has a small vocabulary: {', '.join(parts)}. It knows {_known_in_short()}."
    )


def _translated(prompt: str) -> Translation:
    words: list[str] = []
    replaced: list[tuple[str, str]] = []
    dropped: list[str] = []
    gap = 0  # where the last dropped word stood: most likely it was the noun
    for word in _WORD.findall(prompt):
        lower = word.lower()
        if lower in known_words() or not word[0].isalnum():
            words.append(word)
        elif lower in QUIET:
            continue
        elif (nearest := _nearest(lower)) is not None:
            words.append(nearest)
            replaced.append((word, nearest))
        else:
            dropped.append(word)
            gap = len(words)
    if dropped and not _names_a_thing(words):
        replaced.append((dropped.pop(), FALLBACK_NOUN))
        words.insert(gap, FALLBACK_NOUN)
    text = prompt if _WORD.findall(prompt) == words else _joined(words)
    return Translation(text, tuple(replaced), tuple(dropped))


def _nearest(word: str) -> str | None:
    if word in NEIGHBOURS:
        return NEIGHBOURS[word]
    if word.isdigit():
        return "one" if int(word) < 1 else "four"
    if word.endswith("s") and word[:-1] in NEIGHBOURS:
        one = NEIGHBOURS[word[:-1]]
        return vocabulary.plural(one) if one in _all_nouns() else one
    if word.endswith("ish") and word[:-3] in known_words():
        return word[:-3]
    if len(word) < 4:
        return None
    # Typing errors keep the first letter more often than not, and most of the rest.
    alike = [known for known in sorted(known_words()) if len(known) > 2]
    return next(iter(get_close_matches(word, alike, n=1, cutoff=0.75)), None)


def _names_a_thing(words: list[str]) -> bool:
    nouns = _all_nouns()
    singular = set(chain(nouns, chain.from_iterable(nouns.values()), vocabulary.ANY_SHAPE))
    things = singular | {vocabulary.plural(noun) for noun in singular}
    return any(word.lower() in things for word in words)


def _joined(words: list[str]) -> str:
    return re.sub(r" ([,.;:!?])", r"\1", " ".join(words))


def _all_nouns() -> dict[str, tuple[str, ...]]:
    return {
        **vocabulary.SHAPES,
        **vocabulary.PICTURES,
        **dict.fromkeys(vocabulary.ANY_SHAPE, ()),
    }


def _known_in_short() -> str:
    colours = ", ".join(vocabulary.COLOURS)
    things = ", ".join(chain(vocabulary.SHAPES, vocabulary.PICTURES))
    return (
        f"colours ({colours}; light, dark), things ({things}), one to four of them, small and big, "
        "places (left, right, top, bottom, centre, corners, above, below, next to, inside) and "
        "backgrounds (a colour, a gradient, stripes, a meadow, a beach, the sea, the night)"
    )
