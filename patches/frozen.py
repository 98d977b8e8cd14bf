"""Plain Python values that a forward can count in or read, and whether a replay left one behind.

Looks wider than the fingerprint of a recording does (state.py), since it looks only when asked: at
attributes of all modules and of the objects that they hold, at their classes, and at the globals of
the Python modules that these come from. Does not know when a run replays.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from accel.patches.part import Part
from accel.patches.witness import Run

_OF_TORCH = frozenset(nn.Module().__dict__) - {"training"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_BOXES = (list, tuple, dict, set, frozenset)
_LONGEST = 64
_OTHERS = (nn.Module, torch.Tensor, type, *_PLAIN, *_BOXES)

Values = dict[str, Any]
Changes = dict[str, tuple[Any, Any]]
"""What a value was before a call and after it, by its name."""


def python_values(module: nn.Module) -> Values:
    """The plain values within reach of a module's forward, by name.

    >>> net = nn.Sequential(nn.Dropout(0.5))
    >>> python_values(net)["0.p"]
    0.5
    """
    found: Values = {}
    kinds: set[type] = set()
    for name, child in module.named_modules():
        prefix = f"{name}." if name else ""
        for key, value in list(child.__dict__.items()):
            if key not in _OF_TORCH:
                found.update(_named(prefix + key, value))
        kinds.update(k for k in type(child).__mro__ if k is not object and not _is_torchs(k))
    for kind in kinds:
        found.update(_plain_ones(f"class {kind.__qualname__}.", vars(kind)))
    for room in {kind.__module__ for kind in kinds}:
        if room in sys.modules:
            found.update(_plain_ones(f"{room}.", vars(sys.modules[room])))
    return found


def changes(before: Values, after: Values) -> Changes:
    """The values that are others now, or were not there."""
    return {
        name: (before.get(name), value)
        for name, value in after.items()
        if name not in before or not _same(before[name], value)
    }


def left_behind(eager: Changes, replayed: Changes) -> Iterator[str]:
    """The values that the eager call changed and the replay did not.

    >>> list(left_behind({"calls": (3, 4)}, {}))
    ['calls goes from 3 to 4 in an eager call and stays in a replay']
    """
    for name, (before, after) in eager.items():
        if name not in replayed:
            yield f"{name} goes from {before} to {after} in an eager call and stays in a replay"


class ChangesSeen:
    """The Python values that calls of parts change, by component and number of the call; those of
    replays also apart."""

    def __init__(self) -> None:
        self.of_calls: dict[tuple[str, int], Changes] = {}
        self.of_replays: dict[tuple[str, int], Changes] = {}
        self._counts: Counter[str] = Counter()

    def noted(self, part: Part, run: Run) -> Run:
        """`run`, with what changes meanwhile noted."""

        def noting(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            before, replays = python_values(part.module), part.report.replays
            result = run(original, args, kwargs)
            changed = changes(before, python_values(part.module))
            call = self._counts[part.name]
            self._counts[part.name] += 1
            self.of_calls[part.name, call] = changed
            if part.report.replays > replays:
                self.of_replays[part.name, call] = changed
            return result

        return noting


def _is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _named(name: str, value: Any) -> Values:
    """A plain value, or those among the attributes of an object that is no module."""
    if _is_plain(value):
        return {name: _copied(value)}
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict) and not isinstance(value, _OTHERS) and not _is_function(value):
        return _plain_ones(f"{name}.", own)  # a configuration, an attention processor
    return {}


def _is_function(value: Any) -> bool:
    return hasattr(value, "__wrapped__") or hasattr(value, "__code__") or hasattr(value, "__func__")


def _plain_ones(prefix: str, attributes: Any) -> Values:
    return {
        prefix + key: _copied(value)
        for key, value in list(attributes.items())
        if not key.startswith("__") and _is_plain(value)
    }


def _is_plain(value: Any, depth: int = 2) -> bool:
    if isinstance(value, _PLAIN):
        return True
    if not depth or type(value) not in _BOXES or len(value) > _LONGEST:
        return False
    inside: Iterable[Any] = value.values() if isinstance(value, dict) else value
    return all(_is_plain(x, depth - 1) for x in inside)


def _copied(value: Any) -> Any:
    """Containers may change and stay the same object: as words."""
    return repr(value) if isinstance(value, _BOXES) else value


def _same(first: Any, second: Any) -> bool:
    return type(first) is type(second) and (first == second or repr(first) == repr(second))
