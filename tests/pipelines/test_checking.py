import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import accel
from accel.pipelines import benchmark, checking, explaining, subjects, tiny
from accel.pipelines.generation import make
from accel.pipelines.loading import Placement
from accel.pipelines.settings import Settings
from accel.pipelines.subjects import Subject


@pytest.fixture
def subject(device: torch.device) -> Subject:
    pipe = tiny.pipeline("sd15").to(device)
    pipe.set_progress_bar_config(disable=True)
    settings = Settings("a red circle", seed=1, steps=4, width=64, height=64, model="tiny")
    return Subject(pipe, settings, Placement(device, torch.float32))


def test_replays_are_verified(subject: Subject) -> None:
    result = checking.verify(subject, capture="always")
    assert result["equal"], result["verdict"]
    assert result["nothing_accelerated"] is None
    assert result["verdict"].startswith("equal: latents and PNG bytes of 6 runs, ")
    assert result["calls"]["equal"] and result["calls"]["replays"] >= 20
    unet = _part(result, "unet")
    assert unet["captures"] >= 1
    assert unet["replays"] >= 10


def test_a_difference_is_followed_to_its_module(subject: Subject) -> None:
    _count_in(subject)
    result = checking.verify(subject, capture="always")
    assert not result["equal"]
    first = result["calls"]["first_difference"]
    assert (first["component"], first["step"]) == ("unet", 0)
    assert first["submodule"] == "conv_act"
    assert result["verdict"].startswith("differs: patched, run 1 (latents, largest difference")
    assert "; first: unet, call 0 at step 0, in conv_act, patched, run 1" in result["verdict"]
    dropped = {part["name"] for part in result["report"]["parts"] if part["declined"]}
    assert dropped == {"unet"}
    assert "forward" not in vars(subject.pipe.unet)


def test_a_pipeline_that_differs_from_itself_is_told_apart(subject: Subject) -> None:
    _count_in(subject, monotone=True)
    result = checking.verify(subject, runs=1, capture="always")
    assert not result["equal"]
    assert "not because of accel: two eager runs of one seed already differ" in result["verdict"]
    assert "unet, call 0 at step 0, in conv_act" in result["verdict"]


@pytest.mark.parametrize(("fault", "code"), [(False, 0), (True, 1)])
def test_the_command_exits_with_the_answer(
    subject: Subject,
    accel_cli: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    fault: bool,
    code: int,
) -> None:
    if fault:
        _count_in(subject)
    choice = subjects.Choice(subject.settings, subject.where, None, lambda: subject)
    monkeypatch.setattr(subjects, "choose", lambda *arguments, **options: choice)
    done = accel_cli("verify", "demo", "--capture", "always", "--runs", "3", "--json")
    assert done.code == code, done.err
    result = json.loads(done.out)
    assert result["equal"] is not fault
    assert result["calls"]["passed"] is not fault


def test_explaining_names_the_parts(subject: Subject) -> None:
    result = explaining.explain(subject, capture="always")
    assert _part(result, "unet")["graphs"][0]["segments"] >= 1
    assert _part(result, "text_encoder")["captures"] == 1
    accel.unpatch(subject.pipe)


def test_the_benchmark_compares_replays(subject: Subject) -> None:
    result = benchmark.bench(subject, repeats=1, capture="always")
    assert result["proven"] and result["inactive"] is None
    assert _part(result, "unet")["replays"] >= 4
    patched = result["patched"]
    assert len(patched["warm_up_s"]) > 2
    assert patched["first_s"] == patched["warm_up_s"][0]
    settled = patched["median_s"] * len(patched["warm_up_s"])
    assert patched["setup_s"] == pytest.approx(sum(patched["warm_up_s"]) - settled)
    assert result["ratio"] == pytest.approx(result["eager"]["median_s"] / patched["median_s"])


def _count_in(subject: Subject, *, monotone: bool = False) -> None:
    """Puts an activation with a counter that no guard sees into the U-Net; it counts from 0 again
    after each picture, or (`monotone`) never."""
    ticks = itertools.count()  # whose place nothing shows, as a list's length would

    def shifted(x: torch.Tensor) -> torch.Tensor:
        tick = next(ticks)
        number = tick if monotone or not period else tick % period
        return torch.nn.functional.silu(x) + 0.01 * number

    class Shifted(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return shifted(x)

    period = 0
    subject.pipe.unet.conv_act = Shifted()
    make(subject.pipe, subject.inputs)
    period = next(ticks)
    ticks = itertools.count(period)
    assert period >= 4


def _part(result: dict[str, Any], name: str) -> dict[str, Any]:
    return next(part for part in result["report"]["parts"] if part["name"] == name)
