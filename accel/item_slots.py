"""How CPython tells sequences, and how a class goes back to being none.

A `__getitem__` that is set on a class from Python also fills the slot by which C code asks whether
its instances are sequences, and taking it away again leaves the slot filled. Tensors are none:
`torch.tensor([x])` of a number `x` would ask for the length of `x`, which it has not. Knows where
CPython keeps that slot, and makes sure of it before it writes anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

_POINTER = ctypes.sizeof(ctypes.c_void_p)
_SEQUENCE_METHODS = object.__basicsize__ + 11 * _POINTER
_ITEM = 3 * _POINTER
"""Where a class keeps the table of its sequence methods, and the table the one for items."""


def _slot(kind: type) -> ctypes.c_void_p | None:
    """The place of `kind`'s slot; None if it has no table."""
    table = ctypes.c_void_p.from_address(id(kind) + _SEQUENCE_METHODS).value
    return ctypes.c_void_p.from_address(table + _ITEM) if table else None


@functools.cache
def known() -> bool:
    """Whether the slots are where we think: lists and strings fill theirs, sets and dicts do not.

    >>> known()
    True
    """
    slots = {kind: _slot(kind) for kind in (list, str, set, dict)}
    filled = {kind for kind, slot in slots.items() if slot is not None and slot.value}
    return filled == {list, str} and None not in slots.values()


@contextlib.contextmanager
def patched(kind: type, **methods: Any) -> Iterator[None]:
    """Sets methods on `kind`, for the length of the context. Empty slots, those of subclasses too,
    stay empty: methods for items work all the same. Sets nothing where slots are not `known`.

    >>> class Plain:
    ...     pass
    >>> with patched(Plain, __getitem__=lambda self, index: index):
    ...     Plain()[3], _slot(Plain).value
    (3, None)
    >>> _slot(Plain).value is None
    True
    """
    if not known():
        yield
        return
    kinds = [kind]
    for one in kinds:
        kinds.extend(type.__subclasses__(one))
    empty = [slot for slot in map(_slot, kinds) if slot is not None and slot.value is None]
    try:
        with contextlib.ExitStack() as stack:
            for name, method in methods.items():
                stack.enter_context(mock.patch.object(kind, name, method, create=True))
            _clear(empty)
            yield
    finally:
        _clear(empty)


def _clear(slots: list[ctypes.c_void_p]) -> None:
    for slot in slots:
        slot.value = None
