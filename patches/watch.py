"""Whether anything was touched since a module's state was read, and the means to put it back.

Knows the places that attributes.py reads; what is in them now it compares by identity, which is
quick enough for every replay.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import nn

from accel.patches.attributes import (
    DEPTH,
    HOOKS,
    OF_TORCH,
    REGISTRY,
    helpers,
    hooks_of_registry,
    is_box,
    of_others,
    value_of,
)
from accel.patches.forward import PatchedMethod
from accel.signature import identities

_TENSORS_AND_LAYERS = ("_parameters", "_buffers", "_modules")
_KEPT_BOXES = (list, dict, set, deque)


class Watch:
    """Where `state_of` looks, as it is now: a quick test that nothing there was touched, and the
    means to put everything back.

    >>> dropout = nn.Dropout(0.5)
    >>> watch = Watch([dropout])
    >>> dropout.p = 0.25
    >>> watch.untouched()
    False
    >>> watch.put_back()
    >>> dropout.p
    0.5
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self._torchs = [m.__dict__ for m in modules if type(m).__module__.startswith("torch.")]
        owns = of_others(modules)
        self._helpers = helpers(owns)
        owns += [vars(x) for x in self._helpers]
        self._owns = [(own, dict(own)) for own in owns]
        hooks = [m.__dict__.get(name) for m in modules for name in HOOKS]
        self._hooks = [box for box in hooks if box is not None]
        self._registries = [r for d in owns if (r := d.get(REGISTRY)) is not None]
        found = [item for _, own in self._owns for item in own.items()]
        self._boxes = [x for name, x in found if name not in OF_TORCH and is_box(x)]
        self._insides = [(box, copy.copy(box)) for box in _containers(self._boxes)]
        # Settings of torch's layers: a convolution's padding mode, a norm's epsilon.
        settings = [(d, name, d.get(name)) for d in self._torchs for name in d.keys() - OF_TORCH]
        self._settings = tuple(zip(*settings, strict=True)) if settings else ((), (), ())
        self._children = [m._modules for m in modules]
        self._kinds = set(map(type, modules))
        self._seen = self._look()

    def _look(self) -> tuple[Any, ...]:
        seen: list[Any] = []  # what is watched is held by its owner, or was replaced: then it shows
        return (
            list(map(len, self._torchs)),
            [attributes.get("training") for attributes in self._torchs],
            list(map(type, self.modules)),
            list(map(type, self._helpers)),
            [getattr(kind, "forward", None) for kind in self._kinds],
            [tuple(hook) for hook in self._hooks if hook],
            [hooks_of_registry(registry, seen) for registry in self._registries],
            [value_of(box, DEPTH, seen) for box in self._boxes],
            [tuple(map(id, family.values())) for family in self._children if family],
        )

    def untouched(self) -> bool:
        """Whether no object was replaced, no container changed. It may err on the side of no; then
        the state is read again."""
        layers, names, set_to = self._settings
        return (
            all(
                len(own) == len(was) and all(map(operator.is_, own.values(), was.values()))
                for own, was in self._owns
            )
            and all(map(operator.is_, map(dict.get, layers, names), set_to))
            and self._look() == self._seen
        )

    def put_back(self) -> None:
        """Makes attributes, and containers in them, what they were: a call that did not count has
        changed them, and is going to be made again."""
        for box, before in [*self._owns, *self._insides]:
            _fill_again(box, before)
        for layer, name, setting in zip(*self._settings, strict=True):
            now = layer.get(name)
            if now is not setting and not isinstance(now or setting, PatchedMethod):
                layer[name] = setting


class Weights:
    """Weights and layers, where weights lie and what hangs on them (a quantizer's scales, until the
    first call). It keeps them all alive: to be held for one recording only.

    >>> layer = nn.Linear(2, 2)
    >>> weights = Weights([layer])
    >>> layer.weight.scale = 3
    >>> weights.put_back()
    >>> hasattr(layer.weight, "scale")
    False
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        boxes = [m.__dict__[k] for m in modules for k in _TENSORS_AND_LAYERS]
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
        if _patches_in(box) != _patches_in(before):  # patched or unpatched meanwhile
            before = _plain(before) | _patches_in(box)
        box.clear()
        (box.extend if isinstance(box, (list, deque)) else box.update)(before)


def _patches_in(box: Any) -> dict[str, Any]:
    named = list(box.items()) if isinstance(box, dict) else []
    return {name: x for name, x in named if isinstance(x, PatchedMethod)}


def _plain(box: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in box.items() if not isinstance(x, PatchedMethod)}


def _containers(boxes: Iterable[Any], depth: int = DEPTH) -> list[Any]:
    """The lists, dicts and sets among `boxes` and in them, each once."""
    found: dict[int, Any] = {}
    level = list(boxes)
    for _ in range(depth):
        news = {id(x): x for x in level if isinstance(x, _KEPT_BOXES) and id(x) not in found}
        found |= news
        inside = (x.values() if isinstance(x, dict) else x for x in news.values())
        level = list(itertools.chain.from_iterable(inside))
    return list(found.values())
