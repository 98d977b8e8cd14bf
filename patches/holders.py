"""Who holds a forward's state beside its tensors: modules, objects that these share, classes, code.

Finds them, each once. How what they hold is read and compared it does not know (attributes.py,
watch.py).
"""

from __future__ import annotations

import itertools
import types
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from accel.modules import attributes_of_others, carried
from accel.patches.attributes import CALLABLES, OF_TORCH, is_registry
from accel.patches.code import Globals, is_of_no_one
from accel.patches.forward import PatchedMethod

_DEPTH = 3
_NO_HELPERS = (torch.Tensor, nn.Module, type, types.ModuleType, *CALLABLES, PatchedMethod)


class Holders:
    """All that `modules` reach, as it is now.

    >>> class Own(nn.Module):
    ...     settings = None
    >>> own = Own()
    >>> own.settings = types.SimpleNamespace(scale=2)
    >>> Holders([own]).helpers
    [namespace(scale=2)]
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self.owns = attributes_of_others(modules)
        """The attributes of modules that are not torch's."""
        self.helpers = _helpers(self.owns)
        """Objects among attributes that are no modules but carry settings."""
        self.helps = [vars(helper) for helper in self.helpers]
        self.classes = classes_of([*modules, *self.helpers])
        self.globals = Globals(self.classes, _callables(self.owns + self.helps))


def classes_of(things: Iterable[Any]) -> list[type]:
    """The classes of things and those that these come from, each once: not Python's, nor torch's.

    >>> classes_of([nn.Linear(2, 2), []])
    []
    """
    kinds = dict.fromkeys(kind for known in set(map(type, things)) for kind in known.__mro__)
    return [kind for kind in kinds if not is_of_no_one(kind.__module__)]


def _callables(owns: list[dict[str, Any]]) -> list[Any]:
    """The functions among attributes, those in containers left out."""
    return [x for own in owns for x in list(own.values()) if isinstance(x, CALLABLES)]


def _helpers(attributes: list[dict[str, Any]]) -> list[Any]:
    """Objects among attributes that are no modules but carry settings (attention processors,
    configurations, controllers), each once, and those that they have in turn."""
    found: dict[int, Any] = {}
    level = attributes
    for _ in range(_DEPTH):
        news = {
            id(x): x
            for own in level
            for name, value in list(own.items())
            if name not in OF_TORCH
            for x in _inside(value)
            if _is_helper(x) and id(x) not in found
        }
        found |= news
        level = [vars(x) for x in news.values()]
    return list(found.values())


def _inside(x: Any, depth: int = _DEPTH) -> Iterable[Any]:
    """What is in a container or behind a callable, and in those in it; all else is in itself."""
    is_box = type(x) in (list, tuple, dict, deque)
    items = list(x.values() if type(x) is dict else x) if is_box else carried(x)
    if not depth or not items:
        return (x,)
    return itertools.chain.from_iterable(_inside(item, depth - 1) for item in items)


def _is_helper(x: Any) -> bool:
    kind = type(x)
    if kind not in _helper_kinds:
        _helper_kinds[kind] = (
            isinstance(getattr(x, "__dict__", None), dict)
            and not isinstance(x, _NO_HELPERS)
            and not is_registry(x)
        )
    return _helper_kinds[kind]


_helper_kinds: dict[type, bool] = {}
