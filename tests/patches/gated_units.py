"""Gated units and activations of one's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

SIZE, WIDTH = 8, 16
CPU = torch.device("cpu")


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
