from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from accel.pipelines import demo, subjects
from accel.pipelines.settings import Settings

Cli = Callable[..., Any]


def _shipped() -> bool:
    try:
        return demo.demo_folder().is_dir()
    except FileNotFoundError:
        return False


needs_weights = pytest.mark.skipif(not _shipped(), reason="the demo model's weights are missing")


def test_a_missing_demo_is_one_line(accel_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise FileNotFoundError("the built-in demo model is missing")

    monkeypatch.setattr("accel.pipelines.demo.demo_folder", missing)
    done = accel_cli("generate", "a red circle")
    assert done.code == 2
    assert done.complaint == (
        "accel: the built-in demo model is missing, or give a folder or hub id as --model"
    )


def test_the_demo_is_asked_in_words_it_knows() -> None:
    asked = Settings("a navy ball", model="demo")
    assert subjects.as_called(asked).prompt == demo.translate("a navy ball") != asked.prompt
    other = Settings("a navy ball", model="somewhere/else")
    assert subjects.as_called(other) == other


def test_what_the_demo_cannot_draw_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    full = {"model": "demo", "width": demo.SIZE, "height": demo.SIZE}
    subjects.tell([Settings("a red ball", **full), Settings("x", model="somewhere/else")])
    assert capsys.readouterr().err == ""
    subjects.tell([Settings("a navy ball", seed=seed, **full) for seed in range(3)])
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("accel: ") and '"navy" drawn as "dark blue"' in told


@pytest.mark.parametrize("size", ["128", "8", "512x191"])
def test_sizes_at_which_the_demo_draws_nothing_are_refused(accel_cli: Cli, size: str) -> None:
    for command in (("generate", "a red ball"), ("bench", "demo"), ("verify", "demo")):
        done = accel_cli(*command, "--size", size)
        assert done.code == 2
        assert done.complaint.startswith(f"accel: --size {size.partition('x')[0]}x")
        assert "trained at 256x256 and draws little but background below 192" in done.complaint


@needs_weights
@pytest.mark.parametrize("size", ["192", "256x320"])
def test_other_sizes_than_the_trained_one_get_a_note(accel_cli: Cli, size: str) -> None:
    done = accel_cli("generate", "a red ball", "--size", size, "--steps", "1", "-o", "x.png")
    assert done.code == 0
    (told,) = done.remarks()
    assert told.startswith("accel: the demo model was trained at 256x256: at ")


@needs_weights
@pytest.mark.parametrize(
    "command",
    [
        ("generate", "a navy ball", "-n", "2", "-o", "{index}.png"),
        ("bench", "demo", "a navy ball", "--repeats", "1"),
        ("verify", "demo", "a navy ball", "--runs", "1"),
    ],
)
def test_every_command_that_draws_notes_replaced_words_once(
    accel_cli: Cli, command: tuple[str, ...]
) -> None:
    done = accel_cli(*command, "--steps", "2")
    assert done.code == 0, done.err
    (told,) = done.remarks()
    assert '"navy" drawn as "dark blue"' in told


@needs_weights
def test_explain_notes_replaced_words_once(accel_cli: Cli) -> None:
    """That nothing is accelerated is its answer, on stdout, and no remark."""
    done = accel_cli("explain", "demo", "a navy ball", "--runs", "1", "--steps", "2")
    assert done.code == 0, done.err
    assert '"navy" drawn as "dark blue"' in done.complaint


@needs_weights
def test_an_empty_prompt_says_what_it_draws(accel_cli: Cli) -> None:
    done = accel_cli("generate", "", "--steps", "1", "-o", "x.png")
    assert done.code == 0
    (told,) = done.remarks()
    assert 'the prompt is empty, drawn as "a circle"' in told


@needs_weights
def test_the_demo_is_the_default_model(accel_cli: Cli) -> None:
    done = accel_cli("generate", "a red circle on a blue background", "-o", "circle.png")
    assert (done.code, done.remarks()) == (0, [])
    with Image.open("circle.png") as image:
        assert image.size == (demo.SIZE, demo.SIZE)
        assert len(image.convert("RGB").getcolors(1 << 24) or []) > 10


@needs_weights
def test_a_demo_picture_makes_itself_again(accel_cli: Cli) -> None:
    small = ("--steps", "3", "-o", "first.png")
    assert accel_cli("generate", "a navy ball", *small).code == 0
    assert accel_cli("generate", "--from", "first.png", "-o", "again.png").code == 0
    assert Path("first.png").read_bytes() == Path("again.png").read_bytes()
