"""Replaces and restores a method of a module instance, its signature kept.

Knows how a callable is put on an instance and taken off again, also when others have wrapped it
since. Does not know what runs in its place: that is a function given to it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class PatchedMethod:
    """Stands where a module's method was: same signature, name and docstring.

    Calls `instead(original, args, kwargs)` until `retire()`, the original from then on, so that a
    reference that someone kept does no harm. Deep-copied or pickled it becomes the plain method of
    the copy.
    """

    # Not in __dict__: hooks copy that into their own wrappers.
    __slots__ = ("__dict__", "__weakref__", "_instead", "_module", "_name", "original")

    def __init__(
        self, module: nn.Module, name: str, instead: Callable[[Callable[..., Any], Any, Any], Any]
    ) -> None:
        self.original: Callable[..., Any] = getattr(module, name)
        self._module, self._name = module, name
        self._instead: Callable[[Callable[..., Any], Any, Any], Any] | None = instead
        functools.update_wrapper(self, self.original)
        self.__signature__ = inspect.signature(self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._instead is None or torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        return self._instead(self.original, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """What else a method has: `__self__`, `__func__`, `__code__`."""
        if name in PatchedMethod.__slots__:  # not set yet
            raise AttributeError(name)
        return getattr(self.original, name)

    def install(self) -> None:
        """Puts it on the instance."""
        self._module.__dict__[self._name] = self

    def is_reachable(self) -> bool:
        """Whether a call of the method still comes by here, directly or under others' wrappers."""
        method = self._module.__dict__.get(self._name)
        while method is not None and method is not self:
            method = getattr(method, "__wrapped__", None)
        return method is self

    def retire(self) -> None:
        """Takes it off: wherever it can be found its original takes its place; where it cannot
        (inside a closure of someone's hook) it goes on as the original."""
        self._instead = None
        for holder, key in self._holders():
            holder[key] = self.original
        here = self._module.__dict__
        if here.get(self._name) is self.original and self._is_plain():
            del here[self._name]

    def _holders(self) -> list[tuple[dict[str, Any], str]]:
        """Where the instance and the hooks of accelerate and diffusers keep what they wrapped."""
        places = [self._module.__dict__]
        registry = self._module.__dict__.get("_diffusers_hook")
        places += [vars(reference) for reference in getattr(registry, "_fn_refs", ())]
        return [(place, key) for place in places for key, value in place.items() if value is self]

    def _is_plain(self) -> bool:
        """Whether the original is what the class gives the instance anyway."""
        plain = getattr(type(self._module), self._name, None)
        bound = self.original
        return isinstance(bound, types.MethodType) and bound.__func__ is plain

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = memo.get(id(self._module), self._module)
        if self._is_plain():
            return types.MethodType(getattr(type(module), self._name), module)
        return copy.deepcopy(self.original, memo)

    def __reduce__(self) -> Any:
        return _plain_method, (self._module, self._name)


class ForOneThread(PatchedMethod):
    """In the place of a forward for the length of one call, for the thread that makes it: in others
    the original runs. Made in every call, so without the signature that nobody reads meanwhile."""

    __slots__ = ()

    def __init__(self, module: Any, compute: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
        thread = threading.get_ident()

        def instead(own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            mine = threading.get_ident() == thread
            return compute(own, args, kwargs) if mine else own(*args, **kwargs)

        self._module, self._name, self.original = module, "forward", module.forward
        self._instead = instead


def _plain_method(module: nn.Module, name: str) -> Any:
    return types.MethodType(getattr(type(module), name), module)
