"""What the self-test lets through and what it finds, in low precision too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accel.prefill.attention import AttentionGroup
from accel.prefill.runner import PrefillRunner
from tests.accel.prefill.tiny import HIDDEN, TinyModel

Make = Callable[..., PrefillRunner]
DEPTH = 12


def deep(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> TinyModel:
    """Twelve layers, half of them with a window."""
    model = TinyModel(device, (None, 5) * (DEPTH // 2))
    model.module.to(dtype)
    model.dtype = dtype
    for layer in model.module.layers:
        layer.group = AttentionGroup(**{**vars(layer.group), "dtype": dtype})
    return model


def within(model: TinyModel, layer: int, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """In packed passes alone, `change` is made to what a layer returns."""
    body, packed = model.body, []

    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return change(out) if packed else out

    def marked(*args: Any) -> torch.Tensor:
        packed.append(True)
        try:
            return body(*args)
        finally:
            packed.pop()

    model.module.layers[layer].register_forward_hook(hook)
    model.body = marked  # type: ignore[method-assign]


def from_the_row_before(weight: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda out: out + weight * torch.nn.functional.pad(out, (0, 0, 1, 0))[:, :-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_sound_model_is_taken(dtype: torch.dtype, device: torch.device, make: Make) -> None:
    runner = make(deep(device, dtype), mode="eager", attention="reference")
    assert runner.report.declined is None


@pytest.mark.parametrize("layer", [0, 7, DEPTH - 1])
@pytest.mark.parametrize("weight", [1.0, 0.01])
def test_one_layer_that_leaks_is_found(
    layer: int, weight: float, device: torch.device, make: Make
) -> None:
    """A hundredth of the row before is about what bf16 rounds away in one layer."""
    model = deep(device)
    within(model, layer, from_the_row_before(weight))
    assert "self-test" in str(make(model, mode="eager", attention="reference").report.declined)


@pytest.mark.parametrize("layer", [1, DEPTH - 1])
def test_one_layer_with_another_window_is_found(
    layer: int, device: torch.device, make: Make
) -> None:
    model = deep(device)
    attend_alone, found = model._attend_alone, model.module.layers[layer]

    def another(group: AttentionGroup, *tensors: Any) -> torch.Tensor:
        wider = AttentionGroup(**{**vars(group), "window": 9})
        return attend_alone(wider if found.mine else group, *tensors)

    found.mine = False
    found.register_forward_pre_hook(lambda module, args: setattr(module, "mine", True))
    found.register_forward_hook(lambda module, args, out: setattr(module, "mine", False))
    model._attend_alone = another  # type: ignore[method-assign]
    why = str(make(model, mode="eager", attention="reference").report.declined)
    assert "differs from the model's own attention" in why
    assert ("the result" if layer == DEPTH - 1 else f"what layer {layer + 1} reads") in why


def test_wrong_in_the_first_prompt_alone_is_found(device: torch.device, make: Make) -> None:
    model = deep(device)

    def shifted(out: torch.Tensor) -> torch.Tensor:
        return torch.cat([out[:, 1:2].expand(-1, 16, -1), out[:, 16:]], 1)

    within(model, 3, shifted)
    why = str(make(model, mode="eager", attention="reference").report.declined)
    assert "what layer 4 reads differs" in why


@pytest.mark.parametrize("experts", [False, True])
def test_every_fourth_token_alone_is_found_without_experts(
    experts: bool, device: torch.device, make: Make
) -> None:
    """With experts it is as if rounding had sent them elsewhere."""
    model = deep(device)
    model.routes = experts

    def some(out: torch.Tensor) -> torch.Tensor:
        return torch.where(
            torch.arange(out.shape[1], device=out.device)[:, None] % 4 == 3, -out, out
        )

    within(model, 3, some)
    declined = make(model, mode="eager", attention="reference").report.declined
    assert (declined is None) == experts


def test_a_channel_that_is_far_larger_than_the_others_hides_nothing(
    device: torch.device, make: Make
) -> None:
    """Its rounding alone is more than what the others hold."""
    model = deep(device)
    model.module.place.weight.data[:, 7] = 3000.0
    for layer in model.module.layers:
        layer.norm.weight.data[7] = layer.norm2.weight.data[7] = 1e-3
    assert make(model, mode="eager", attention="reference").report.declined is None
    others = torch.full((HIDDEN,), 0.3, dtype=model.dtype, device=device)
    others[7] = 0
    within(model, 5, lambda out: out + others)
    why = str(make(model, mode="eager", attention="reference").report.declined)
    assert "what layer 6 reads differs" in why


def test_without_known_stages_the_result_is_judged(device: torch.device, make: Make) -> None:
    model = deep(device)
    model.stages = []
    assert make(model, mode="eager", attention="reference").report.declined is None
    within(model, 3, from_the_row_before(1.0))
    why = str(make(model, mode="eager", attention="reference").report.declined)
    assert "the result differs" in why


def test_not_a_number_is_found(device: torch.device, make: Make) -> None:
    model = deep(device)
    within(model, 5, lambda out: out * float("nan"))
    why = str(make(model, mode="eager", attention="reference").report.declined)
    assert "what layer 6 reads differs" in why
