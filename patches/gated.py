"""Gated units of a language model, `down(act(gate(x)) * up(x))`, with one kernel less.

Knows such a unit by the names that its forward's code uses, and by what it computes when tried; the
three projections stay calls of their modules, whatever these are. In half precision the product
rounds once where the model's own rounds twice. In place for one thread at a time, for the length of
one body call, and only where kernels.py has a kernel.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as hooks_of_all

from accel.patches.forward import ForOneThread
from accel.patches.kernels import PRECISIONS, kernels_for
from accel.patches.trial import CLOSE, are_plain, out_of_sight, settings_of

NAMES = frozenset(("act_fn", "gate_proj", "up_proj", "down_proj"))
"""All that a gated unit's forward asks for."""
_EXACT: dict[bool, Callable[[torch.Tensor], torch.Tensor]] = {
    False: functional.silu,
    True: lambda x: functional.gelu(x, approximate="tanh"),
}
"""The activations that there are kernels for, by whether they are GELU (as its form with a
hyperbolic tangent)."""
_LINE = *(x / 4 for x in range(-80, 80)), 1e4, -1e4
"""What activations are tried on: some end at a largest value."""

_found: dict[Hashable, bool | None] = {}
"""Which of `_EXACT` a forward with an activation is; None for neither."""


@contextlib.contextmanager
def fused_gates(decoder: nn.Module, device: torch.device) -> Iterator[int]:
    """While open, gated units in `decoder`, on `device`, take one kernel less if this thread calls
    them. Gives how many there are. One thread at a time per decoder.

    >>> with fused_gates(nn.Linear(2, 2), torch.device("cpu")) as count:
    ...     count
    0
    """
    kernels = kernels_for(device)
    modules = () if kernels is None else decoder.modules()
    found = [(unit, tanh) for unit in modules if (tanh := activation_of(unit)) is not None]
    fused = [ForOneThread(unit, _computing(unit, tanh, kernels, device)) for unit, tanh in found]
    with contextlib.ExitStack() as undo:
        for forward in fused:
            undo.callback(forward.retire)
            forward.install()
        yield len(fused)


def activation_of(module: nn.Module) -> bool | None:
    """Which activation a gated unit has, as in `_EXACT`; None for modules that are none, and where
    someone has replaced a forward on an object or listens to the activation.

    >>> activation_of(nn.Linear(2, 2)) is None
    True
    """
    forward = getattr(type(module), "forward", None)  # a scripted module's class raises
    if not isinstance(forward, types.FunctionType) or not _asks_for_a_gated_units_parts(forward):
        return None
    if "forward" in vars(module):
        return None
    activation = getattr(module, "act_fn", None)
    if (lasting := _lasting(activation)) is None:
        return None
    key = forward, lasting
    if key not in _found:
        fits = (tanh for tanh in _EXACT if _computes(forward, activation, tanh))
        _found[key] = next(fits, None)
    return _found[key]


@functools.cache
def _asks_for_a_gated_units_parts(forward: types.FunctionType) -> bool:
    """And for nothing else: then nothing else of the module matters."""
    return {*forward.__code__.co_names} == NAMES and _holds_nothing(forward)


def _holds_nothing(function: types.FunctionType) -> bool:
    """Whether a function has no closure, and no defaults, that may change."""
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    return not function.__closure__ and are_plain(defaults)


def _lasting(activation: Any) -> Hashable | None:
    """What a verdict on an activation holds for; None if there is no telling, or if someone would
    notice that it is not called."""
    if isinstance(activation, types.FunctionType):
        return activation if _holds_nothing(activation) else None
    boxes = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
    if not isinstance(activation, nn.Module) or any(getattr(activation, box) for box in boxes):
        return None
    forward, settings = getattr(type(activation), "forward", None), settings_of(activation)
    if settings is None or not isinstance(forward, types.FunctionType):
        return None
    if not _holds_nothing(forward):
        return None
    return type(activation), forward, repr(settings)


def _computes(forward: Any, activation: Any, tanh: bool) -> bool:
    """Whether a forward is that of a gated unit with this activation: tried on small projections,
    out of sight of a recorder."""
    try:
        with out_of_sight():
            line = torch.tensor(_LINE, device="cpu", dtype=torch.float32)
            exact = _EXACT[tanh](line)  # an activation may compute in place
            torch.testing.assert_close(activation(line), exact, rtol=1e-5, atol=1e-6)
            for dtype, close in CLOSE.items():
                _try_unit(forward, activation, _EXACT[tanh], dtype, close)
    except Exception:  # whatever it needs more: it is no such unit
        return False
    return True


def _try_unit(forward: Any, activation: Any, exact: Any, dtype: torch.dtype, close: float) -> None:
    """Raises if a unit made of the four parts alone does not compute what a gated unit does."""
    draw = torch.Generator("cpu").manual_seed(5)
    gate, up, down, rows = (
        (torch.rand(shape, generator=draw, device="cpu") * 4 - 2).to(dtype)
        for shape in ((6, 4), (6, 4), (4, 6), (1, 3, 4))
    )
    unit = types.SimpleNamespace(act_fn=activation)
    for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
        setattr(unit, name, lambda x, weight=weight: functional.linear(x, weight))
    wide = functional.linear(rows, gate).float(), functional.linear(rows, up).float()
    ours = functional.linear((exact(wide[0]) * wide[1]).to(dtype), down)
    scale = float(ours.abs().max())
    torch.testing.assert_close(forward(unit, rows), ours, rtol=0, atol=close * scale)


def _computing(unit: Any, tanh: bool, kernels: Any, device: torch.device) -> Callable[..., Any]:
    def product(x: Any) -> Any:
        """What goes to the last projection: the other two's results are gone by then."""
        gate, up = unit.gate_proj(x), unit.up_proj(x)
        if _fits(gate, up, device):
            return kernels.gate(gate, up, tanh, out=gate if _returns_new(unit.gate_proj) else None)
        return unit.act_fn(gate) * up

    def instead(own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or _is_listened_to():
            return own(*args, **kwargs)
        return unit.down_proj(product(*args))

    return instead


def _returns_new(projection: Any) -> bool:
    """Whether what it returns is new and nobody else's."""
    if type(projection) is not nn.Linear or "forward" in vars(projection):
        return False
    return not projection._forward_hooks


def _is_listened_to() -> bool:
    return bool(hooks_of_all._global_forward_hooks or hooks_of_all._global_forward_pre_hooks)


def _fits(gate: Any, up: Any, device: torch.device) -> bool:
    if {type(gate), type(up)} != {torch.Tensor} or gate.dtype != up.dtype:
        return False
    if gate.dtype not in PRECISIONS:
        return False
    if gate.device.type != device.type or gate.device != up.device or gate.shape != up.shape:
        return False
    return bool(gate.is_contiguous() and up.is_contiguous())
