"""Calls of gated units with one kernel less: what they compute, and who notices."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from accel.patches.gated import activation_of, fused_gates
from tests.patches.counting_kernels import CountingKernels
from tests.patches.gated_units import CPU, SIZE, Act, rows_of, unit_of
from tests.patches.llm_families import own_hidden, prompts_of, tiny_lm


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
