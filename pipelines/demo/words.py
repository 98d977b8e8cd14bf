"""Which words the demo model knows, and the nearest known one for a word that it does not know.

It works on text alone: tables of neighbours for common words, one slip of the keyboard for typing
errors. Whatever it replaces or leaves out, the note names. It never looks at the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise

from accel.pipelines.demo import captions, vocabulary
from accel.pipelines.demo.neighbours import NEIGHBOURS, WITHOUT_CONTENT

# A number with a point, a word (letters and digits with the marks that some scripts write between
# them), or a symbol with what belongs to it: an emoji may be several characters.
_WORD = re.compile(
    r"\d+(?:\.\d+)+"
    r"|[^\W_](?:[^\W_]|[\u0300-\u1fff])*(?:['\u2019][^\W\d_]+)?"
    r"|[^\w\s](?:[\ufe00-\ufe0f\u20e3\U0001f3fb-\U0001f3ff]|\u200d[^\w\s])*"
)
_PAUSES = ".;:!?\u2026\u2013\u2014"
"""Read as the comma, the only mark that the model was trained with."""
_MARKS = "\"'()[]{}-/*_\u201c\u201d\u2018\u2019\u201e\u00ab\u00bb\u00a1\u00bf"
"""Marks that order a text and say nothing: dropped without a word."""
_NUMBERS = ("one", "two", "three", "four")
_QUALITY = re.compile(r".{3,}(?:istic|ically|ly|ful|ous|less|able|ible|esque|ed)")
"""How words end that say what something is like, not what it is."""
FALLBACK_NOUN = "circle"
"""What is drawn for a prompt that names nothing the model knows."""
LONGEST = 46
"""Words and commas that the model reads: its tokenizer takes 48, the two ends among them."""


@dataclass(frozen=True)
class Translation:
    """A prompt in known words, what was drawn as what, and what was left out. `remark` says that
    the prompt names nothing to draw or is too long, where it is so."""

    prompt: str
    replaced: tuple[tuple[str, str], ...]
    dropped: tuple[str, ...]
    remark: str | None = None


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

    A prompt of known words comes back as it is, but for its marks; one that names nothing at all
    becomes a circle.

    >>> translate("a navy ball"), translate("a fluffy red sqare"), translate("")
    ('a dark blue ball', 'a red square', 'a circle')
    """
    return _translated(prompt).prompt


def notice(prompt: str) -> str | None:
    """One line on what the model does not know of the prompt; None if it knows all of it."""
    translation = _translated(prompt)
    parts = [f'"{word}" drawn as "{known}"' for word, known in translation.replaced]
    if translation.dropped:
        parts.append(", ".join(f'"{word}"' for word in translation.dropped) + " left out")
    if translation.remark is not None:
        parts.append(translation.remark)
    if not parts:
        return None
    return (
        f"the demo model has a small vocabulary: {', '.join(parts)}. It knows {_known_in_short()}."
    )


def _translated(prompt: str) -> Translation:
    found = [(word, _heard(word)) for word in _WORD.findall(prompt) if word not in _MARKS]
    _draw_one_unknown_thing(found)
    words = [known for _, known in found if known is not None]
    replaced = ((w, k) for w, k in found if k is not None and k != w and w not in _PAUSES)
    dropped = (word for word, known in found if known is None)
    text, remark = _joined(words), None
    if _says_nothing(words):
        text = f"a {FALLBACK_NOUN}"
        why = "the prompt names nothing to draw" if prompt.strip() else "the prompt is empty"
        remark = f'{why}, drawn as "{text}"'
    elif _WORD.findall(prompt) == words:
        text = prompt
    if len(_WORD.findall(text)) > LONGEST:
        remark = f"only the first {LONGEST} words and commas are read"
    # A word that occurs twice is named once.
    return Translation(text, tuple(dict.fromkeys(replaced)), tuple(dict.fromkeys(dropped)), remark)


def _heard(word: str) -> str | None:
    """What the model is given for `word`; None if it is left out."""
    if word.lower() in known_words() or word == ",":
        return word
    return "," if word in _PAUSES else _nearest(word.lower())


