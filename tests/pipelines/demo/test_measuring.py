"""The check on pixels: drawn scenes pass it, and each kind of wrong picture is named."""

from random import Random

import pytest
from PIL import Image

from accel.pipelines.demo.drawing import draw_scene
from accel.pipelines.demo.measuring import Expectation, Things, complaints
from accel.pipelines.demo.scene import Background, Group, Scene, random_scene

SIDE = 256
BLUE = Background("plain", ("blue",))
LEFT, RIGHT = (0.27, 0.5, 0.16), (0.73, 0.5, 0.16)


def drawn(*groups: Group) -> Image.Image:
    return draw_scene(Scene(BLUE, groups), SIDE, Random(0))


def test_drawn_scenes_show_what_they_say() -> None:
    rng = Random(5)
    judged = [
        complaints(draw_scene(scene, SIDE, rng), expected)
        for scene in (random_scene(rng) for _ in range(80))
        if (expected := Expectation.of_scene(scene)) is not None
    ]
    assert len(judged) > 20
    assert sum(bool(found) for found in judged) <= 1


@pytest.mark.parametrize(
    ("expected", "complaint"),
    [
        (Expectation("green", (Things("red", 1),)), "background blue, not green"),
        (Expectation("blue", (Things("red", 2),)), "1 red things, not 2"),
        (Expectation("blue", (Things("white", 1),)), "0 white things, not 1"),
        (Expectation("blue", (Things("white", 1),)), "unasked red"),
        (Expectation("blue", (Things("red", 1, "star"),)), "red circle, not star"),
        (Expectation("blue", (Things("red", 1, "circle", "right"),)), "red is not at right"),
    ],
)
def test_a_wrong_picture_is_named(expected: Expectation, complaint: str) -> None:
    assert complaint in complaints(drawn(Group("circle", "red", (LEFT,))), expected)


def test_order_is_read_from_the_picture() -> None:
    picture = drawn(Group("circle", "red", (LEFT,)), Group("star", "white", (RIGHT,)))
    things = (Things("red", 1), Things("white", 1))
    assert complaints(picture, Expectation("blue", things, ("x", "red", "white"))) == []
    assert complaints(picture, Expectation("blue", things, ("x", "white", "red"))) == [
        "white is not left of red"
    ]


def test_noise_and_an_empty_picture_fail() -> None:
    expected = Expectation("blue", (Things("red", 1),))
    empty = Image.new("RGB", (SIDE, SIDE), (40, 85, 220))
    noise = Image.effect_noise((SIDE, SIDE), 90).convert("RGB")
    assert complaints(empty, expected) == ["0 red things, not 1"]
    assert complaints(noise, expected)
