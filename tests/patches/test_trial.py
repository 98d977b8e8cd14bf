"""Trials: what of a module a verdict holds for, and that nobody sees the trial."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel.patches.trial import are_plain, out_of_sight, settings_of


class Seen(TorchDispatchMode):
    """Counts ops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


def test_nobody_sees_a_trial() -> None:
    x = torch.ones(2, requires_grad=True)
    with Seen() as seen:
        with out_of_sight():
            assert not (x + 1).requires_grad
        assert seen.ops == 0
        assert (x + 1).requires_grad and seen.ops == 1


def test_settings_are_what_a_module_has_beside_every_modules_own() -> None:
    module = nn.Linear(2, 3)
    module.scale = 0.5  # type: ignore[assignment]
    expected = {"in_features": 2, "out_features": 3, "scale": 0.5, "training": True}
    assert settings_of(module) == expected
    assert settings_of(nn.Identity().eval()) == {"training": False}


PLAIN: list[Any] = [
    None,
    True,
    2.0,
    "a",
    torch.float16,
    (1, ("a", None)),
    torch.Size([2]),
    partial(torch._C._nn.gelu, approximate="tanh"),
    partial(torch.softmax, dim=-1),
]
MAY_CHANGE: list[Any] = [
    [],
    {},
    (1, [2]),
    torch.ones(1),
    nn.Identity(),
    len,
    lambda x: x,
    partial(torch.softmax, torch.ones(1)),
    partial(torch.softmax, dim=[-1]),
    partial(torch.ones(1).mul),
    partial([1].append),
    partial(lambda x: x),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda x: type(x).__name__)
def test_values_that_stay_what_they_are(value: Any) -> None:
    assert are_plain([value])
    module = nn.Identity()
    module.setting = value
    assert settings_of(module) == {"training": True, "setting": value}


@pytest.mark.parametrize("value", MAY_CHANGE, ids=lambda x: type(x).__name__)
def test_values_that_may_change_are_no_settings(value: Any) -> None:
    assert not are_plain([None, value])
    module = nn.Identity()
    object.__setattr__(module, "setting", value)
    assert settings_of(module) is None
