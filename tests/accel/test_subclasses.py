"""Weights that are tensor subclasses: followed, or declined with a reason.

Quantized weights come so: a wrapper without memory of its own around int8 values and scales. Guards
have to look inside, and at what the module has now, not at what a wrapper that is gone once held.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.accel.common import MakeRunner, MakeTwin, counts, net, scribble
from tests.accel.quantized_tensor import Hidden, Int8, Nested, Opaque, Tagged, quantize
from tests.accel.same import assert_same
from tests.accel.twin import Twin

KINDS: dict[str, type[Opaque]] = {"flat": Int8, "nested": Nested, "behind properties": Hidden}


def call(both: Twin, *seeds: int) -> None:
    for seed in seeds:
        both(seed, lambda draw: (draw(4, 8),))


@pytest.fixture
def both(twin: MakeTwin) -> Twin:
    """A network with Int8 weights that was recorded and replayed."""
    return recorded(twin, Int8)


def recorded(twin: MakeTwin, kind: type[Opaque]) -> Twin:
    both = twin(lambda: quantize(net(), kind))
    call(both, 0, 1, 2)
    assert counts(both.runner) == (1, 1, 1)
    assert type(both.watched[0].weight) is kind
    return both


def change(both: Twin, do: Callable[[Any], Any]) -> list[Any]:
    with torch.no_grad():
        return [do(model) for model in (both.plain, both.watched)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_with_such_weights_is_recorded(twin: MakeTwin, kind: str) -> None:
    both = recorded(twin, KINDS[kind])
    call(both, 3, 4)
    assert counts(both.runner) == (1, 3, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inner", ["values", "scale"])
def test_inner_values_changed_in_place_are_followed(twin: MakeTwin, kind: str, inner: str) -> None:
    both = recorded(twin, KINDS[kind])
    change(both, lambda model: innermost(model[0].weight, inner).mul_(-1))
    call(both, 3, 4)
    assert counts(both.runner) == (1, 3, 1)


def innermost(x: Any, attribute: str) -> Tensor:
    """The plain tensor that is reached by `attribute`, over and over."""
    while isinstance(x, Opaque):
        x = getattr(x, attribute)
    assert isinstance(x, Tensor)
    return x


def negate_scale(model: Any) -> Any:
    weight = model[0].weight
    old, weight.scale = weight.scale, -weight.scale
    return old


def negate_inner_scale(model: Any) -> Any:
    inner = model[0].weight.scale
    old, inner.scale = inner.scale, -inner.scale
    return old


def negate_values(model: Any) -> Any:
    weight = model[0].weight
    old, weight.values = weight.values, -weight.values
    return old


def another_weight(model: Any) -> Any:
    old = model[0].weight
    new = old.each(lambda x: x.clone())
    new.scale.neg_()
    model[0].weight = nn.Parameter(new, requires_grad=False)
    return old


def a_plain_weight(model: Any) -> Any:
    old = model[0].weight
    model[0].weight = nn.Parameter(-old.dequantized(), requires_grad=False)
    return old


def swapped(model: Any) -> Any:
    old = model[0].weight
    other = nn.Parameter(old.each(lambda x: x.clone()), requires_grad=False)
    other.scale.neg_()
    torch.utils.swap_tensors(model[0].weight, other)
    return other


def to_the_host_and_back(model: Any) -> Any:
    device, old = model[0].weight.device, model[0].weight.each(lambda x: x)
    model.to("cpu")
    model.to(device)
    model[0].weight.scale.neg_()
    return old


def loaded(model: Any) -> Any:
    old = model[0].weight
    state = {"weight": old.each(lambda x: -x)} | {"bias": model[0].bias.data}
    model[0].load_state_dict(state, assign=True)
    return old


def inner_storage_replaced(model: Any) -> Any:
    weight = model[0].weight
    old = weight.scale.detach()
    weight.scale.data = -old
    return old


MOVES: dict[str, Callable[[Any], Any]] = {
    "the scale re-assigned": negate_scale,
    "the values re-assigned": negate_values,
    "the scale's data replaced": inner_storage_replaced,
    "the parameter replaced": another_weight,
    "the parameter replaced by a plain one": a_plain_weight,
    "the parameter swapped": swapped,
    "moved to the host and back": to_the_host_and_back,
    "loaded by assignment": loaded,
}


@pytest.mark.parametrize("kind", ["flat", "behind properties"])
@pytest.mark.parametrize("move", MOVES)
def test_what_moves_is_noticed_when_the_old_is_gone(twin: MakeTwin, kind: str, move: str) -> None:
    both = recorded(twin, KINDS[kind])
    change(both, MOVES[move])
    gc.collect()
    scribble(both.device, (8, 16, 64, 128))
    call(both, 3, 4)
    assert both.report.captures == 2
    assert both.report.recaptures == 1


@pytest.mark.parametrize("kind", ["flat", "behind properties"])
@pytest.mark.parametrize("move", MOVES)
def test_what_moves_is_noticed_when_the_old_is_kept(twin: MakeTwin, kind: str, move: str) -> None:
    both = recorded(twin, KINDS[kind])
    olds = change(both, MOVES[move])
    call(both, 3, 4)
    assert both.report.captures == 2
    del olds


def test_the_inner_tensor_of_an_inner_tensor_re_assigned(twin: MakeTwin) -> None:
    both = recorded(twin, Nested)
    olds = change(both, negate_inner_scale)
    call(both, 3, 4)
    assert both.report.captures == 2
    del olds


def test_a_plain_setting_of_the_subclass_changed(both: Twin) -> None:
    change(both, lambda model: setattr(model[0].weight, "gain", -2.0))
    call(both, 3, 4)
    assert both.report.captures == 2


def test_inner_tensors_are_not_kept_alive(device: torch.device, runner: MakeRunner) -> None:
    model: Any = quantize(net()).to(device)
    watched = runner(model, module=model)
    with torch.no_grad():
        for _ in range(3):
            watched(torch.ones(2, 8, device=device))
    assert watched.report.captures == 1
    scale = weakref.ref(model[0].weight.scale.untyped_storage())
    another_weight(model)
    gc.collect()
    assert scale() is None


class TestWithoutFlatten:
    """Subclasses that do not tell torch what they are made of."""

    def test_a_wrapper_as_a_weight_is_declined(self, twin: MakeTwin, device: torch.device) -> None:
        both = twin(lambda: quantize(net().to(device), Opaque))  # torch cannot move it later
        call(both, 0, 1, 2)
        change(both, negate_scale)
        call(both, 3, 4)
        assert both.report.replays == 0
        assert "a weight is a Opaque" in str(both.report.declined)

    class Handed(nn.Module):
        """In its first call, the layer takes over what its weight brought along."""

        def __init__(self) -> None:
            super().__init__()
            weight: Any = nn.Parameter(torch.randn(8, 8).as_subclass(Tagged), requires_grad=False)
            self.weight, self.state = weight, types.SimpleNamespace(gain=None)

        def forward(self, x: Tensor) -> Tensor:
            if getattr(self.weight, "gain", None) is not None:
                self.state.gain, self.weight.gain = self.weight.gain, None
            gain = self.state.gain
            return x @ self.weight.as_subclass(Tensor) * (0 if gain is None else gain)

    def test_a_weight_that_hands_over_its_scale_in_the_first_call(
        self, twin: MakeTwin, device: torch.device
    ) -> None:
        both = twin(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        call(both, 0, 1, 2)

        def swap(model: Any) -> None:
            torch.manual_seed(1)
            model[1] = self.Handed().to(device)
            model[1].weight.gain = torch.full((8,), 3.0, device=device)

        change(both, swap)
        for seed in range(3, 8):
            call(both, seed)
        assert both.watched[1].state.gain.tolist() == [3.0] * 8

    class Gained(nn.Module):
        """Multiplies by a weight of another class, and by that weight's gain."""

        def __init__(self) -> None:
            super().__init__()
            weight: Any = nn.Parameter(torch.randn(8, 8).as_subclass(Tagged), requires_grad=False)
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight * getattr(self.weight, "gain", 1.0)).as_subclass(Tensor)

    def test_a_tensor_of_another_class_as_a_weight(self, twin: MakeTwin) -> None:
        both = twin(self.Gained)
        assert type(both.watched.weight) is Tagged
        call(both, 0, 1, 2)
        change(both, lambda model: model.weight.neg_())
        call(both, 3)
        assert counts(both.runner) == (1, 2, 1)
        change(both, lambda model: setattr(model.weight, "data", -model.weight.data))
        scribble(both.device)
        call(both, 4, 5)
        assert counts(both.runner) == (2, 3, 1)

    @pytest.mark.parametrize("gain", [-2.0, 2])
    def test_a_setting_of_such_a_weight(self, twin: MakeTwin, gain: float) -> None:
        both = twin(self.Gained)
        change(both, lambda model: setattr(model.weight, "gain", 2.0))
        call(both, 0, 1, 2)
        assert counts(both.runner) == (1, 1, 1)
        change(both, lambda model: setattr(model.weight, "gain", gain))
        call(both, 3, 4)
        assert both.report.captures == 2

    def test_a_table_of_another_class_is_held(
        self, device: torch.device, runner: MakeRunner
    ) -> None:
        def table(by: float) -> Tensor:
            return torch.full((64,), by, device=device).as_subclass(Tagged)

        shelf = {"table": table(5.0)}
        watched = runner(lambda x: torch.add(x, shelf["table"]).as_subclass(Tensor))
        x = torch.ones(64, device=device)
        with torch.no_grad():
            for _ in range(3):
                assert watched(x).tolist() == [6.0] * 64
            assert watched.report.captures == 1
            shelf["table"] = table(7.0)
            scribble(device, (64,))
            for _ in range(3):
                assert watched(x).tolist() == [8.0] * 64


