"""`torch.autocast("sim")`: which operators run in the lower precision, and which in float32.

torch has such lists in C++ for its own devices and none for one in Python; these are shorter. Casts
are not cached here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.simulated.tensors import NAME

aten = torch.ops.aten
KEY = "AutocastPrivateUse1"
_LOWER: tuple[str, ...] = (
    "linear",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "scaled_dot_product_attention",
)
_LOWER += ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input")
_FLOAT32: tuple[str, ...] = (
    "layer_norm",
    "group_norm",
    "softmax.int",
    "log_softmax.int",
    "exp",
    "log",
    "cumsum",
)
_FLOAT32 += ("pow.Tensor_Scalar", "mse_loss", "rsqrt")


def install(library: torch.library.Library) -> torch.library.Library:
    """Registers the casts. The library returned holds the rule that all other operators pass."""
    for name in _LOWER:
        library.impl(name, _in(_overload(name), lambda: torch.get_autocast_dtype(NAME)), KEY)
    for name in _FLOAT32:
        library.impl(name, _in(_overload(name), lambda: torch.float32), KEY)
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, KEY)
    return others


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _in(overload: Any, dtype: Callable[[], torch.dtype]) -> Callable[..., Any]:
    inactive = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(KEY))

    def cast_and_call(*args: Any, **kwargs: Any) -> Any:
        wanted = dtype()
        with torch._C._ExcludeDispatchKeyGuard(inactive):
            named = {key: _cast(value, wanted) for key, value in kwargs.items()}
            return overload(*(_cast(value, wanted) for value in args), **named)

    return cast_and_call


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor) or value.is_cpu:
        return value
    if not value.is_floating_point() or value.dtype in (dtype, torch.float64):
        return value
    return value.to(dtype)
