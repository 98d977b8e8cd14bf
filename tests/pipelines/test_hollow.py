"""Sizes are refused from configurations alone, in the words of the whole pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel.pipelines import loading, subjects, tiny, zoo
from accel.pipelines.errors import BadInput, explained
from accel.pipelines.generation import make
from accel.pipelines.models import ZOO, Trust
from accel.pipelines.settings import Settings

Cli = Callable[..., Any]
Folder = Callable[[str], Path]
ODD = {"width": 66, "height": 66}
UNBINNED = {"use_resolution_binning": False}  # else any size is mapped to a trained one
STRICT: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("sd15", "sdxl", "sd3", "zimage", "wan")},
    **dict.fromkeys(("sana", "pixart"), UNBINNED),
}
LENIENT: dict[str, dict[str, Any]] = {"flux": {}, "qwenimage": {}}  # these round


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load", lambda *arguments, **options: pytest.fail("loaded"))
    monkeypatch.setattr(zoo, "build", lambda *arguments, **options: pytest.fail("built"))


def _whole_refusal(name: str) -> str:
    pipe = tiny.pipeline(name)
    with pytest.raises(ValueError) as refused:
        make(pipe, Settings("x", extra=STRICT[name], **ODD))
    return str(explained(refused.value))


@pytest.mark.parametrize("name", STRICT)
@pytest.mark.usefixtures("nothing_loads")
def test_a_size_is_refused_before_weights_as_the_whole_pipeline_does(
    saved: Folder, name: str
) -> None:
    with pytest.raises(BadInput, match="--size ") as refused:
        subjects.choose(str(saved(name)), {**ODD, "extra": STRICT[name]}, "cpu")
    assert str(refused.value) == _whole_refusal(name)


@pytest.mark.parametrize("name", [name for name in ZOO if name not in LENIENT])
@pytest.mark.usefixtures("nothing_loads")
def test_the_zoo_refuses_a_size_before_weights_are_drawn(name: str) -> None:
    with pytest.raises(BadInput, match=r"^--size 1025x1024: |--size sets it$"):
        subjects.choose(name, {"width": 1025, "height": 1024}, "cpu")


@pytest.mark.parametrize("name", [*STRICT, *LENIENT])
@pytest.mark.usefixtures("nothing_loads")
def test_sizes_that_a_folder_takes_are_not_refused(saved: Folder, name: str) -> None:
    sizes = [{"width": 64, "height": 128}, *([ODD] if name in LENIENT else [])]
    for size in sizes:
        subjects.choose(str(saved(name)), {**size, "extra": STRICT.get(name, {})}, "cpu")


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.usefixtures("nothing_loads")
def test_sizes_that_the_zoo_takes_are_not_refused(name: str) -> None:
    for width in (1024, 1023) if name in LENIENT else (1024,):
        subjects.choose(name, {"width": width, "height": 512}, "cpu")


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("command", [("generate", "x", "-m", "demo"), ("verify", "demo")])
def test_the_demo_refuses_an_odd_size_in_one_line_before_it_loads(
    accel_cli: Cli, command: tuple[str, ...]
) -> None:
    done = accel_cli(*command, "--size", "193")
    assert (done.code, done.out) == (2, "")
    assert done.complaint.startswith("accel: --size 193x193: width and height have to be multiples")


def test_what_cannot_be_told_from_configurations_is_left_to_the_whole_pipeline(
    copied: Folder,
) -> None:
    folder = copied("sd15")
    (folder / "unet" / "config.json").write_text("{", encoding="utf-8")
    choice = subjects.choose(str(folder), ODD, "cpu")
    with pytest.raises(BadInput, match="cannot be loaded"):
        choice.load()


def test_a_part_with_code_of_its_own_is_not_guessed_at(copied: Folder) -> None:
    folder = copied("sd15")
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    index["vae"] = ["my_vae", "MyVae"]
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "vae" / "my_vae.py").write_text("raise SystemExit('ran')", encoding="utf-8")
    odd = {"width": 65, "height": 65}
    assert subjects.choose(str(folder), odd, "cpu", trust=Trust(code=True)).settings.width == 65
