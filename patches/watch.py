"""Whether anything was touched since a module's state was read, and the means to put it back.

Knows the places that attributes.py reads; what is in them now it compares by identity, which is
quick enough for every replay.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Iterable
from inspect import isfunction
from types import CellType, MappingProxyType
from typing import Any

from torch import nn

from accel.modules import carried
from accel.patches.attention import OfThisThread
from accel.patches.attributes import (
    DEPTH,
    HOOKS,
    OF_TORCH,
    REGISTRY,
    Kept,
    hooks_of_registry,
    is_box,
    is_registry,
    value_of,
)
from accel.patches.code import RUN
from accel.patches.forward import PatchedMethod
from accel.patches.holders import Holders
from accel.signature import identities

_UNREAD = OF_TORCH - {"_parameters", "_buffers", "_modules", *HOOKS}
_TENSORS = ("_parameters", "_buffers")
_KEPT_BOXES = (list, dict, set, deque)
_OPENED = (*_KEPT_BOXES, tuple, frozenset)
_OF_OTHERS = (PatchedMethod, OfThisThread)
"""What patches, and prefill runners for the length of a call, put in a module's place."""


class Watch:
    """Where `state_of` looks, as it is now: a quick test that nothing there was touched, and the
    means to put everything back.

    >>> dropout = nn.Dropout(0.5)
    >>> watch = Watch(Holders([dropout]))
    >>> dropout.p = 0.25
    >>> watch.untouched()
    False
    >>> watch.put_back()
    >>> dropout.p
    0.5
    """

    def __init__(self, holders: Holders) -> None:
        self.modules = modules = holders.modules
        torchs = [m.__dict__ for m in modules if type(m).__module__.startswith("torch.")]
        owns, helps = holders.owns, holders.helps
        self._helpers, self._globals = holders.helpers, holders.globals
        self._owns = [(own, dict(own)) for own in owns + helps]
        # Of torch's layers their settings: a convolution's padding mode, a norm's epsilon.
        watched = [(d, name) for d in torchs for name in d.keys() - OF_TORCH]
        watched += [(d, name) for d in owns for name in d.keys() - _UNREAD]
        watched += [(d, name) for d in helps for name in list(d)]
        self._places = list(zip(*watched, strict=True)) or [(), ()]
        self._set_to = [d[name] for d, name in watched]
        self._dicts, self._kinds = torchs + owns + helps, set(map(type, modules))
        hooks = [m.__dict__.get(name) for m in modules for name in HOOKS]
        self._hooks = [box for box in hooks if box is not None]
        self._registries = [r for d in owns if (r := d.get(REGISTRY)) is not None]
        found = [item for own in owns + helps for item in list(own.items())]
        self._boxes = [x for name, x in found if name not in OF_TORCH and is_box(x)]
        reached = _reached(self._boxes)
        kept = [x for x in reached if isinstance(x, _KEPT_BOXES)]
        families = [m._modules for m in modules]
        self._insides = [(x, dict(x) if isinstance(x, dict) else list(x)) for x in kept + families]
        classes: list[Any] = list(map(vars, holders.classes))
        self._classes = _Contents(classes)
        inside = [
            x for own in classes for x in list(own.values()) if is_box(x) and not isfunction(x)
        ]
        run = [x for own in classes for x in map(own.get, RUN) if carried(x)]
        inside += [x for x in run if any(isinstance(y, _KEPT_BOXES) for y in _reached([x]))]
        self._others = [x for x in reached if not isinstance(x, _OPENED)] + inside
        cells = (cell for x in reached if isfunction(x) for cell in x.__closure__ or ())
        self._cells = [(c, c.cell_contents) for c in cells if c != CellType()]
        self._families = _Contents(families)
        self._in_boxes, self._values = _Contents(kept), _values_of(self._boxes)
        self._seen = self._look()

    def _look(self) -> tuple[Any, ...]:
        seen = Kept()  # what is watched is held by its owner, or was replaced: then it shows
        return (
            list(map(len, self._dicts)),
            list(map(type, self.modules)),
            list(map(type, self._helpers)),
            [getattr(kind, "forward", None) for kind in self._kinds],
            list(map(tuple, filter(None, self._hooks))),
            [hooks_of_registry(registry, seen) for registry in self._registries],
            _values_of(self._others),
        )

    def untouched(self) -> bool:
        """Whether no object was replaced, no container changed. It may err on the side of no; then
        the state is read again."""
        return (
            all(map(operator.is_, map(dict.get, *self._places), self._set_to))
            and self._families.are_the_same()
            and self._classes.are_the_same()
            and self._globals.are_the_same()
            and self._look() == self._seen
            and (self._in_boxes.are_the_same() or _values_of(self._boxes) == self._values)
        )

    def put_back(self) -> None:
        """Makes attributes, and containers in them, what they were: a call that did not count has
        changed them, and is going to be made again."""
        for box, before in [*self._owns, *self._insides]:
            _fill_again(box, before)
        for layer, name, setting in zip(*self._places, self._set_to, strict=True):
            now = layer.get(name)
            theirs = isinstance(now, _OF_OTHERS) or isinstance(setting, _OF_OTHERS)
            if now is not setting and not theirs:
                layer[name] = setting
        for cell, before in self._cells:
            if cell.cell_contents is not before:
                cell.cell_contents = before