class TestAmongAttributes:
    """Subclasses that a module keeps beside its weights."""

    class Scaled(nn.Module):
        """A layer and a table, kept as a plain attribute."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.table: Any = Int8.of(torch.randn(8, 8))

        def to(self, *args: Any, **kwargs: Any) -> Any:
            self.table = self.table.to(*args, **kwargs)
            return super().to(*args, **kwargs)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x) @ self.table
            return out

    @pytest.fixture
    def both(self, twin: MakeTwin) -> Twin:
        both = twin(self.Scaled)
        call(both, 0, 1, 2)
        assert counts(both.runner) == (1, 1, 1)
        return both

    def test_values_changed_in_place_are_followed(self, both: Twin) -> None:
        change(both, lambda model: model.table.scale.neg_())
        call(both, 3, 4)
        assert counts(both.runner) == (1, 3, 1)

    @pytest.mark.parametrize("kept", [True, False])
    @pytest.mark.parametrize("inner", ["values", "scale"])
    def test_an_inner_tensor_re_assigned(self, both: Twin, inner: str, kept: bool) -> None:
        def negate(model: Any) -> Any:
            old = getattr(model.table, inner)
            setattr(model.table, inner, -old)
            return old

        olds = change(both, negate)
        if not kept:
            olds.clear()
            scribble(both.device, (8, 16, 64))
        call(both, 3, 4)
        del olds


def test_a_scale_on_the_host(device: torch.device, runner: MakeRunner) -> None:
    """A single number on the host is read when an op is launched: baked, so watched."""
    model: Any = nn.Sequential(nn.Linear(8, 8)).requires_grad_(False)
    weight = Int8.of(model[0].weight)
    values = weight.values.to(device)
    model.to(device)
    model[0].weight = nn.Parameter(Int8(values, torch.tensor(0.5)), requires_grad=False)
    watched = runner(model, module=model)
    x = torch.ones(2, 8, device=device)
    with torch.no_grad():
        for turn in range(6):
            if turn == 3:
                model[0].weight.scale.fill_(0.25)
            if turn == 4:
                old, model[0].weight.scale = model[0].weight.scale, torch.tensor(2.0)
            assert_same(watched(x), model(x))
    assert watched.report.captures > 1
    del old
