"""Key/value caches among a call's arguments, taken apart so that the call can be keyed.

A pipeline hands its denoiser a cache object in every call: one that stays empty (GLM-Image without
pictures to edit), or one that the first step fills and all others read (Qwen-Image 2.1). As an
object it could hold anything, and every call would be eager. As what is in it, tensors and plain
values, it is an argument like others. Knows diffusers' cache classes by their names only; that a
forward changes what it was given shows when it is recorded, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accel.graph import Refused

_CLASS = "class"
_NO_CACHES = frozenset((torch.Tensor, type(None), bool, int, float, str, list, tuple, dict))
"""Types of most arguments, told at a glance: a launch waits for this."""
_DEPTH = 8
"""How deep objects and lists in a cache may lie; one that lies deeper, or in itself, stays whole,
and the call is eager."""


class Contents(dict[str, Any]):
    """A cache object's attributes by name, and those of the objects in it.

    >>> from diffusers.models.transformers.transformer_flux2 import Flux2KVCache
    >>> contents = Contents(Flux2KVCache(1, 0))
    >>> contents["double_block_caches"][0]["k_ref"] is None, contents["num_ref_tokens"]
    (True, 0)
    >>> type(contents.rebuilt()).__name__
    'Flux2KVCache'
    """

    __slots__ = ("_cache", "_kind")

    def __init__(self, cache: Any, depth: int = _DEPTH) -> None:
        kind = type(cache)
        attributes = {name: _taken_apart(x, depth - 1) for name, x in vars(cache).items()}
        super().__init__(attributes, **{_CLASS: f"{kind.__module__}.{kind.__qualname__}"})
        self._kind, self._cache = kind, cache

    def __copy__(self) -> Contents:
        """The same contents, for a recording to keep: not the object."""
        like = Contents.__new__(Contents)
        like.update(self)
        like._kind, like._cache = self._kind, None
        return like

    def original(self) -> Any:
        """The object itself: for eager calls, which may write into it."""
        return self._cache

    def rebuilt(self) -> Any:
        """An object like it, with these contents."""
        like = object.__new__(self._kind)
        vars(like).update({name: _put_together(x) for name, x in self.items() if name != _CLASS})
        return like


def _is_cache(x: Any) -> bool:
    kind = type(x)
    return (
        "Cache" in kind.__name__
        and kind.__module__.startswith("diffusers.")
        and not isinstance(x, (torch.Tensor, nn.Module, dict, list, tuple))
        and hasattr(x, "__dict__")
    )


def _taken_apart(x: Any, depth: int) -> Any:
    if depth and type(x) in (list, tuple):
        return type(x)([_taken_apart(child, depth - 1) for child in x])
    return Contents(x, depth) if depth and _is_cache(x) else x


def _put_together(x: Any) -> Any:
    if type(x) in (list, tuple):
        return type(x)(map(_put_together, x))
    return x.rebuilt() if isinstance(x, Contents) else x


def _differ(x: Any, y: Any) -> bool:
    """Whether two contents are not made of the same objects."""
    if type(x) is not type(y):
        return True
    if isinstance(x, dict):
        return x.keys() != y.keys() or any(_differ(x[name], y[name]) for name in x)
    if isinstance(x, (list, tuple)):
        return len(x) != len(y) or any(map(_differ, x, y))
    return x is not y and (isinstance(x, torch.Tensor) or bool(x != y))


def opened(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A call's arguments with its caches taken apart, for a runner whose function is a `closing`.

    >>> opened((1,), {"kv_cache": None})
    ((1,), {'kv_cache': None})
    """
    kinds = {*map(type, args), *map(type, kwargs.values())}
    if kinds <= _NO_CACHES or not any(map(_is_cache, (*args, *kwargs.values()))):
        return args, kwargs
    kwargs = {name: Contents(x) if _is_cache(x) else x for name, x in kwargs.items()}
    return tuple(Contents(x) if _is_cache(x) else x for x in args), kwargs


def originals(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments as the caller gave them to `opened`."""
    return _with(Contents.original, args, kwargs)


class Reading:
    """A call of which a recording is made, on caches like the caller's. `args` and `kwargs` hold
    these; `close()` raises `Refused` if the forward has changed one, which the caller's would not
    show in a replay."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self._pairs: list[tuple[Contents, Any]] = []
        self.args, self.kwargs = _with(self._rebuilt, args, kwargs)

    def _rebuilt(self, contents: Contents) -> Any:
        self._pairs.append((contents, contents.rebuilt()))
        return self._pairs[-1][1]

    def close(self) -> None:
        """To be called after the forward."""
        for contents, cache in self._pairs:
            if _differ(contents, Contents(cache)):
                raise Refused(f"the forward fills its {type(cache).__name__}")


def _with(replacement: Callable[[Contents], Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    def one(x: Any) -> Any:
        return replacement(x) if isinstance(x, Contents) else x

    return tuple(map(one, args)), {name: one(x) for name, x in kwargs.items()}
