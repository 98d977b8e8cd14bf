"""Gated units with one kernel less: which modules are taken for one, and what stays as it was."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from accel.patches import gated
from accel.patches.gated import activation_of, fused_gates
from tests.patches.counting_kernels import CountingKernels
from tests.patches.llm_families import OPTIONS, own_hidden, prompts_of, tiny_lm

SIZE, WIDTH = 8, 16
SILU, TANH = False, True
CPU = torch.device("cpu")
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


class Unit(nn.Module):
    """A gated unit of one's own."""

    def __init__(self, activation: Any = None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(SIZE, WIDTH, bias=False)
        self.up_proj = nn.Linear(SIZE, WIDTH, bias=False)
        self.down_proj: nn.Module = nn.Linear(WIDTH, SIZE, bias=False)
        self.act_fn: Any = nn.SiLU() if activation is None else activation

    def forward(self, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Act(nn.Module):
    """SiLU, written by someone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.silu(x)


class Limited(nn.Module):
    """SiLU between two values."""

    def __init__(self, low: float = -1e9, high: float = 1e9) -> None:
        super().__init__()
        self.low, self.high = low, high

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.silu(x.clamp(min=self.low)).clamp(max=self.high)


def unit_of(activation: Any = None, kind: type[Unit] = Unit) -> Any:
    """A gated unit with weights from a fixed seed."""
    torch.manual_seed(2)
    return kind(activation).requires_grad_(False)


def rows_of(device: torch.device = CPU) -> torch.Tensor:
    torch.manual_seed(4)
    return torch.randn(1, 5, SIZE).to(device)


@pytest.fixture(autouse=True)
def _verdicts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated, "_found", {})


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> CountingKernels:
    """What all devices have for kernels."""
    counting = CountingKernels()
    monkeypatch.setattr(gated, "kernels_for", lambda device: counting)
    return counting


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


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU("tanh")], ids=["silu", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_is_no_larger_than_the_models_own(
    activation: nn.Module, dtype: torch.dtype, device: torch.device, kernels: CountingKernels
) -> None:
    unit, rows = unit_of(activation).to(dtype), torch.randn(1, 200, SIZE).to(dtype)
    exact = copy.deepcopy(unit).double()(rows.double())
    unit, rows = unit.to(device), rows.to(device)
    own = unit(rows)
    with fused_gates(unit, device) as count:
        ours = unit(rows)
    assert (count, kernels.gates, kernels.tanh) == (1, 1, {activation_of(unit)})
    assert (ours.dtype, ours.shape) == (dtype, own.shape)
    assert error(ours.cpu(), exact) <= error(own.cpu(), exact) * 1.05 + 1e-7


def test_other_threads_find_the_models_own(device: torch.device, kernels: CountingKernels) -> None:
    unit, rows, found = unit_of().to(device), rows_of(device), []
    own = unit(rows)
    with fused_gates(unit, device):
        elsewhere = threading.Thread(target=lambda: found.append(unit(rows)))
        elsewhere.start()
        elsewhere.join()
        assert kernels.gates == 0
        unit(rows)
        assert kernels.gates == 1
    assert torch.equal(found[0], own)


def test_everything_is_as_before_when_the_body_fails(kernels: CountingKernels) -> None:
    decoder = nn.Sequential(unit_of(), unit_of(nn.ReLU()), nn.Linear(3, 3))
    before = [dict(vars(m)) for m in decoder.modules()]
    with pytest.raises(ZeroDivisionError), fused_gates(decoder, CPU) as count:
        assert count == 1 and "forward" in vars(decoder[0])
        raise ZeroDivisionError
    assert [dict(vars(m)) for m in decoder.modules()] == before


def test_a_copy_made_meanwhile_has_its_own_weights(kernels: CountingKernels) -> None:
    unit, rows = unit_of(Act()), rows_of()
    own = unit(rows)
    with fused_gates(unit, CPU):
        copies = copy.deepcopy(unit), pickle.loads(pickle.dumps(unit))
    for copied in copies:
        copied.down_proj.weight.mul_(2)
        assert torch.equal(copied(rows), 2 * own)
    assert kernels.gates == 0


def test_hooks_on_the_unit_and_its_projections_still_run(kernels: CountingKernels) -> None:
    unit, seen = unit_of(), []
    for name, module in unit.named_modules():
        if name != "act_fn":
            module.register_forward_hook(lambda *call, name=name: seen.append(name))
    unit.up_proj.register_forward_hook(lambda module, args, output: 2 * output)
    own = unit(rows_of())
    seen.clear()
    with fused_gates(unit, CPU):
        ours = unit(rows_of())
    assert seen == ["gate_proj", "up_proj", "down_proj", ""] and kernels.gates == 1
    torch.testing.assert_close(ours, own)


class Keeping(nn.Linear):
    """A layer that remembers what it gave."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = super().forward(x)
        return self.kept


def kept_by_a_hook(unit: Any) -> Callable[[], torch.Tensor]:
    kept: list[torch.Tensor] = []
    unit.gate_proj.register_forward_hook(lambda module, args, output: kept.append(output))
    return lambda: kept[-1]


def kept_by_a_layer(unit: Any) -> Callable[[], torch.Tensor]:
    unit.gate_proj.__class__ = Keeping
    return lambda: unit.gate_proj.kept  # type: ignore[no-any-return]


def kept_by_a_forward(unit: Any) -> Callable[[], torch.Tensor]:
    kept, own = [], unit.gate_proj.forward
    unit.gate_proj.forward = lambda x: kept.append(own(x)) or kept[-1]
    return lambda: kept[-1]


@pytest.mark.parametrize("keep", [kept_by_a_hook, kept_by_a_layer, kept_by_a_forward])
def test_what_someone_keeps_of_a_projection_stays(
    keep: Callable[[Any], Callable[[], torch.Tensor]], kernels: CountingKernels
) -> None:
    """The product is written where the projection's result was, if that is nobody's."""
    unit, rows = unit_of(), rows_of()
    own = functional.linear(rows, unit.gate_proj.weight)
    kept = keep(unit)
    with fused_gates(unit, CPU):
        unit(rows)
    assert kernels.gates == 1
    assert torch.equal(kept(), own)


def test_the_product_takes_no_memory_of_its_own(kernels: CountingKernels) -> None:
    unit, places = unit_of(), list[int]()
    own = kernels.gate

    def gate(gated: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found = own(gated, *args, **kwargs)
        places.extend((gated.data_ptr(), found.data_ptr()))
        return found

    kernels.gate = gate  # type: ignore[method-assign]
    with fused_gates(unit, CPU):
        unit(rows_of())
    assert len(places) == 2 and len({*places}) == 1


@pytest.mark.parametrize(
    "register", [register_module_forward_hook, register_module_forward_pre_hook]
)
def test_who_listens_to_all_modules_hears_the_activation(
    register: Callable[..., Any], kernels: CountingKernels
) -> None:
    unit, heard = unit_of(), []
    with fused_gates(unit, CPU):
        handle = register(lambda module, *_: heard.append(module))
        try:
            unit(rows_of())
        finally:
            handle.remove()
        assert unit.act_fn in heard and kernels.gates == 0
        unit(rows_of())
    assert kernels.gates == 1


def test_adapters_on_the_projections_still_count(
    device: torch.device, kernels: CountingKernels
) -> None:
    model, (prompt,) = tiny_lm("llama", device), prompts_of(9)
    bare = own_hidden(model, prompt)
    names = ["gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=2, target_modules=names, init_lora_weights=False)
    torch.manual_seed(6)
    get_peft_model(model, config)
    own = own_hidden(model, prompt)
    with fused_gates(model, device) as count:
        ours = own_hidden(model, prompt)
    assert count == kernels.gates == 2
    assert (own - bare).abs().max() > 1e-2
    assert (ours - own).abs().max() < 1e-5


class Through(nn.Module):
    """A projection, and something after it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0
        self.then: Callable[[torch.Tensor], torch.Tensor] = lambda x: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.then(self.inner(x))


def _strided(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _padded(x: torch.Tensor) -> torch.Tensor:
    return functional.pad(x, (0, 1))[..., :-1]


class Subclass(torch.Tensor):
    """A tensor that may know more than its numbers."""


THEN: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "mixed precision": ("up_proj", torch.Tensor.bfloat16),
    "gate in half": ("gate_proj", torch.Tensor.half),
    "one factor a row": ("up_proj", lambda x: x[..., :1].contiguous()),
    "slice of gate": ("gate_proj", _padded),
    "slice of up": ("up_proj", _padded),
    "a subclass": ("gate_proj", lambda x: x.as_subclass(Subclass)),
}


@pytest.mark.parametrize("case", THEN)
def test_what_a_kernel_does_not_take_is_the_models_own_product(
    case: str, device: torch.device, kernels: CountingKernels
) -> None:
    unit, (name, then) = unit_of().to(device), THEN[case]
    projections = [Through(x) for x in (unit.gate_proj, unit.up_proj, unit.down_proj)]
    unit.gate_proj, unit.up_proj, unit.down_proj = projections
    getattr(unit, name).then = then
    own = unit(rows_of(device))
    with fused_gates(unit, device) as count:
        ours = unit(rows_of(device))
    assert torch.equal(ours, own) and (count, kernels.gates) == (1, 0)
    assert [x.calls for x in projections] == [2, 2, 2]


def test_double_precision_is_the_models_own_product(kernels: CountingKernels) -> None:
    unit, rows = unit_of().double(), rows_of().double()
    own = unit(rows)
    with fused_gates(unit, CPU):
        assert torch.equal(unit(rows), own) and kernels.gates == 0


def test_units_on_another_device_are_their_own(
    device: torch.device, kernels: CountingKernels
) -> None:
    unit, rows = unit_of().to(device), rows_of(device)
    own = unit(rows)
    with fused_gates(unit, CPU) as count:
        assert torch.equal(unit(rows), own) and (count, kernels.gates) == (1, 0)


def test_other_arguments_are_the_models_own(kernels: CountingKernels) -> None:
    unit, rows = unit_of(), rows_of()
    own = unit(rows)
    with fused_gates(unit, CPU):
        assert torch.equal(unit(x=rows), own)
        with pytest.raises(TypeError, match="forward"):
            unit(rows, rows)
    assert kernels.gates == 0


def test_compiled_meanwhile_a_unit_is_its_own(kernels: CountingKernels) -> None:
    unit, rows = unit_of(), rows_of()
    own = unit(rows)
    compiled = torch.compile(unit, backend="eager")
    with fused_gates(unit, CPU):
        assert torch.equal(compiled(rows), own) and kernels.gates == 0
