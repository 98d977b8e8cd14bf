"""Globals that the code of a patched module reads are followed when they change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from accel.patches import code
from tests.patches.stateful import Stateful, equal_for

SCALE = 2
SETTINGS = {"scale": 2, "unread": [nn.ReLU()][:0]}
LIMITS: dict[str, Any] = {"scale": 2}
UNREAD = 2


def scaled(y: torch.Tensor) -> torch.Tensor:
    return y * SCALE


class Named(nn.Module):
    """Reads a number, a dict, functions and what functions read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * LIMITS["scale"]

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(scaled(self.layer(x)))


def other(y: torch.Tensor) -> torch.Tensor:
    return y * 3


HERE = sys.modules[__name__]
CHANGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a number that a function reads": lambda patch: patch.setattr(HERE, "SCALE", 5),
    "what is in a dict": lambda patch: patch.setitem(LIMITS, "scale", 5),
    "a dict": lambda patch: patch.setattr(HERE, "LIMITS", {"scale": 5}),
    "a function": lambda patch: patch.setattr(HERE, "scaled", other),
    "a function of torch.nn.functional": lambda patch: patch.setattr(F, "gelu", other),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_global_changed(what: str, sim: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    plain, patched = Named().to(sim), Named().to(sim)
    patched.load_state_dict(plain.state_dict())
    accel.patch(patched, capture="always")
    with torch.no_grad():
        for call in range(8):
            if call == 4:
                assert accel.report(patched).parts[0].replays > 0
                CHANGES[what](monkeypatch)
            x = torch.full((2, 4), float(call), device=sim)
            assert torch.equal(patched(x).cpu(), plain(x).cpu()), call
    [said] = accel.report(patched).parts[0].changes
    assert "a global, " in said


def test_a_global_that_a_forward_given_to_a_layer_reads(
    sim: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give(m: Stateful) -> None:
        plain = m.layer.forward
        m.layer.forward = lambda x: plain(x) * SCALE  # type: ignore[method-assign]

    changed = [3, 5]
    change = lambda m: monkeypatch.setattr(HERE, "SCALE", changed.pop())  # noqa: E731
    equal_for(4, lambda: Stateful(None, lambda m: 1), sim, prepare=give)
    monkeypatch.setattr(HERE, "SCALE", 2)
    model = Stateful(None, lambda m: 1).to(sim)
    give(model)
    accel.patch(model, capture="always")
    with torch.no_grad():
        x = torch.ones(2, 4, device=sim)
        before = [model(x).cpu() for _ in range(4)][-1]
        change(model)
        assert torch.equal(model(x).cpu(), before / 2 * 5)


def test_a_forward_that_counts_in_a_global_is_eager(sim: torch.device) -> None:
    def counting(m: Stateful) -> int:
        LIMITS["calls"] = LIMITS.get("calls", 0) + 1
        return int(LIMITS["calls"])

    try:
        model = accel.patch(Stateful(None, counting).to(sim), capture="always")
        with torch.no_grad():
            for _ in range(5):
                model(torch.ones(2, 4, device=sim))
        assert LIMITS["calls"] >= 5
        assert accel.report(model).parts[0].replays == 0
    finally:
        LIMITS.pop("calls", None)


def test_what_no_call_reads_is_not_watched() -> None:
    names = {name for _, name in code.places_named([Named])}
    assert {"SCALE", "LIMITS", "scaled", "F", "gelu"} <= names
    assert not names & {"UNREAD", "SETTINGS", "equal_for", "relu"}


def test_a_cache_that_is_filled_is_no_change() -> None:
    LIMITS["table"] = torch.ones(1)
    try:
        named = code.Globals([Named])
        LIMITS["table"] = torch.ones(2)
        assert named.are_the_same()
    finally:
        del LIMITS["table"]


def test_files_of_one_name_are_told_apart() -> None:
    boxes: list[dict[str, Any]] = [{"__name__": "custom", "SCALE": n} for n in (1, 2)]
    functions = [eval("lambda: SCALE", box) for box in boxes]
    before = code.Globals([], functions).values
    boxes[0]["SCALE"] = 3
    assert code.Globals([], functions).values != before
