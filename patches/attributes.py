"""What modules and the objects among their attributes are made of, read as values to compare.

Plain values and containers by value, all else by identity. Knows how deep to look and which
attributes are torch's own; what follows from a difference it does not (state.py, watch.py).
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from accel.modules import carried

OF_TORCH = frozenset(nn.Module().__dict__) - {"training"}
OF_SELF_TEST = "accel.prefill.stages"
"""Whose hooks do nothing in any thread but their own, and nothing to what a call computes there."""
REGISTRY = "_diffusers_hook"
"""Where diffusers keeps a module's hooks. An empty one, left by a pipeline, is as good as none."""
_READ_APART = OF_TORCH | {REGISTRY}
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
_COMMON = frozenset((bool, int, str, type(None)))
CALLABLES = (types.FunctionType, types.MethodType, functools.partial)
_BOXES = (list, dict, set, tuple, deque, bytearray, *CALLABLES)
DEPTH = 8
"""How deep containers among attributes are looked into."""
_SMALL_ARRAY = 2**16


class Kept(list[Any]):
    """What values name by identity: as long as it is kept, nothing new can pass for it.

    `told` is how deep each callable among it was looked into: those that bring each other along, by
    a list that all close over, would be told again and again.

    >>> double = lambda x: 2 * x
    >>> kept = Kept()
    >>> _ = value_of([double], 2, kept)
    >>> kept == [double], kept.told == {}
    (True, True)
    """

    def __init__(self, things: Iterable[Any] = ()) -> None:
        super().__init__(things)
        self.told: dict[int, int] = {}


def state_of(module: nn.Module, kept: Kept) -> tuple[Any, ...]:
    """A module's own state, its children's left out: identity, class, forward, training flag,
    hooks, attributes. What it names by identity is put into `kept`: as long as it lives, nothing
    new can pass for it.

    >>> dropout = nn.Dropout(0.5)
    >>> before = state_of(dropout, Kept())
    >>> dropout.p = 0.25
    >>> state_of(dropout, Kept()) == before
    False
    """
    attributes, kind = module.__dict__, type(module)
    found = [x for box in map(attributes.get, HOOKS) if box for x in list(box.items())]
    ours = {number for number, hook in found if getattr(hook, "__module__", "") == OF_SELF_TEST}
    hooks = [hook for number, hook in found if number not in ours]
    kept.extend(hooks)
    is_torchs = kind.__module__.startswith("torch.") and "forward" not in attributes
    depth = 1 if is_torchs else DEPTH
    own = [
        (name, x if type(x) in _COMMON else value_of(x, depth, kept))
        for name, x in list(attributes.items())
        if name not in _READ_APART
    ]
    registered = hooks_of_registry(attributes.get(REGISTRY), kept) or ()
    own.append((REGISTRY, registered))
    return id(module), kind, kind.forward, attributes.get("training"), tuple(map(id, hooks)), own


def of_class(kind: type, kept: Kept) -> tuple[Any, ...]:
    """A class's methods and attributes as values: someone may put others in their places. Python
    adds names of its own, `__slotnames__` when an object is copied, but no functions."""
    found = [
        (name, x)
        for name, x in vars(kind).copy().items()
        if not name.startswith("__") or isinstance(x, types.FunctionType)
    ]
    return tuple((name, value_of(x, DEPTH, kept)) for name, x in found)


def is_box(x: Any) -> bool:
    """Whether `x` can change and stay the same object."""
    kind = type(x)
    if kind in _COMMON or kind is float:
        return False
    return isinstance(x, (*_BOXES, torch.Tensor)) or kind.__name__ == "ndarray"


def value_of(x: Any, depth: int, kept: Kept) -> Any:
    """Plain values and containers by value, all else by identity (and `kept`).

    >>> value_of([2.0, {"on": (True,)}], DEPTH, Kept())
    ('0x1.0000000000000p+1', (('on', (True,)),))
    """
    if type(x) in _COMMON:
        return x
    if isinstance(x, float):  # not 2 for 2.0, which gives another dtype, nor 0 for -0
        return x.hex()
    if isinstance(x, _PLAIN):
        return x
    if depth and isinstance(x, (list, tuple, deque)):
        return tuple(value_of(item, depth - 1, kept) for item in list(x))
    if isinstance(x, bytearray):
        return bytes(x)
    if depth and isinstance(x, dict):
        return tuple(
            (  # keys, too: tensors do not answer whether they are equal
                key if type(key) in _COMMON else value_of(key, depth - 1, kept),
                value_of(item, depth - 1, kept),
            )
            for key, item in list(x.items())
        )
    if depth and isinstance(x, (set, frozenset)):
        return frozenset(value_of(item, 0, kept) for item in list(x))
    if (hooks := hooks_of_registry(x, kept)) is not None:
        return hooks
    kept.append(x)
    if kept.told.get(id(x), 0) < depth and (inside := carried(x)):
        kept.told[id(x)] = depth
        return id(x), tuple(value_of(item, depth - 1, kept) for item in inside)
    if isinstance(x, torch.Tensor):  # what lies on the host, Python may have read
        own = id(x), x._version if x.is_cpu and not x.is_inference() else 0
        # Others (quantized tables) carry tensors and settings of their own.
        return own if type(x) in _PLAIN_TENSORS else (own, value_of(vars(x), depth, kept))
    if type(x).__name__ == "ndarray" and x.nbytes <= _SMALL_ARRAY:
        return id(x), x.tobytes()
    return id(x)


def is_registry(x: Any) -> bool:
    """Whether `x` is a diffusers registry of hooks. Others are not asked for attributes, which may
    be properties, or a `__getattr__` that raises KeyError."""
    return type(x).__name__ == "HookRegistry"


def hooks_of_registry(x: Any, kept: Kept) -> tuple[Any, ...] | None:
    """The hooks in a diffusers registry. An empty one, which `cache_context` leaves behind, is as
    good as none."""
    if not is_registry(x) or not isinstance(hooks := getattr(x, "hooks", None), dict):
        return None
    kept.extend(hooks.values())
    return tuple((name, id(hook)) for name, hook in list(hooks.items()))