class Weights:
    """Weights, where they lie and what hangs on them (a quantizer's scales, until the first call).
    It keeps them all alive: to be held for one recording only.

    >>> layer = nn.Linear(2, 2)
    >>> weights = Weights([layer])
    >>> layer.weight.scale = 3
    >>> weights.put_back()
    >>> hasattr(layer.weight, "scale")
    False
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        boxes = [m.__dict__[k] for m in modules for k in _TENSORS]
        self._boxes = list(zip(boxes, map(dict, boxes), strict=True))  # in C: there are thousands
        owners = (own for m in modules for own in (m._parameters, m._buffers) if own)
        found = [x for own in owners for x in own.values() if x is not None]
        self._weights = [(x, x.data, x.__dict__.copy()) for x in found]

    def put_back(self) -> None:
        """Makes all of it what it was."""
        for box, before in self._boxes:
            _fill_again(box, before)
        for weight, data, own in self._weights:
            if identities(vars(weight)) != identities(own):
                vars(weight).clear()
                vars(weight).update(own)
            if weight.data_ptr() != data.data_ptr():
                weight.data = data


def _fill_again(box: Any, before: Any) -> None:
    """Puts into a container what was in it."""
    if identities(box) != identities(before):
        if isinstance(box, dict):
            before = _with_what_others_do(box, before)
        box.clear()
        (box.extend if isinstance(box, (list, deque)) else box.update)(before)


def _with_what_others_do(now: dict[Any, Any], before: dict[Any, Any]) -> dict[Any, Any]:
    """`before`, but as it is `now` where something was patched, or unpatched, meanwhile."""
    held = [*now.items(), *before.items()]
    theirs = {name for name, x in held if isinstance(x, _OF_OTHERS)}
    kept = {name: x for name, x in before.items() if name not in theirs}
    return kept | {name: now[name] for name in theirs & now.keys()}


class _Contents:
    """What is in dicts, lists and sets, compared by identity, and without a step of Python for
    each: there are thousands, and every replay asks.

    >>> box = {"a": [1]}
    >>> contents = _Contents([box])
    >>> contents.are_the_same()
    True
    >>> box["a"] = [1]
    >>> contents.are_the_same()
    False
    """

    def __init__(self, boxes: list[Any]) -> None:
        self._boxes, self._sizes = boxes, list(map(len, boxes))
        filled = [box for box in boxes if box]  # an empty one is told by its size
        mappings = (box.values() for box in filled if isinstance(box, (dict, MappingProxyType)))
        self._iterables = [*filled, *mappings]
        self._items = list(itertools.chain.from_iterable(self._iterables))

    def are_the_same(self) -> bool:
        """Whether everything is where it was."""
        items = itertools.chain.from_iterable(self._iterables)
        sizes = list(map(len, self._boxes))
        return sizes == self._sizes and all(map(operator.is_, items, self._items))


def _values_of(boxes: list[Any]) -> list[Any]:
    seen = Kept()  # held by their owners, or were replaced: then it shows
    return [value_of(box, DEPTH, seen) for box in boxes]


def _reached(boxes: Iterable[Any]) -> list[Any]:
    """What can change among `boxes` and in those among them that can be opened, each once."""
    found: dict[int, Any] = {}
    level = list(boxes)
    for _ in range(DEPTH + 1):
        news = {id(x): x for x in level if id(x) not in found and _can_change(x)}
        found |= news
        opened = (x if isinstance(x, _OPENED) else carried(x) for x in news.values())
        inside = (x.values() if isinstance(x, dict) else x for x in opened)
        level = list(itertools.chain.from_iterable(inside))
    return list(found.values())


def _can_change(x: Any) -> bool:
    return is_box(x) or isinstance(x, frozenset) or is_registry(x)
