"""How CPython tells sequences, and how a class goes back to being none.

A `__getitem__` that is set on a class from Python also fills the slot by which C code asks whether
its instances are sequences, and taking it away again leaves the slot filled. Tensors are none:
`torch.tensor([x])` of a number `x` would ask for the length of `x`, which it has not. Knows where
CPython keeps that slot, and makes sure of it before it writes anything.
"""

from __future__ import annotations

import ctypes

_POINTER = ctypes.sizeof(ctypes.c_void_p)
_SEQUENCE_METHODS = object.__basicsize__ + 11 * _POINTER
_ITEM = 3 * _POINTER
"""Where a class keeps the table of its sequence methods, and the table the one for items."""


def _slot(kind: type) -> ctypes.c_void_p | None:
    """The place of `kind`'s slot; None if it has no table."""
    table = ctypes.c_void_p.from_address(id(kind) + _SEQUENCE_METHODS).value
    return ctypes.c_void_p.from_address(table + _ITEM) if table else None


def known() -> bool:
    """Whether the slots are where we think: lists and strings fill theirs, sets and dicts do not.

    >>> known()
    True
    """
    slots = {kind: _slot(kind) for kind in (list, str, set, dict)}
    filled = {kind for kind, slot in slots.items() if slot is not None and slot.value}
    return filled == {list, str} and None not in slots.values()


def empty_slots(kind: type) -> list[ctypes.c_void_p]:
    """The slots of `kind` and its subclasses that are empty: to be emptied again (`value = None`)
    once a `__getitem__` is set, which works all the same. Then taking it away leaves them so.

    >>> class Plain:
    ...     pass
    >>> (slot,) = empty_slots(Plain)
    >>> Plain.__getitem__ = lambda self, index: index
    >>> slot.value is None
    False
    >>> slot.value = None
    >>> Plain()[3]
    3
    >>> del Plain.__getitem__
    >>> slot.value is None
    True
    """
    kinds = [kind]
    for one in kinds:
        kinds.extend(type.__subclasses__(one))
    return [slot for slot in map(_slot, kinds) if slot is not None and slot.value is None]
