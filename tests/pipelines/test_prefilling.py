"""Reading texts where graphs can be captured: on the simulated device, and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel.pipelines import language_loading, prefilling
from accel.pipelines.language_models import resolve
from accel.pipelines.loading import Placement
from accel.pipelines.prefill_tables import print_prefill
from accel.pipelines.texts import tokenized

PROMPTS = ("a red circle on a blue", "two big", "a house beside a tree on the beach")


def _answered(device: torch.device, **options: Any) -> dict[str, Any]:
    order = prefilling.Order(PROMPTS, max_tokens=128, attention="reference", repeats=2, **options)
    speaker = language_loading.load(resolve("demo"), Placement(device, torch.float32))
    return prefilling.answered(order, speaker, tokenized(speaker, PROMPTS, 128))


def _tokens(answer: dict[str, Any]) -> list[str]:
    return [token["token"] for token in answer.get("scores", answer.get("next"))]


def _values(answer: dict[str, Any]) -> list[float]:
    told = answer["scores"][1:] if "scores" in answer else answer["next"]
    return [token["log_probability"] for token in told]


@pytest.mark.parametrize("score", [False, True])
@pytest.mark.parametrize("mode", ["breakable", "full"])
def test_graphs_are_captured_and_say_what_eager_says(
    device: torch.device, mode: str, score: bool
) -> None:
    eager = _answered(device, mode="eager", score=score)
    found = _answered(device, mode=mode, score=score)
    for one, other in zip(found["prompts"], eager["prompts"], strict=True):
        assert _tokens(one) == _tokens(other)
        assert _values(one) == pytest.approx(_values(other), abs=1e-4)
    report = found["report"]
    assert [bucket["bucket"] for bucket in report["buckets"]] == [128, 64]
    assert (report["captures"], report["eager_passes"]) == (2, 0)
    assert report["replays"] == 4  # two rounds that are not counted, two that are
    assert eager["report"]["captures"] == 0


def test_the_models_own_forward_agrees(device: torch.device) -> None:
    found = _answered(device, mode="breakable", compare=True)
    assert found["difference"]["largest_log_probability"] < 1e-3
    assert found["difference"]["same_next_token"] == 3
    assert len(found["own"]["seconds"]) == len(found["prefill"]["seconds"]) == 2


def test_what_was_captured_is_shown(
    device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _answered(device, mode="full", max_requests=2)
    print_prefill({"model": "demo", "dtype": "float32", "device": "d", **found})
    shown = capsys.readouterr().out
    assert "captured 2 graphs in " in shown
    assert "3 prompts, 19 tokens, 2 batches; demo, float32, d" in shown
    assert "prefill, full, attention reference" in shown
    assert "eager x" not in shown
