"""Tensor subclasses as quantizers make them: int8 values and a scale a row, dequantized in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

aten = torch.ops.aten
_INNER_BY_INNER = {aten.detach.default, aten.alias.default, aten._to_copy.default}
_INNER_BY_INNER |= {aten.clone.default}


class Opaque(Tensor):
    """A wrapper that does not tell what it wraps: no `__tensor_flatten__`. `gain` is a plain
    setting of it, as a quantizer's block size is."""

    values: Tensor
    scale: Tensor
    gain: float

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor, gain: float = 1.0) -> Opaque:
        made: Opaque = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.shape, dtype=torch.float32, device=values.device
        )
        return made

    def __init__(self, values: Tensor, scale: Tensor, gain: float = 1.0) -> None:
        self.values, self.scale, self.gain = values, scale, gain

    @classmethod
    def of(cls, weight: Tensor) -> Any:
        """`weight` quantized."""
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale)

    def dequantized(self) -> Tensor:
        """As a plain tensor."""
        return self.values.to(torch.float32) * self.scale * self.gain

    def each(self, do: Callable[[Tensor], Tensor]) -> Any:
        """Its like, with `do` done to what is inside."""
        return type(self)(do(self.values), do(self.scale), self.gain)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"<{type(self).__name__} of {tuple(self.shape)}>"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _INNER_BY_INNER:
            named = {key: x for key, x in kwargs.items() if key == "device"}
            return args[0].each(lambda x: func(x, **named))
        plain = tree_map(lambda x: x.dequantized() if isinstance(x, Opaque) else x, args)
        return func(*plain, **kwargs)


class Int8(Opaque):
    """The same, telling what it wraps, as torch asks."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values", "scale"], self.gain

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, gain: Any, size: Any, stride: Any) -> Int8:
        return cls(inner["values"], inner["scale"], gain)


class Hidden(Int8):
    """Keeps its tensors elsewhere than among its attributes; these are read through properties."""

    def __init__(self, values: Tensor, scale: Tensor, gain: float = 1.0) -> None:
        self._parts = [values, scale]
        self.gain = gain

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        return self._parts[0]

    @values.setter
    def values(self, values: Tensor) -> None:
        self._parts[0] = values

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        return self._parts[1]

    @scale.setter
    def scale(self, scale: Tensor) -> None:
        self._parts[1] = scale


class Nested(Int8):
    """Int8 whose scale is quantized in turn."""

    def dequantized(self) -> Tensor:
        scale = self.scale.dequantized() if isinstance(self.scale, Opaque) else self.scale
        return self.values.to(torch.float32) * scale * self.gain

    @classmethod
    def of(cls, weight: Tensor) -> Any:
        once = Int8.of(weight)
        return cls(once.values, Int8.of(once.scale), once.gain)


class Tagged(Tensor):
    """A plain tensor of another class: memory of its own, no dispatch."""

    gain: float


def quantize(model: nn.Module, kind: type[Opaque] = Int8) -> nn.Module:
    """Puts quantized weights into the linear layers of `model`, and returns it."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(kind.of(layer.weight), requires_grad=False)
    return model.requires_grad_(False)
