"""State beyond plain attributes: followed when it changes, put back when a recording is refused."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.patches.stateful import Change, Stateful, appended, equal_for, refused


def deep() -> Any:
    return {"a": {"b": {"c": {"d": {"e": [2]}}}}}


BETWEEN: dict[str, tuple[Callable[[], Any], Change, Change]] = {
    "a deque": (lambda: deque([2]), lambda m: sum(m.own), lambda m: m.own.append(3)),
    "an object in a dict": (
        lambda: {"attn": types.SimpleNamespace(scale=2)},
        lambda m: m.own["attn"].scale,
        lambda m: setattr(m.own["attn"], "scale", 7),
    ),
    "an object in lists": (
        lambda: [[types.SimpleNamespace(scale=2)]],
        lambda m: m.own[0][0].scale,
        lambda m: setattr(m.own[0][0], "scale", 7),
    ),
    "a deep number": (
        deep,
        lambda m: m.own["a"]["b"]["c"]["d"]["e"][0],
        lambda m: m.own["a"]["b"]["c"]["d"]["e"].append(m.own["a"]["b"]["c"]["d"]["e"].pop() + 1),
    ),
    "a bytearray": (lambda: bytearray(b"ab"), lambda m: len(m.own), lambda m: m.own.append(1)),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_changed_between_calls(what: str, sim: torch.device) -> None:
    own, scale, change = BETWEEN[what]
    equal_for(8, lambda: Stateful(own(), scale), sim, change)


def test_a_deque_changed_by_the_forward(sim: torch.device) -> None:
    equal_for(6, lambda: Stateful(deque(), appended), sim)


def steeper(m: Stateful) -> float:
    m.own.negative_slope += 1
    return float(m.own.negative_slope) * refused(m)


def shifted(m: Stateful) -> Any:
    m.own.running_mean = m.own.running_mean + 1
    return m.own.running_mean * refused(m)


def doubled(m: Stateful) -> float:
    m.layer.weight = nn.Parameter(m.layer.weight * 2, requires_grad=False)
    return refused(m)


PUT_BACK: dict[str, tuple[Callable[[], Any], Change]] = {
    "a deque": (deque, lambda m: appended(m) * refused(m)),
    "a setting of a torch layer": (lambda: nn.LeakyReLU(1.0), steeper),
    "a buffer of a torch layer, replaced": (lambda: nn.BatchNorm1d(4).eval(), shifted),
    "a parameter of a torch layer, replaced": (lambda: None, doubled),
}


@pytest.mark.parametrize("what", PUT_BACK)
def test_changed_once_by_a_call_whose_recording_is_refused(what: str, sim: torch.device) -> None:
    own, scale = PUT_BACK[what]
    equal_for(3, lambda: Stateful(own(), scale), sim)
