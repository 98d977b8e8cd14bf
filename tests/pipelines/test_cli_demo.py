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


def test_the_demo_is_asked_in_words_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    asked = Settings("a navy ball", model="demo")
    assert subjects.as_called(asked).prompt == demo.translate("a navy ball") != asked.prompt
    assert capsys.readouterr().err == ""
    subjects.as_called(asked, tell=True)
    told = capsys.readouterr().err
    assert told.startswith("accel: ") and '"navy" drawn as "dark blue"' in told
    other = Settings("a navy ball", model="somewhere/else")
    assert subjects.as_called(other, tell=True) == other


@needs_weights
def test_the_demo_is_the_default_model(accel_cli: Cli) -> None:
    done = accel_cli("generate", "a red circle on a blue background", "-o", "circle.png")
    assert (done.code, done.err) == (0, "")
    with Image.open("circle.png") as image:
        assert image.size == (demo.SIZE, demo.SIZE)
        assert len(image.convert("RGB").getcolors(1 << 24) or []) > 10


@needs_weights
def test_a_demo_picture_makes_itself_again(accel_cli: Cli) -> None:
    small = ("--steps", "3", "-o", "first.png")
    assert accel_cli("generate", "a navy ball", *small).code == 0
    assert accel_cli("generate", "--from", "first.png", "-o", "again.png").code == 0
    assert Path("first.png").read_bytes() == Path("again.png").read_bytes()
