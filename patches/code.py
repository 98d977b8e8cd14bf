"""What the code of a module names outside of itself: globals, as its forward would find them.

Reads the names off the code that a forward can reach, from method to method and function to
function, and looks at what stands there: a number that is set, a function that someone replaces.
Nothing is run. Names that are made up while it runs (`getattr`, `eval`) are not seen, nor what is
torch's or Python's own, `torch.nn.functional` excepted: others put their functions there.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from accel.modules import carried

_OF_NO_ONE = {"torch", *sys.stdlib_module_names}
RUN = ("forward", "__call__")
"""Methods that a call begins with."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_BOXES = (list, tuple, dict, set)
_FUNCTIONAL = "torch.nn.functional"
_LONGEST = 64

Place = tuple[dict[str, Any], str]
"""A module's globals, and a name in them."""


def is_of_no_one(room: str) -> bool:
    """Whether a Python module is torch's or Python's own.

    >>> is_of_no_one("torch.nn"), is_of_no_one("diffusers.models")
    (True, False)
    """
    return room.partition(".")[0] in _OF_NO_ONE


class Globals:
    """The globals that calls of objects of these classes, and of `functions`, may read.

    >>> [name for _, name in Globals([], [lambda: _LONGEST]).values]
    ['accel.patches.code._LONGEST']
    """

    def __init__(self, classes: Iterable[type], functions: Iterable[Any] = ()) -> None:
        places = places_named(classes, functions)
        self._places = list(zip(*places, strict=True)) or [(), ()]
        self.found: list[Any] = list(map(dict.get, *self._places))
        """What stands there, kept alive: nothing new can pass for it."""
        pairs = zip(places, self.found, strict=True)
        self._boxes = [place for place, x in pairs if isinstance(x, _BOXES)]
        self._in_boxes = list(map(_value_at, self._boxes))
        self.values = {
            (id(box), f"{box.get('__name__')}.{name}"): _value_at((box, name))
            for box, name in places
        }
        """By place, as two files may have one name, and name: as `_value_at`."""

    def are_the_same(self) -> bool:
        """Whether all is where it was, containers with what was in them."""
        now = map(dict.get, *self._places)
        return all(map(operator.is_, now, self.found)) and (
            list(map(_value_at, self._boxes)) == self._in_boxes
        )


def places_named(classes: Iterable[type], functions: Iterable[Any] = ()) -> list[Place]:
    """Where the globals are that calls of objects of these classes may read, each once.

    >>> class Own:
    ...     def __call__(self):
    ...         return _LONGEST
    >>> [name for _, name in places_named([Own])]
    ['_LONGEST']
    """
    methods: dict[str, list[Any]] = {}
    for kind in classes:
        for name, x in vars(kind).copy().items():
            methods.setdefault(name, []).append(x)
    found: dict[tuple[int, str], Place] = {}
    ahead = [*functions, *(x for name in RUN for x in methods.get(name, ()))]
    seen: set[tuple[int, types.CodeType]] = set()  # equal code may be of two files
    while ahead:
        for function in _functions_in(ahead.pop()):
            place = id(function.__globals__), function.__code__
            if place in seen or is_of_no_one(function.__module__ or ""):
                continue
            seen.add(place)
            names = list(_names_in(function.__code__))
            news = [x for name in names for x in _places(function.__globals__, name, names)]
            ahead += [box.get(name) for box, name in news if (id(box), name) not in found]
            ahead += [x for name in names for x in methods.get(name, ())]
            found |= {(id(box), name): (box, name) for box, name in news}
    return list(found.values())


def _value_at(place: Place) -> Any:
    """What stands there: plain values and containers of these by value, all else as it is."""
    box, name = place
    x = box.get(name)
    if isinstance(x, _BOXES) and len(x) <= _LONGEST:
        inside = [*x, *x.values()] if isinstance(x, dict) else [*x]
        return repr(x) if all(isinstance(y, _PLAIN) for y in inside) else id(x)
    return repr(x) if isinstance(x, _PLAIN) else id(x)


def _places(globals_: dict[str, Any], name: str, names: list[str]) -> Iterator[Place]:
    if name not in globals_:
        return
    x = globals_[name]
    yield globals_, name
    if isinstance(x, types.ModuleType) and (
        x.__name__ == _FUNCTIONAL or not is_of_no_one(x.__name__)
    ):
        yield from ((vars(x), other) for other in names if other in vars(x))


def _functions_in(x: Any, depth: int = 4) -> Iterator[types.FunctionType]:
    """The function that something is, and those that it brings along or wraps."""
    if isinstance(x, (staticmethod, classmethod)):
        x = x.__func__
    elif isinstance(x, property):
        x = x.fget
    if isinstance(x, types.FunctionType):
        yield x
    for inside in carried(x) if depth else ():
        yield from _functions_in(inside, depth - 1)


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
