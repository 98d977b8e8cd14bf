"""What becomes of words that the demo model does not know."""

import json
from random import Random

import pytest

from accel.pipelines.demo import demo_folder, known_words, notice, translate
from accel.pipelines.demo.captions import caption
from accel.pipelines.demo.neighbours import NEIGHBOURS, WITHOUT_CONTENT
from accel.pipelines.demo.scene import random_scene
from accel.pipelines.demo.words import LONGEST


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


@pytest.mark.parametrize("prompt", ["A red circle, on Blue", "two  stars", "on blue, a box"])
def test_a_prompt_of_known_words_stays_as_it_is(prompt: str) -> None:
    assert translate(prompt) == prompt
    assert notice(prompt) is None


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("A red circle, on Blue!", "A red circle, on Blue"),
        ("a red circle. (a blue background);", "a red circle, a blue background"),
        ('"two stars" - please draw', "two stars please draw"),
        ("...a star...", "a star"),
    ],
)
def test_marks_become_commas_or_nothing_without_a_word(prompt: str, expected: str) -> None:
    assert translate(prompt) == expected
    assert notice(prompt) is None


@pytest.mark.parametrize(
    ("prompt", "expected", "left_out"),
    [
        ("a photorealistic red star, 4k", "a red star", '"photorealistic", "4k"'),
        ("two stars, highly detailed, 8K, HDR", "two stars", '"highly", "detailed", "8K", "HDR"'),
        ("a glowing blue box, hyperdetailed", "a blue box", '"glowing"'),
        ("a close-up of a happy tree", "a of a tree", '"close", "up", "happy"'),
        ("I would like a red circle", "a red circle", '"I", "would", "like"'),
        ("a red circle #1.5", "a red circle", '"#", "1.5"'),
        ("a red circle 👽", "a red circle", '"👽"'),
    ],
)
def test_words_without_content_are_left_out_and_named(
    prompt: str, expected: str, left_out: str
) -> None:
    assert translate(prompt) == expected
    note = notice(prompt)
    assert note is not None
    assert left_out in note
    assert "drawn as" not in note


@pytest.mark.parametrize("prompt", ["photorealistic", "a stunning, 4k", "🤷", "draw a beautiful"])
def test_a_prompt_that_names_nothing_says_what_is_drawn(prompt: str) -> None:
    assert translate(prompt) == "a circle"
    note = notice(prompt)
    assert note is not None
    assert 'the prompt names nothing to draw, drawn as "a circle"' in note


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_the_empty_prompt_says_what_is_drawn(prompt: str) -> None:
    assert translate(prompt) == "a circle"
    assert 'the prompt is empty, drawn as "a circle"' in str(notice(prompt))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a photorealistic wug", "a circle"),
        ("a wug, photorealistic", "a circle"),
        ("three wugs", "three circles"),
        ("красный круг", "circle"),
        ("लाल वृत्त", "circle"),
    ],
)
def test_what_may_be_a_thing_is_drawn_where_nothing_else_is(prompt: str, expected: str) -> None:
    assert translate(prompt) == expected
    assert '" drawn as "circle' in str(notice(prompt))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a 🐱 on blue", "a fish on blue"), ("❤️❤️", "heart heart"), ("🔴", "red circle")],
)
def test_an_emoji_is_drawn_as_its_nearest_thing(prompt: str, expected: str) -> None:
    assert translate(prompt) == expected
    assert "drawn as" in str(notice(prompt))


@pytest.mark.parametrize(
    ("word", "expected"),
    [("circel", "circle"), ("trea", "tree"), ("wite", "white"), ("bottm", "bottom")],
)
def test_one_slip_of_the_keyboard_is_understood(word: str, expected: str) -> None:
    assert translate(word + " star") == expected + " star"


@pytest.mark.parametrize("word", ["bored", "lighting", "fork", "rake", "steak", "loud", "thunder"])
def test_another_word_that_looks_alike_is_no_slip(word: str) -> None:
    assert f'"{word}" left out' in str(notice(f"a {word} star"))


@pytest.mark.parametrize(
    ("number", "expected"),
    [("0", "one"), ("03", "three"), ("٢", "two"), ("7", "four"), ("9" * 5000, "four")],
)
def test_numbers_are_kept_between_one_and_four(number: str, expected: str) -> None:
    assert translate(f"{number} stars") == f"{expected} stars"


@pytest.mark.parametrize("prompt", ["x² stars", "½ star", "1️⃣ star", "\udcff star"])
def test_odd_characters_are_left_out_and_named(prompt: str) -> None:
    assert set(translate(prompt).split()) <= {"star", "stars", "1"}
    assert "left out" in str(notice(prompt))


def test_a_word_that_occurs_twice_is_named_once() -> None:
    assert str(notice("a fluffy cat, a fluffy cat")).count("fluffy") == 1


def test_the_note_names_the_unknown_words_and_what_is_known() -> None:
    note = notice("a fluffy cat on a red background")
    assert note is not None
    assert "\n" not in note
    assert '"cat" drawn as "fish"' in note
    assert '"fluffy" left out' in note
    assert "circle" in note
    assert "purple" in note


def test_what_is_too_long_to_be_read_is_noted() -> None:
    tokenizer = json.loads((demo_folder() / "tokenizer" / "tokenizer.json").read_text())
    assert tokenizer["truncation"]["max_length"] == LONGEST + 2
    assert notice("a red star, " * 11 + "a blue") is None
    assert "only the first 46 words and commas are read" in str(notice("a red star, " * 12))


def test_every_translation_is_in_known_words() -> None:
    for word in NEIGHBOURS:
        assert set(translate(f"{word}, {word}s").replace(",", "").split()) <= known_words(), word


def test_no_table_speaks_of_a_word_that_is_known() -> None:
    assert not known_words() & set(NEIGHBOURS)
    assert not WITHOUT_CONTENT & {*NEIGHBOURS, *known_words()}


def test_captions_use_known_words_only() -> None:
    rng = Random(1)
    made_up = sum(
        translate(text) != text for text in (caption(random_scene(rng), rng) for _ in range(400))
    )
    # A few captions carry a made-up word on purpose.
    assert 0 < made_up < 40
