"""What tests of cases share: a network, a runner's counters, memory that is scribbled over."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from accel.runner import GraphRunner
from tests.accel.twin import Twin

MakeTwin = Callable[..., Twin]
MakeRunner = Callable[..., GraphRunner]


def net() -> nn.Module:
    """A few layers of 8 features."""
    return nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8), nn.LayerNorm(8))


def counts(runner: GraphRunner) -> tuple[int, int, int]:
    """Captures, replays and eager calls."""
    report = runner.report
    return report.captures, report.replays, report.eager_calls


def scribble(device: torch.device, sizes: tuple[int, ...] = (64, 256, 1024, 4096)) -> None:
    """Takes, fills and frees memory: whatever was freed by mistake now holds something else."""
    taken = [torch.full((n,), 1e9, device=device) for n in sizes for _ in range(8)]
    del taken
