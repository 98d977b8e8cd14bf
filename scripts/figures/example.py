"""The forwards that the figures follow. `docs/how-it-works.md` shows `attend` and `forward`."""

from __future__ import annotations

import torch
from torch import Tensor

from accel.graph import eager_on_graph


@eager_on_graph
def attend(h: Tensor) -> Tensor:
    """Stands for a kernel whose plan the host makes anew for every call."""
    return torch.softmax(h @ h.T, dim=-1) @ h


def forward(x: Tensor) -> Tensor:
    """Three segments: the host read breaks the first, `attend` the second."""
    h = x * 2 + 1
    if (h > 10).any():  # the host reads one bool, and Python goes one way or the other
        h = h.clamp(max=10)
    h = attend(h.tanh())
    return h + x


def twelve_ops(x: Tensor) -> Tensor:
    """Nothing to break: the whole forward comes out as one segment."""
    for _ in range(4):
        x = torch.tanh(x @ x) + x
    return x
