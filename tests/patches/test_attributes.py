"""Attributes as values to compare: whatever a user keeps there, it is quick and raises nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accel.patches.attributes import DEPTH, Kept, value_of
from accel.patches.state import StateProbe


def closing_over_each_other(count: int, scale: list[int]) -> list[Callable[[], Any]]:
    handlers: list[Callable[[], Any]] = []
    handlers += [lambda: (handlers, scale) for _ in range(count)]
    return handlers


def test_functions_that_close_over_each_other_are_told_once_a_depth() -> None:
    """Told anew wherever they are met, twenty of them would be 20 to the fourth."""
    kept = Kept()
    value_of(closing_over_each_other(20, []), DEPTH, kept)
    assert len(kept) <= DEPTH * 20**2


def test_what_they_close_over_is_compared() -> None:
    scale = [1]
    handlers = closing_over_each_other(3, scale)
    before = value_of(handlers, DEPTH, Kept())
    assert value_of(handlers, DEPTH, Kept()) == before
    scale[0] = 2
    assert value_of(handlers, DEPTH, Kept()) != before


def test_tensors_as_keys_are_not_asked_whether_they_are_equal() -> None:
    kept = Kept()
    one, other = ({torch.ones(2): 1} for _ in range(2))
    assert value_of(one, DEPTH, kept) != value_of(other, DEPTH, kept)
    assert value_of(one, DEPTH, kept) == value_of(one, DEPTH, kept)


class Record(dict[str, Any]):
    """As many write it: what is no item raises KeyError, not AttributeError."""

    __getattr__ = dict.__getitem__


class Wrapper:
    """Answers for what it wraps, and nothing else."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


@pytest.mark.parametrize("kind", [Record, Wrapper])
def test_things_are_not_asked_for_attributes_that_they_may_not_have(kind: type[Any]) -> None:
    layer, settings = nn.Sequential(nn.Linear(2, 2)), kind()
    layer.settings = layer[0].settings = settings
    layer[0].forward = lambda x: (x, settings)
    probe = StateProbe(layer)
    before = probe()
    assert probe() == before
    layer[0].settings = kind()
    probe()
    probe.remember()()
