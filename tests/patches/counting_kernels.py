"""Kernels in torch's own ops, for devices that have no Triton; they count their calls."""

from __future__ import annotations

import torch
from torch.nn import functional

from accel.patches.rotary import turned


class CountingKernels:
    """Stands for `triton_kernels`: computes in float32 and rounds once, as these do."""

    def __init__(self) -> None:
        self.turns = self.gates = self.norms = 0
        self.tanh: set[bool] = set()
        self.centred: set[bool] = set()

    def turn(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `triton_kernels.turn`."""
        self.turns += 1
        wide = cos.float(), sin.float()
        return turned(q.float(), *wide).to(q.dtype), turned(k.float(), *wide).to(k.dtype)

    def gate(
        self, gated: torch.Tensor, by: torch.Tensor, tanh: bool, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `triton_kernels.gate`."""
        self.gates += 1
        self.tanh.add(tanh)
        wide = gated.float()
        active = functional.gelu(wide, approximate="tanh") if tanh else functional.silu(wide)
        found = (active * by.float()).to(gated.dtype)
        return found if out is None else out.copy_(found)

    def norm(
        self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float, zero_centred: bool
    ) -> torch.Tensor:
        """As `triton_kernels.norm`."""
        self.norms += 1
        self.centred.add(zero_centred)
        scale = weight.float() + (1 if zero_centred else 0)
        return functional.rms_norm(rows.float(), weight.shape, scale, epsilon).to(rows.dtype)
