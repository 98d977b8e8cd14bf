"""What is still broken: state that neither the probe compares nor a refused recording puts back."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.patches.stateful import Change, Settings, Stateful, counted, equal_for, refused

BETWEEN: dict[str, tuple[Callable[[], Any], Change, Change]] = {
    "an object with slots": (
        Settings,
        lambda m: m.own.scale,
        lambda m: setattr(m.own, "scale", 7),
    ),
}


@pytest.mark.parametrize("what", BETWEEN)
@pytest.mark.xfail(strict=True, reason="open: the probe compares it by identity alone")
def test_changed_between_calls(what: str, sim: torch.device) -> None:
    own, scale, change = BETWEEN[what]
    equal_for(8, lambda: Stateful(own(), scale), sim, change)


BY_THE_FORWARD: dict[str, tuple[Callable[[], Any], Change]] = {
    "an object with slots": (Settings, counted),
    "an iterator": (lambda: itertools.count(1), lambda m: next(m.own)),
    "a generator of random numbers": (lambda: random.Random(0), lambda m: m.own.random()),
}


@pytest.mark.parametrize("what", BY_THE_FORWARD)
@pytest.mark.xfail(strict=True, reason="open: the probe compares it by identity alone")
def test_changed_by_the_forward(what: str, sim: torch.device) -> None:
    own, scale = BY_THE_FORWARD[what]
    equal_for(6, lambda: Stateful(own(), scale), sim)


def raised(m: Stateful) -> float:
    m.own += 1
    return float(m.own[0]) * refused(m)


PUT_BACK: dict[str, tuple[Callable[[], Any], Change]] = {
    "an object with slots": (Settings, lambda m: counted(m) * refused(m)),
    "a numpy array": (lambda: np.ones(1), raised),
}


@pytest.mark.parametrize("what", PUT_BACK)
@pytest.mark.xfail(strict=True, reason="open: a refused recording does not put it back")
def test_changed_once_by_a_call_whose_recording_is_refused(what: str, sim: torch.device) -> None:
    own, scale = PUT_BACK[what]
    equal_for(3, lambda: Stateful(own(), scale), sim)
