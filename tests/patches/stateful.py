"""A module with a state of any kind, and whether it is followed behind a patch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import accel

Change = Callable[[Any], Any]


@dataclasses.dataclass(slots=True)
class Settings:
    scale: int = 2


class Stateful(nn.Module):
    """Gives `scale(self)` times a layer's output; it is made with `own` as an attribute."""

    def __init__(self, own: Any, scale: Change) -> None:
        super().__init__()
        self.layer, self.own, self.scale = nn.Linear(4, 4), own, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale(self)


def equal_for(
    calls: int,
    make: Callable[[], Stateful],
    sim: torch.device,
    change: Change | None = None,
    prepare: Change = lambda m: None,
) -> None:
    """Calls two that are `prepare`d, one of them patched; half-way `change` is made to both."""
    torch.set_num_threads(1)
    twins = []
    for _ in range(2):
        torch.manual_seed(0)
        twins.append(make().to(sim))
        prepare(twins[-1])
    accel.patch(twins[1], capture="always")
    for i in range(calls):
        if change is not None and i == calls // 2:
            [change(twin) for twin in twins]
        with torch.no_grad():
            plain, patched = (twin(torch.full((2, 4), float(i), device=sim)) for twin in twins)
        assert torch.equal(plain.cpu(), patched.cpu()), i


def appended(m: Stateful) -> int:
    """One more call, counted in a list or a deque."""
    m.own.append(1)
    return len(m.own)


def counted(m: Stateful) -> int:
    """One more call, counted in an attribute."""
    m.own.scale += 1
    return int(m.own.scale)


def refused(m: Stateful) -> float:
    """1, and no recording: it draws on the host."""
    return float(torch.rand(1) * 0 + 1)
