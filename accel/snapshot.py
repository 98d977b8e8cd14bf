"""What a call can change beside its results and the memory it writes, to be put back.

Knows random generators and the attributes of modules. A recording that turns out to be unusable has
run the forward; before that runs again, eagerly, what it did to Python has to be undone. Does not
know what is recorded.
"""

from __future__ import annotations

import operator
import random
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from accel.memory import Pool
from accel.signature import leaves

_DEPTH = 3
_OF_TORCH = frozenset(nn.Module().__dict__) - {"_parameters", "_buffers", "_modules"}
_ATOMS = frozenset((bool, int, float, str, type(None)))
_WHOLE = (torch.Tensor, nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)


class Snapshot:
    """The random generators, and the attributes of `module` and of what hangs on it.

    >>> class Counting(nn.Module):
    ...     calls = 0
    >>> counting = Counting()
    >>> before = Snapshot(Pool(device), counting)
    >>> counting.calls = 1
    >>> before.restore()
    >>> counting.calls
    0
    """

    def __init__(self, pool: Pool, module: nn.Module | None) -> None:
        self._pool = pool
        self._device_random = pool.backend.rng_state(pool.device)
        self._host_random = _host_random()
        self._boxes: dict[int, tuple[Any, Any]] = {}
        for child in () if module is None else module.modules():
            if not type(child).__module__.startswith("torch."):  # those keep nothing between calls
                self._take(vars(child), _DEPTH)

    def _take(self, box: Any, depth: int) -> None:
        if id(box) in self._boxes:
            return
        plain = dict if isinstance(box, dict) else set if isinstance(box, set) else list
        self._boxes[id(box)] = (box, plain(box))
        if not depth:
            return
        for name, x in box.items() if isinstance(box, dict) else enumerate(box):
            if type(x) in _ATOMS or name in _OF_TORCH:  # plain, or hooks
                continue
            if isinstance(x, (dict, list, set)):
                self._take(x, depth - 1)
            elif hasattr(x, "__dict__") and not isinstance(x, _WHOLE):
                self._take(vars(x), depth - 1)

    def objection(self) -> str | None:
        """Why a call since then cannot be replayed, in words; None if nothing speaks against it."""
        if not _equal(self._host_random, _host_random()):
            return "the forward draws random numbers on the host"
        for box, before in self._changed():
            known = {id(leaf) for leaf in leaves(list(_contents(before)))}
            now = leaves(list(_contents(box)))
            if any(isinstance(leaf, torch.Tensor) and id(leaf) not in known for leaf in now):
                return "the model keeps a tensor from call to call"
        return None

    def _changed(self) -> list[tuple[Any, Any]]:
        return [pair for pair in self._boxes.values() if not _same(*pair)]

    def restore(self) -> None:
        """Puts everything back."""
        self._pool.backend.set_rng_state(self._pool.device, self._device_random)
        host, python, numpy = self._host_random
        torch.default_generator.set_state(host)
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy.random"].set_state(numpy)
        for box, before in self._changed():
            box.clear()
            (box.extend if isinstance(box, list) else box.update)(before)


def _same(box: Any, before: Any) -> bool:
    contents = _contents(box), _contents(before)
    return len(box) == len(before) and all(map(operator.is_, *contents))


def _contents(box: Any) -> Iterable[Any]:
    return box.values() if isinstance(box, dict) else box


def _host_random() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy.random")  # importing it takes half a second
    return (
        torch.default_generator.get_state(),
        random.getstate(),
        None if numpy is None else numpy.get_state(),
    )


def _equal(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Numpy's state ends in an array and a position."""
    same = torch.equal(a[0], b[0]) and a[1] == b[1] and (a[2] is None) == (b[2] is None)
    return same and (a[2] is None or (a[2][1].tobytes(), a[2][2:]) == (b[2][1].tobytes(), b[2][2:]))
