"""RMS norms of a language model in one kernel each instead of eight: ours, or torch's function.

Knows norms by what they compute, not by their names: a module with nothing but a weight is one if
its forward, when tried, gives what `torch.nn.functional.rms_norm` gives. In half precision that
rounds once where most models' own norms round twice; our kernel, where kernels.py has it, too, and
takes half of the time for rows of a head. In place for one thread at a time, for the length of one
body call.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from accel.patches.forward import ForOneThread
from accel.patches.kernels import PRECISIONS, WIDEST, kernels_for
from accel.patches.trial import CLOSE, out_of_sight, settings_of

_EPSILONS = "variance_epsilon", "eps"
_SIZES = (1e-3, 1.0, 1e3)
"""Of the rows that a norm is tried on: beside the smallest the epsilon counts."""

Form = Callable[[torch.Tensor, torch.Tensor, "float | None"], torch.Tensor]
"""Normed rows of `[..., size]`, a weight of `[size]` and an epsilon."""


def _plain(rows: torch.Tensor, weight: torch.Tensor, epsilon: float | None) -> torch.Tensor:
    return functional.rms_norm(rows, weight.shape, weight, epsilon)


def _zero_centred(rows: torch.Tensor, weight: torch.Tensor, epsilon: float | None) -> torch.Tensor:
    """With a weight that says by how much to leave one. In float32 throughout, as Gemma has it."""
    scale = 1 + weight.float()
    return functional.rms_norm(rows.float(), weight.shape, scale, epsilon).type_as(rows)


_forms: dict[Hashable, Form | None] = {}
"""What was found for a class, its forward and certain settings."""


@contextlib.contextmanager
def fused_norms(decoder: nn.Module) -> Iterator[int]:
    """While open, RMS norms in `decoder` are one kernel each if this thread calls them; in other
    threads they are their own. Gives how many there are. One thread at a time per decoder.

    >>> decoder = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4, eps=1e-6))
    >>> with fused_norms(decoder) as count:
    ...     count, "forward" in vars(decoder[1])
    (1, True)
    >>> "forward" in vars(decoder[1])
    False
    """
    found = [(module, form) for module in decoder.modules() if (form := form_of(module))]
    fused = [ForOneThread(norm, _computing(norm, form)) for norm, form in found]
    try:
        for forward in fused:
            forward.install()
        yield len(fused)
    finally:
        for forward in fused:
            forward.retire()


def form_of(module: nn.Module) -> Form | None:
    """How to compute what a module does, if that is to divide by the root mean square over the last
    dimension and to multiply by its weight, or by one more than that, and nothing else. None for
    all others, and where someone has replaced the forward on the object.

    >>> form_of(nn.RMSNorm(4, eps=1e-6)) is None, form_of(nn.LayerNorm(4, bias=False)) is None
    (False, True)
    """
    weight = module._parameters.get("weight")
    if type(weight) is not nn.Parameter or weight.dim() != 1 or not weight.is_floating_point():
        return None
    if len(module._parameters) > 1 or module._modules or module._buffers:
        return None
    if (settings := settings_of(module)) is None:
        return None
    # In words, in which True is not 1. A subclass may have the same forward, but other helpers.
    key = type(module), type(module).forward, len(weight), repr(settings)
    if key not in _forms:
        forms = (form for form in (_plain, _zero_centred) if _computes(module, form))
        _forms[key] = next(forms, None)
    return _forms[key]


def _computes(module: Any, form: Form) -> bool:
    """Whether they agree, tried with a copy of the module that has another weight, and out of sight
    of a recorder: it would take the trial for a part of the forward."""
    size = len(module.weight)
    twin = copy.copy(module)
    try:
        with out_of_sight():
            draw = torch.Generator("cpu").manual_seed(size)
            rows = torch.randn(1, len(_SIZES), 2, size, generator=draw, device="cpu")
            rows *= torch.tensor(_SIZES, device="cpu")[:, None, None]
            weight = torch.randn(size, generator=draw, device="cpu")
            for dtype, close in CLOSE.items():
                vars(twin)["_parameters"] = {"weight": nn.Parameter(weight.to(dtype))}
                own = type(module).forward(twin, rows.to(dtype))
                ours = form(rows.to(dtype), twin.weight, _epsilon(twin))
                torch.testing.assert_close(own, ours, rtol=close, atol=0)
    except Exception:  # whatever it needs more: it is no such norm
        return False
    return True


def _epsilon(norm: Any) -> float | None:
    names = (name for name in _EPSILONS if hasattr(norm, name))
    epsilon: float | None = getattr(norm, next(names))
    return epsilon


def _computing(norm: Any, form: Form) -> Callable[..., Any]:
    """The norm's forward in that form, or its own where torch's function would compute otherwise (a
    mix of precisions, autocast). A kernel of ours computes what the form does."""

    def instead(own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not _in_one_kernel(args[0], norm.weight):
            return own(*args, **kwargs)
        rows, weight, epsilon = args[0], norm.weight, _epsilon(norm)
        kernels = kernels_for(rows.device) if _fits_a_kernel(rows, weight) else None
        if kernels is None or epsilon is None:
            return form(rows, weight, epsilon)
        return kernels.norm(rows, weight, epsilon, form is _zero_centred)

    return instead


def _in_one_kernel(hidden: Any, weight: torch.Tensor) -> bool:
    if type(hidden) is not torch.Tensor or hidden.dtype != weight.dtype:
        return False
    if hidden.shape[-1:] != weight.shape:  # one weight for all of a row
        return False
    kind = hidden.device.type
    return not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind))


def _fits_a_kernel(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a kernel of ours can address these rows, and hold one."""
    if rows.dtype not in PRECISIONS or rows.device != weight.device:
        return False
    return rows.is_contiguous() and weight.is_contiguous() and len(weight) <= WIDEST
