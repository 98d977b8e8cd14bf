"""Where there are kernels of our own: on a CUDA device, if Triton is there and what it compiles
computes what torch does.

Knows whether they work; what they are for, rotary.py, gated.py and norms.py know.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional

from accel.patches.trial import CLOSE, drawn, out_of_sight

PRECISIONS = frozenset((torch.float32, torch.bfloat16, torch.float16))
"""That kernels take: computing in float32, they would round others worse than torch."""
WIDEST = 16384
"""Elements of the longest row that a norm's kernel takes: it holds all of one at once."""


@functools.cache
def kernels_for(device: torch.device) -> Any:
    """The module `triton_kernels` if it works on `device`, else None; of tensors without memory, if
    it works on the GPU of this machine. The first question compiles and waits: ask before anything
    is recorded.

    >>> kernels_for(torch.device("cpu")) is None
    True
    """
    if device.type == "meta" and torch.cuda.is_available():
        return kernels_for(torch.device("cuda", torch.cuda.current_device()))
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

    draw = torch.Generator("cpu").manual_seed(3)
    for dtype, close in CLOSE.items():
        q, k, cos, sin, gated, by, weight = (
            drawn(draw, *shape).to(device, dtype)
            for shape in ((1, 4, 3, 8), (1, 2, 3, 8), (1, 3, 8), (1, 3, 8), (5, 8), (5, 8), (8,))
        )
        for _ in range(2):  # the second launch of a kind takes another way
            found = (
                *kernels.turn(q, k, cos, sin),
                *(kernels.gate(gated, by, tanh) for tanh in (False, True)),
                *(kernels.norm(gated, weight, 0.01, centred) for centred in (False, True)),
            )
            silu, gelu = functional.silu(gated), functional.gelu(gated, approximate="tanh")
            normed = functional.rms_norm(gated.float(), (8,), eps=0.01)
            wanted = (
                *(turned(q, cos, sin), turned(k, cos, sin), silu * by, gelu * by),
                *((normed * (x + weight.float())).to(dtype) for x in (0, 1)),
            )
            torch.testing.assert_close(found, wanted, rtol=0, atol=close)
