from typing import Any

import pytest
import torch

import accel
from accel.pipelines import benchmark, checking, explaining, tiny
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
    unet = _part(result, "unet")
    assert unet["captures"] >= 1
    assert unet["replays"] >= 10


def test_explaining_names_the_parts(subject: Subject) -> None:
    result = explaining.explain(subject, capture="always")
    assert _part(result, "unet")["graphs"][0]["segments"] >= 1
    assert _part(result, "text_encoder")["captures"] == 1
    accel.unpatch(subject.pipe)


def test_the_benchmark_compares_replays(subject: Subject) -> None:
    result = benchmark.bench(subject, repeats=1, capture="always")
    assert result["proven"] and result["inactive"] is None
    assert _part(result, "unet")["replays"] >= 4
    assert len(result["patched"]["warm_up_s"]) > 2


def _part(result: dict[str, Any], name: str) -> dict[str, Any]:
    return next(part for part in result["report"]["parts"] if part["name"] == name)
