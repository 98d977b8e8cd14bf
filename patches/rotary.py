"""Rotary position embeddings of a language model in one kernel, or three a tensor, instead of five.

Knows the function that the files of transformers' models call by one name, and whether one of them
turns the halves of a head as most do: it is tried. A stand-in takes its place in the model's file
and stays there, since taking it away would race with other threads; it is the original but for a
thread that is inside `fused_rotary`. Does not know which models use what (llm.py).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from accel.patches.kernels import PRECISIONS, kernels_for
from accel.patches.trial import CLOSE, drawn, out_of_sight

NAME = "apply_rotary_pos_emb"

_here = threading.local()
_installing = threading.Lock()
_stand_ins: dict[Callable[..., Any], Callable[..., Any] | None] = {}
"""By function; None for those that turn otherwise, and for stand-ins."""


@contextlib.contextmanager
def fused_rotary(decoder: nn.Module) -> Iterator[None]:
    """While open, the rotary embeddings that this thread computes in the files of `decoder`'s
    classes take fewer kernels, and one rounding less.

    >>> with fused_rotary(nn.Linear(2, 2)):
    ...     pass
    """
    for name in {type(module).__module__ for module in decoder.modules()}:
        _install(sys.modules.get(name))
    outer, _here.fused = getattr(_here, "fused", False), True
    try:
        yield
    finally:
        _here.fused = outer


def _install(file: Any) -> None:
    own = getattr(file, NAME, None)
    if not isinstance(own, types.FunctionType) or _stand_ins.get(own, own) is None:
        return
    with _installing:
        if own not in _stand_ins:
            _stand_ins[own] = _stand_in(own) if _turns_halves(own) else None
        stand_in = _stand_ins[own]
        if stand_in is not None:  # several files may have one function, or get it back
            _stand_ins[stand_in] = None
            setattr(file, NAME, stand_in)


def _stand_in(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def apply(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not getattr(_here, "fused", False):
            return own(*args, **kwargs)
        if len(args) != 4 or kwargs or not _fits(*args):
            return own(*args, **kwargs)
        q, k, cos, sin = args
        if _fits_a_kernel(*args) and (kernels := kernels_for(q.device)) is not None:
            return kernels.turn(q, k, cos, sin)
        return turned(q, cos, sin), turned(k, cos, sin)

    return apply


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x`, `[batch, heads, tokens, dim]`, turned by angles whose cosines and sines are `[batch,
    tokens, dim]`: each half of a head with the other (RoFormer, arXiv 2104.09864, in GPT-NeoX's
    layout).

    >>> x, angle = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[0.5, 0.5]]])
    >>> [round(y, 3) for y in turned(x, angle.cos(), angle.sin()).flatten().tolist()]
    [0.878, 0.479]
    """
    cos, sin, half = cos.unsqueeze(1), sin.unsqueeze(1), x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


def _fits(*args: Any) -> bool:
    """Whether these are `q, k, cos, sin` of whole heads, and of one precision."""
    if {type(x) for x in args} != {torch.Tensor} or len({x.dtype for x in args}) > 1:
        return False
    q, k, cos, sin = args
    angles, width = (q.shape[0], q.shape[-2], q.shape[-1]), q.shape[-1]
    return (
        (q.dim(), k.dim()) == (4, 4)
        and k.shape[-2:] == q.shape[-2:]
        and cos.shape == sin.shape == angles
        and width % 2 == 0
    )


def _fits_a_kernel(*args: torch.Tensor) -> bool:
    """Whether these are of one sequence, as a kernel can address and compute them."""
    q, k, _, _ = args
    if len(q) != 1 or len(k) != 1 or q.dtype not in PRECISIONS:
        return False
    return all(x.stride(-1) == 1 and x.device == q.device for x in args)


def _turns_halves(own: Callable[..., Any]) -> bool:
    """Whether a function does to `q, k, cos, sin` what `turned` does, and no more exactly (some do
    it in float32). Tried out of sight of a recorder, which would take it for a part of the forward.
    """
    draw = torch.Generator("cpu").manual_seed(7)
    try:
        with out_of_sight():
            for dtype, close in CLOSE.items():
                q, k = (drawn(draw, 2, heads, 5, 32).to(dtype) for heads in (3, 2))
                cos, sin = (drawn(draw, 2, 5, 32).to(dtype) for _ in range(2))
                found = own(q, k, cos, sin)
                ours = turned(q, cos, sin), turned(k, cos, sin)
                torch.testing.assert_close(tuple(found), ours, rtol=0, atol=close)
                exact = turned(q.double(), cos.double(), sin.double())
                errors = [(x - exact).norm() for x in (found[0], ours[0])]
                if dtype == torch.bfloat16 and errors[0] <= errors[1]:
                    return False
    except Exception:  # whatever it takes instead: it is no such function
        return False
    return True
