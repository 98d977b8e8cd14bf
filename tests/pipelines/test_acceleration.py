"""Where nothing can be accelerated, one line says so, and says it before the work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.pipelines import acceleration, language_loading, loading

Cli = Callable[..., Any]
Folder = Callable[[str], Path]
CPU = torch.device("cpu")
SMALL = ("--size", "64", "--steps", "1", "--device", "cpu")


def test_a_device_that_records_lacks_nothing(
    device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    assert acceleration.missing(device) is None
    acceleration.tell_missing(device, "so much for that")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (False, "no CUDA GPU here, so everything runs eagerly; accel doctor says more"),
        (True, "it runs on the cpu; --device cuda takes the GPU"),
    ],
)
def test_what_is_missing_and_what_changes_that_is_one_line(
    there: bool,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    acceleration.tell_missing(CPU)
    acceleration.tell_missing(CPU, "runs are counted")
    assert capsys.readouterr().err.splitlines() == [
        f"accel: nothing is accelerated: {words}",
        f"accel: nothing is accelerated: {words}; runs are counted",
    ]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What stood on stderr when weights were about to be loaded, once a load."""
    heard: list[str] = []

    def listening(load: Callable[..., Any]) -> Callable[..., Any]:
        def loaded(*arguments: Any, **options: Any) -> Any:
            heard.append(capsys.readouterr().err)
            return load(*arguments, **options)

        return loaded

    for module in (loading, language_loading):
        monkeypatch.setattr(module, "load", listening(module.load))
    return heard


@pytest.mark.parametrize(
    ("command", "still"),
    [
        (("verify", "SD15", "--runs", "1", *SMALL), "; eager runs are compared with each other"),
        (("bench", "SD15", "--repeats", "1", *SMALL), "; two times the same is timed"),
        (("prefill", "a red", "--repeats", "1", "--max-tokens", "64", "--device", "cpu"), ""),
    ],
)
def test_it_is_said_before_anything_is_loaded_or_drawn(
    accel_cli: Cli, saved: Folder, heard: list[str], command: tuple[str, ...], still: str
) -> None:
    done = accel_cli(*(saved("sd15") if part == "SD15" else part for part in command))
    assert (done.code, done.err) == (0, "")
    (said,) = heard
    assert said == f"accel: nothing is accelerated: {acceleration.missing(CPU)}{still}\n"


def test_generate_says_it_once_and_not_per_picture(
    accel_cli: Cli, saved: Folder, heard: list[str]
) -> None:
    done = accel_cli("generate", "a b", "-n", "3", "-m", saved("sd15"), *SMALL, "-o", "{index}.png")
    assert (done.code, done.err) == (0, "")
    (said,) = heard
    assert len(said.splitlines()) == 1 and "nothing is accelerated" in said


def test_generate_says_nothing_where_nothing_was_to_be_accelerated(
    accel_cli: Cli, saved: Folder
) -> None:
    done = accel_cli(
        *("generate", "a b", "-m", saved("sd15"), *SMALL, "-o", "x.png", "--mode", "off", "--json")
    )
    assert (done.code, done.err) == (0, "")
    result = json.loads(done.out)
    assert (result["mode"], result["report"]) == ("off", None)


def test_the_mode_in_json_is_the_one_that_made_the_pictures(accel_cli: Cli, saved: Folder) -> None:
    done = accel_cli("generate", "a b", "-m", saved("sd15"), *SMALL, "-o", "x.png", "--json")
    result = json.loads(done.out)
    assert (done.code, result["mode"]) == (0, "off")
    assert result["report"]["inactive"] and result["report"]["parts"] == []


def test_a_patched_device_is_reported_in_its_mode(
    accel_cli: Cli, saved: Folder, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = loading.Placement(device, torch.float32)
    monkeypatch.setattr(loading, "placement", lambda *arguments: where)
    done = accel_cli(
        *("generate", "a b", "-m", saved("sd15"), *SMALL, "-o", "x.png", "--json"),
    )
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["mode"] == "exact"


@pytest.mark.parametrize("model", ["sd15", "sdxl"])
def test_explain_answers_without_loading_or_drawing(
    accel_cli: Cli, saved: Folder, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """A folder and a name of the zoo, whose weights would be gigabytes."""
    monkeypatch.setattr(loading, "load", lambda *arguments, **options: pytest.fail("loaded"))
    monkeypatch.setattr(
        "accel.pipelines.zoo.build", lambda *arguments, **options: pytest.fail("built")
    )
    name = saved("sd15") if model == "sd15" else model
    done = accel_cli("explain", name, "--device", "cpu")
    assert (done.code, done.err) == (0, "")
    (line,) = done.out.splitlines()
    assert line.startswith("nothing is accelerated: ")
    result = json.loads(accel_cli("explain", name, "--device", "cpu", "--json").out)
    assert result["report"]["inactive"] and result["report"]["parts"] == []
    assert (result["settings"]["model"], result["settings"]["steps"]) == (str(name), 4)
