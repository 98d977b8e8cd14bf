"""What becomes of words that the demo model does not know."""

from random import Random

import pytest

from accel.pipelines.demo import known_words, notice, translate
from accel.pipelines.demo.captions import caption
from accel.pipelines.demo.neighbours import NEIGHBOURS, QUIET
from accel.pipelines.demo.scene import random_scene


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a navy ball", "a dark blue ball"),
        ("a red sqare on a bleu background", "a red square on a blue background"),
        ("seven gold coins on the lawn", "four yellow circles on the meadow"),
        ("a fluffy red circle", "a red circle"),
        ("draw a wug on red", "draw a circle on red"),
        ("on a blue background, a wug", "on a blue background, a circle"),
        ("12 hearts", "four hearts"),
        ("I would like a red circle", "a red circle"),
    ],
)
def test_unknown_words_become_their_nearest_known_ones(prompt: str, expected: str) -> None:
    assert translate(prompt) == expected


@pytest.mark.parametrize("prompt", ["", "A red circle, on Blue!", "two  stars"])
def test_a_prompt_of_known_words_stays_as_it_is(prompt: str) -> None:
    assert translate(prompt) == prompt
    assert notice(prompt) is None


def test_the_note_names_the_unknown_words_and_what_is_known() -> None:
    note = notice("a fluffy cat on a red background")
    assert note is not None
    assert "\n" not in note
    assert '"cat" drawn as "fish"' in note
    assert '"fluffy" left out' in note
    assert "circle" in note
    assert "purple" in note


def test_words_without_meaning_for_the_picture_get_no_note() -> None:
    assert notice("I would like a red circle please") is None


def test_every_translation_is_in_known_words() -> None:
    for word in NEIGHBOURS:
        assert set(translate(f"{word} {word}s").split()) <= known_words(), word


def test_no_table_speaks_of_a_word_that_is_known() -> None:
    assert not known_words() & set(NEIGHBOURS)
    assert not QUIET & set(NEIGHBOURS)


def test_captions_use_known_words_only() -> None:
    rng = Random(1)
    made_up = sum(
        translate(text) != text for text in (caption(random_scene(rng), rng) for _ in range(400))
    )
    # A few captions carry a made-up word on purpose.
    assert 0 < made_up < 40
