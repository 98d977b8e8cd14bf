"""State beyond plain attributes: followed when it changes, put back when a recording is refused."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import accel
from tests.patches.stateful import Change, Stateful, appended, equal_for, refused


def deep() -> Any:
    return {"a": {"b": {"c": {"d": {"e": [2]}}}}}


def closed_over() -> Any:
    """Hands on, and another to set it: a variable and an object that only functions know."""
    number, settings = 1, types.SimpleNamespace(scale=2)

    def change() -> None:
        nonlocal number
        number += 1
        settings.scale += 2

    return {"scale": lambda: number * settings.scale, "change": change}


class Method:
    value = 2

    def scale(self, times: Any = (1,), *, plus: Any = (0,)) -> int:
        return int(self.value * times[0] + plus[0])


def function() -> Any:
    def scaled(box: Any = [2]) -> Any:  # noqa: B006
        return scaled.more * box[0]  # type: ignore[attr-defined]

    scaled.more = 1  # type: ignore[attr-defined]
    return scaled


def called(m: Any) -> Any:
    return m.own()


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
    "a numpy array": (
        lambda: np.full(6000, 2.0),
        lambda m: float(m.own[0]),
        lambda m: m.own.fill(7),
    ),
    "what functions close over": (
        closed_over,
        lambda m: m.own["scale"](),
        lambda m: m.own["change"](),
    ),
    "a method's object": (
        lambda: Method().scale,
        called,
        lambda m: setattr(m.own.__self__, "value", 7),
    ),
    "a partial function's argument": (
        lambda: functools.partial(Method().scale, [2], plus=[1]),
        called,
        lambda m: m.own.args[0].insert(0, 7),
    ),
    "a default argument": (function, called, lambda m: m.own.__defaults__[0].insert(0, 7)),
    "a function's attribute": (function, called, lambda m: setattr(m.own, "more", 7)),
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


def counted_in_a_closure(m: Stateful) -> float:
    m.own["change"]()
    return float(m.own["scale"]()) * refused(m)


PUT_BACK: dict[str, tuple[Callable[[], Any], Change]] = {
    "a deque": (deque, lambda m: appended(m) * refused(m)),
    "what functions close over": (closed_over, counted_in_a_closure),
    "a setting of a torch layer": (lambda: nn.LeakyReLU(1.0), steeper),
    "a buffer of a torch layer, replaced": (lambda: nn.BatchNorm1d(4).eval(), shifted),
    "a parameter of a torch layer, replaced": (lambda: None, doubled),
}


@pytest.mark.parametrize("what", PUT_BACK)
def test_changed_once_by_a_call_whose_recording_is_refused(what: str, sim: torch.device) -> None:
    own, scale = PUT_BACK[what]
    equal_for(3, lambda: Stateful(own(), scale), sim)


class Adapter(nn.Module):
    """Puts its forward in the place of a layer's, as sd-scripts' LoRA does; the model lacks it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.more, self.scale = nn.Linear(4, 4).to(layer.weight.device), 1.0
        self.layers_forward, layer.forward = layer.forward, self.forward  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers_forward(x) + self.more(x) * self.scale


def strengthen(adapter: Adapter) -> None:
    adapter.scale = 2.0


def replace_weight(adapter: Adapter) -> None:
    adapter.kept, old = adapter.more.weight.data, adapter.more.weight  # type: ignore[assignment]
    old.data = old.data * 2


@pytest.mark.parametrize("change", [strengthen, replace_weight])
def test_a_module_behind_a_layers_forward(change: Change, sim: torch.device) -> None:
    equal_for(
        10,
        lambda: Stateful(None, lambda m: 1),
        sim,
        lambda m: change(m.layer.forward.__self__),
        lambda m: Adapter(m.layer),
    )


def test_a_forward_that_counts_in_its_closure(sim: torch.device) -> None:
    """Prompt-to-prompt does: a controller that every attention layer's new forward closes over."""

    def control(m: Stateful) -> None:
        controller, plain = types.SimpleNamespace(calls=0), m.layer.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            controller.calls += 1
            return plain(x) * (2 if controller.calls > 5 else 1)

        m.layer.forward = forward  # type: ignore[method-assign]

    equal_for(8, lambda: Stateful(None, lambda m: 1), sim, prepare=control)


def a_class() -> Any:
    """An object of a class that no other test shares."""

    class Scaling:
        value = 2
        table = [1]  # noqa: RUF012

        def plus(self) -> int:
            return 0

        def __call__(self, times: Any = [1]) -> int:  # noqa: B006
            return self.value * self.table[0] * times[0] + self.plus()

    return Scaling()


OF_CLASSES: dict[str, Change] = {
    "an attribute": lambda own: setattr(type(own), "value", 7),
    "a list": lambda own: type(own).table.insert(0, 7),
    "a method": lambda own: setattr(type(own), "plus", lambda self: 7),
    "what a call does": lambda own: setattr(type(own), "__call__", lambda self: 7),
    "a default": lambda own: type(own).__call__.__defaults__[0].insert(0, 7),
}


@pytest.mark.parametrize("what", OF_CLASSES)
def test_changed_on_a_class(what: str, sim: torch.device) -> None:
    """Processors are changed that way: `AttnProcessor2_0.__call__ = mine`."""
    change = OF_CLASSES[what]
    equal_for(8, lambda: Stateful(a_class(), called), sim, lambda m: change(m.own))


def test_a_method_of_a_modules_class_replaced(sim: torch.device) -> None:
    class Own(Stateful):
        def more(self) -> int:
            return 1

    def replace(m: Own) -> None:
        type(m).more = lambda self: 3  # type: ignore[method-assign]

    equal_for(8, lambda: Own(None, lambda m: m.more()), sim, replace)


def test_it_is_said_that_a_class_was_changed(sim: torch.device) -> None:
    module = accel.patch(Stateful(a_class(), called).to(sim), capture="always")
    with torch.no_grad():
        for call in range(5):
            type(module.own).value = 2 + call // 3
            module(torch.ones(2, 4, device=sim))
    [what] = accel.report(module).parts[0].changes
    assert "a method or an attribute of a class" in what


def test_it_is_said_what_of_which_object_was_changed(sim: torch.device) -> None:
    module = accel.patch(Stateful(Method().scale, called).to(sim), capture="always")
    with torch.no_grad():
        for call in range(5):
            module.own.__self__.value = 2 + call // 3
            module(torch.ones(2, 4, device=sim))
    [what] = accel.report(module).parts[0].changes
    assert "attribute 'value' of a Method that modules or their functions share" in what
