"""Gated units with one kernel less: which modules are taken for one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from accel.patches import gated
from accel.patches.gated import activation_of, fused_gates
from tests.patches.counting_kernels import CountingKernels
from tests.patches.gated_units import CPU, SIZE, Act, Limited, Unit, unit_of
from tests.patches.llm_families import OPTIONS, tiny_lm

SILU, TANH = False, True
FAMILIES = {
    "llama": SILU,
    "mistral": SILU,
    "qwen2": SILU,
    "qwen3": SILU,
    "qwen3_moe": None,  # experts: an activation, but projections of another kind
    "gemma2": TANH,
    "gemma3": TANH,
    "phi3": None,  # one projection for both
    "gpt_oss": None,
    "deepseek_v3": SILU,
    "glm_moe_dsa": SILU,
}


@pytest.fixture(autouse=True)
def _verdicts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated, "_found", {})


@pytest.mark.parametrize("family", OPTIONS)
def test_units_of_families_are_known_by_what_they_compute(family: str) -> None:
    found = [activation_of(m) for m in tiny_lm(family).modules()]
    wanted = FAMILIES[family]
    assert [x for x in found if x is not None] == ([] if wanted is None else [wanted] * 2)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return functional.silu(x)


KNOWN: dict[str, tuple[Any, bool]] = {
    "module": (Act(), SILU),
    "torch's": (nn.SiLU(), SILU),
    "in place": (nn.SiLU(inplace=True), SILU),
    "tanh": (nn.GELU("tanh"), TANH),
    "function": (_silu, SILU),
    "torch's function": (functional.silu, SILU),
    "lambda": (lambda x: x * torch.sigmoid(x), SILU),
}


@pytest.mark.parametrize("name", KNOWN)
def test_activations_are_known_by_what_they_compute(name: str) -> None:
    activation, tanh = KNOWN[name]
    assert activation_of(unit_of(activation)) is tanh


def _with_closure(scale: list[float]) -> Callable[..., torch.Tensor]:
    return lambda x: functional.silu(x) * scale[0]


def _with_default(x: torch.Tensor, scale: Any = [1.0]) -> torch.Tensor:  # noqa: B006
    return functional.silu(x) * scale[0]


def _with_keyword(x: torch.Tensor, *, scale: Any = [1.0]) -> torch.Tensor:  # noqa: B006
    return functional.silu(x) * scale[0]


def _of_a_class_with_a_closure(scale: list[float]) -> nn.Module:
    class Scaled(Act):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.silu(x) * scale[0]

    return Scaled()


def changed(change: Callable[[Any], Any]) -> Act:
    activation = Act()
    change(activation)
    return activation


UNKNOWN: dict[str, Any] = {
    "other": nn.ReLU(),
    "exact gelu": nn.GELU(),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "limited above": Limited(high=7),
    "limited high above": Limited(high=1000),
    "limited below": Limited(low=-7),
    "of two": lambda x, y: functional.silu(x) * y,
    "closure": _with_closure([1.0]),
    "a class's closure": _of_a_class_with_a_closure([1.0]),
    "default": _with_default,
    "keyword": _with_keyword,
    "object": partial(functional.silu),
    "builtin": torch.tanh,
    "nothing": 3,
    "hook": changed(lambda m: m.register_forward_hook(lambda *_: None)),
    "pre-hook": changed(lambda m: m.register_forward_pre_hook(lambda *_: None)),
    "parameter": changed(lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(1)))),
    "buffer": changed(lambda m: m.register_buffer("scale", torch.ones(1))),
    "child": changed(lambda m: m.add_module("inner", nn.Identity())),
    "own forward": changed(lambda m: setattr(m, "forward", torch.relu)),
    "setting": changed(lambda m: setattr(m, "scale", [1.0])),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_activations_are_left_alone(name: str, kernels: CountingKernels) -> None:
    assert activation_of(unit_of(Act())) is SILU and activation_of(unit_of(Limited())) is SILU
    unit = unit_of(UNKNOWN[name])
    with fused_gates(unit, CPU) as count:
        assert count == 0 and "forward" not in vars(unit)


class Swapped(Unit):
    def forward(self, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class Sum(Unit):
    def forward(self, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))


class Residual(Unit):
    def forward(self, x: Any) -> Any:
        return x + self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Both(Unit):
    def forward(self, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.act_fn(self.up_proj(x)))


class AsksForMore(Unit):
    scale = 1.0

    def forward(self, x: Any) -> Any:
        return self.scale * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class MayAskForMore(Unit):
    def forward(self, x: Any) -> Any:
        product = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return getattr(self, "scale", 1.0) * self.down_proj(product)


class Super(Unit):
    def forward(self, x: Any) -> Any:
        return super().forward(x)


class Default(Unit):
    def forward(self, x: Any, scale: Any = [1.0]) -> Any:  # noqa: B006
        return scale[0] * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _in_a_closure(scale: list[float]) -> type[Unit]:
    class Closed(Unit):
        def forward(self, x: Any) -> Any:
            return scale[0] * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    return Closed


class Unhashable:
    """What no cache takes as a key."""

    __hash__ = None

    def __call__(self, x: Any) -> Any:
        return x


class Called(Unit):
    forward = Unhashable()


OTHERS = [Swapped, Sum, Residual, Both, AsksForMore, MayAskForMore, Super, Default, Called]
OTHERS += [_in_a_closure([1.0])]


@pytest.mark.parametrize("kind", OTHERS)
def test_other_units_are_left_alone(kind: type[Unit], kernels: CountingKernels) -> None:
    unit, alike = unit_of(kind=kind), unit_of(kind=type("Alike", (Unit,), {}))
    with fused_gates(nn.Sequential(unit, alike), CPU) as count:
        assert count == 1 and "forward" not in vars(unit)


def test_scripted_modules_are_left_alone(kernels: CountingKernels) -> None:
    scripted = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    with fused_gates(nn.Sequential(scripted, unit_of()), CPU) as count:
        assert count == 1


def test_an_activation_whose_class_changes_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = unit_of(Act())
    assert activation_of(unit) is SILU
    monkeypatch.setattr(Act, "forward", lambda self, x: functional.gelu(x, approximate="tanh"))
    assert activation_of(unit) is TANH
    monkeypatch.setattr(Act, "forward", lambda self, x: functional.relu(x))
    assert activation_of(unit) is None
    monkeypatch.setattr(Act, "forward", Unhashable())
    assert activation_of(unit) is None


def test_units_are_tried_out_of_sight_of_modes() -> None:
    unit = unit_of(Act())
    with FakeTensorMode():
        assert activation_of(unit) is SILU


def test_a_forward_that_someone_put_there_stays(kernels: CountingKernels) -> None:
    unit = unit_of()
    unit.forward = lambda x: x + 1
    with fused_gates(unit, CPU) as count:
        assert count == 0
        assert unit(torch.ones(2, SIZE)).tolist() == [[2.0] * SIZE] * 2
    assert "forward" in vars(unit)


def test_without_kernels_nothing_is_fused(device: torch.device) -> None:
    decoder = nn.Sequential(unit_of()).to(device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gated, "kernels_for", lambda device: None)
        with fused_gates(decoder, device) as count:
            assert count == 0 and "forward" not in vars(decoder[0])
