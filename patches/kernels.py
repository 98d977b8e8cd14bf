"""Where there are kernels of our own: on a CUDA device, if Triton is there and what it compiles
computes what torch does.

Knows whether they work; what they are for, norms.py's neighbours rotary.py and gated.py know.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional

from accel.patches.trial import CLOSE, out_of_sight


@functools.cache
def kernels_for(device: torch.device) -> Any:
    """The module `triton_kernels` if it works on `device`, else None. The first question compiles
    and waits: ask before anything is recorded.

    >>> kernels_for(torch.device("cpu")) is None
    True
    """
    if device.type != "cuda":
        return None
    try:
        kernels = import_module("accel.patches.triton_kernels")
        with torch.cuda.device(device), torch.inference_mode(False), out_of_sight():
            _try(kernels, device)
    except Exception:  # no Triton, no C compiler for it, a GPU that it does not know
        return None
    return kernels


def _try(kernels: Any, device: torch.device) -> None:
    """Raises if a kernel does not compile, or computes something else."""
    from accel.patches.rotary import turned

    for dtype, close in CLOSE.items():
        q, k, cos, sin, rows = (
            _drawn(shape).to(device, dtype)
            for shape in ((1, 4, 3, 8), (1, 2, 3, 8), (1, 3, 8), (1, 3, 8), (5, 8))
        )
        found = *kernels.turn(q, k, cos, sin), kernels.gate(rows, rows, tanh=False)
        wanted = turned(q, cos, sin), turned(k, cos, sin), functional.silu(rows) * rows
        torch.testing.assert_close(found, wanted, rtol=0, atol=close)


def _drawn(shape: tuple[int, ...]) -> torch.Tensor:
    draw = torch.Generator("cpu").manual_seed(len(shape))
    return torch.rand(shape, generator=draw, device="cpu") * 2 - 1