def _draw_one_unknown_thing(found: list[tuple[str, str | None]]) -> None:
    """Where no known thing is left to draw, the last unknown word that may be one becomes one."""
    if _names_a_thing([known for _, known in found if known is not None]):
        return
    for index, (word, known) in reversed([*enumerate(found)]):
        if known is None and _may_be_a_thing(word.lower()):
            several = word.lower().endswith("s")
            found[index] = word, vocabulary.plural(FALLBACK_NOUN) if several else FALLBACK_NOUN
            return


def _nearest(word: str) -> str | None:
    if word in WITHOUT_CONTENT:
        return None
    if word.isdecimal():
        value = int(word) if len(word) < 3 else len(_NUMBERS)
        return _NUMBERS[min(max(value, 1), len(_NUMBERS)) - 1]
    # An emoji may come with a selector that asks for its coloured picture.
    word = word.rstrip("\ufe0f").removesuffix("'s").removesuffix("\u2019s")
    if word in NEIGHBOURS:
        return NEIGHBOURS[word]
    for singular in _singulars(word):
        if singular in NEIGHBOURS:
            one = NEIGHBOURS[singular]
            return vocabulary.plural(one) if one in _all_nouns() else one
    if word.endswith("ish") and word[:-3] in known_words():
        return word[:-3]
    if word in known_words():
        return word
    return next((known for known in _often_misspelt() if _is_one_slip_away(word, known)), None)


def _singulars(word: str) -> Iterator[str]:
    for ending, instead in (("s", ""), ("es", ""), ("ies", "y"), ("ves", "f")):
        if word.endswith(ending):
            yield word.removesuffix(ending) + instead


@cache
def _often_misspelt() -> tuple[str, ...]:
    """The known words that a typing error may have meant: not the small words of a sentence, which
    resemble too many others."""
    small = _words_of((*vocabulary.OPENINGS, *vocabulary.DECORATIONS, "with near over that next"))
    return tuple(sorted(word for word in known_words() - small if len(word) > 3))


def _is_one_slip_away(word: str, known: str) -> bool:
    """Whether one letter is missing, too many, wrong or swapped with the next; the first is right,
    as it is in most typing errors.

    >>> [_is_one_slip_away(word, "square") for word in ("sqare", "sqaure", "share")]
    [True, True, False]
    """
    start = next(
        (i for i, (one, other) in enumerate(zip(word, known, strict=False)) if one != other),
        min(len(word), len(known)),
    )
    rest, right = word[start:], known[start:]
    slips = (rest[1:], rest, rest[1:], rest[1::-1] + rest[2:])
    meant = (right, right[1:], right[1:], right)
    return start > 0 and len(word) > 3 and any(a == b for a, b in zip(slips, meant, strict=True))


def _may_be_a_thing(word: str) -> bool:
    letters = word[0].isalpha() and not any(map(str.isdigit, word))
    return letters and word not in WITHOUT_CONTENT and _QUALITY.fullmatch(word) is None


def _says_nothing(words: Sequence[str]) -> bool:
    """Whether no word is left of which a picture could show anything."""
    empty = _words_of(
        (*vocabulary.OPENINGS, *vocabulary.DECORATIONS, "a an the is and with of on in at")
    )
    return all(word.lower() in empty or word == "," for word in words)


def _names_a_thing(words: Sequence[str]) -> bool:
    nouns = _all_nouns()
    singular = set(chain(nouns, chain.from_iterable(nouns.values()), vocabulary.ANY_SHAPE))
    things = singular | {vocabulary.plural(noun) for noun in singular}
    return any(word in things for word in " ".join(words).lower().split())


def _joined(words: Sequence[str]) -> str:
    """The words as a sentence, no comma at its ends and no two in a row."""
    kept = [word for word, next_one in pairwise((*words, ",")) if (word, next_one) != (",", ",")]
    return " ".join(kept).replace(" ,", ",").removeprefix(",").strip()


def _words_of(texts: Sequence[str]) -> frozenset[str]:
    return frozenset(chain.from_iterable(text.split() for text in texts))


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
