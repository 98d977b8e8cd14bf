"""How many bytes of tensors a piece of work has alive at its peak, told without a device.

Works on meta tensors, which have shapes and storages and no memory: what a card would need is known
before there is a card. This module knows storages. An allocator rounds each of them up a little,
and libraries' workspaces are not tensors: neither is counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While open, counts the storages that operations make, from their birth to their death.

    >>> with LiveBytes() as counted:
    ...     x = torch.empty(1000, dtype=torch.uint8, device="meta")
    ...     x = x + 1
    >>> counted.peak, counted.now
    (2000, 1000)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        before = {id(s) for s in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if id(storage) not in before and id(storage) not in self._known:
                self._born(storage)
        return result

    def _born(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()

        def died(_: weakref.ref[Any]) -> None:
            self.now -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, died)
        self.now += size
        self.peak = max(self.peak, self.now)


def _storages(tree: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
