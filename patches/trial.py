"""Trials: does one function compute what another does, on the host, in two precisions?

Knows how near two results have to be, that nobody may see the trial, and which settings of a module
its verdict holds for. Does not know what is tried (norms.py, rotary.py, gated.py).
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps}
"""Differences, of numbers near one, that another order of sums and roundings explains."""


@contextlib.contextmanager
def out_of_sight() -> Iterator[None]:
    """While open, no recorder sees what is tried: it would take it for a part of the forward.

    >>> with out_of_sight():
    ...     torch.is_grad_enabled()
    False
    """
    with _disable_current_modes(), torch.no_grad():
        yield


def drawn(draw: torch.Generator, *shape: int) -> torch.Tensor:
    """Numbers between -1 and 1, on the host.

    >>> drawn(torch.Generator("cpu"), 2, 3).shape
    torch.Size([2, 3])
    """
    return torch.rand(shape, generator=draw, device="cpu") * 2 - 1


_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_VALUES = {type(None), bool, int, float, str, torch.dtype}
"""Kinds of settings that stay what they are: others may change, and are not kept alive here."""


def settings_of(module: nn.Module) -> dict[str, Any] | None:
    """The attributes of a module that are its own; None if one is no plain value: a forward that
    someone has put there, say.

    >>> settings_of(nn.RMSNorm(4, eps=1e-6))["eps"], settings_of(nn.Bilinear(1, 1, 1))["training"]
    (1e-06, True)
    """
    settings = {name: x for name, x in vars(module).items() if name not in _OF_EVERY_MODULE}
    return settings if are_plain(settings.values()) else None


def are_plain(values: Iterable[Any]) -> bool:
    """Whether none of these can change.

    >>> are_plain((1, "a", (2.0, None))), are_plain(([],))
    (True, False)
    """
    return all(map(_is_plain, values))


def _is_plain(x: Any) -> bool:
    if type(x) is functools.partial and isinstance(x.func, types.BuiltinFunctionType):
        holder = x.func.__self__  # a tensor's method has the tensor
        fixed = holder is None or isinstance(holder, types.ModuleType)
        return fixed and are_plain((*x.args, *x.keywords.values()))
    return type(x) in _VALUES or (isinstance(x, tuple) and are_plain(x))
