"""Prefixes that were cached before the model changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from accel.prefill.runner import PrefillRunner
from tests.accel.prefill.tiny import TinyModel, prompts_of


def replaced(model: TinyModel) -> None:
    value: Any = model.module.layers[0].v
    value.weight = torch.nn.Parameter(value.weight * 3)


def scaled(model: TinyModel) -> None:
    with torch.no_grad():
        model.module.layers[0].v.weight.mul_(3)


@pytest.mark.parametrize("change", [replaced, scaled])
def test_are_refused(change: Callable[[TinyModel], None], device: torch.device) -> None:
    model = TinyModel(device)
    runner = PrefillRunner(model, max_tokens=64, attention="reference", cache_tokens=128)
    [prefix, prompt] = prompts_of(20, 5)
    handle = runner([prefix]).handle(0)
    change(model)
    with pytest.raises(ValueError, match="before the model changed"):
        runner([prompt], prefix=handle)
    again = runner([prefix]).handle(0)
    with torch.no_grad():
        own = model.own(torch.tensor([*prefix, *prompt], device=device))[-len(prompt) :]
    assert (runner([prompt], prefix=again).hidden(0) - own).abs().max() < 1e-4
