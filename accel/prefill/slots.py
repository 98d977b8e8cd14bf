"""Request slots: the per-request numbers of a batch, with sentinels in slots that nobody takes.

Knows lengths and pages as integers, nothing of ids or models. A sentinel is a request of length
zero: cumulative lengths stay at the last real value, it has no pages, its last page is empty.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch

HOST = torch.device("cpu")
"""Named wherever host tensors are made: the default device may be another."""


@dataclass(frozen=True)
class Slots:
    """int32 tensors, views of `flat`, all on the host or all on the device.

    >>> numbers = fill_slots([3, 1], [16, 0], [(4, 7), (2,)], slots=3, page_size=16)
    >>> host = Slots(torch.tensor(numbers, dtype=torch.int32), 3)
    >>> host.q_indptr.tolist(), host.kv_indptr.tolist()
    ([0, 3, 4, 4], [0, 19, 20, 20])
    >>> host.page_indptr.tolist(), host.page_indices.tolist(), host.last_page_len.tolist()
    ([0, 2, 3, 3], [4, 7, 2], [3, 1, 0])
    """

    flat: torch.Tensor
    slots: int

    @property
    def q_indptr(self) -> torch.Tensor:
        """`[slots + 1]`: the row where each request's new tokens begin; the last entry is the
        number of real rows."""
        return self.flat[: self.slots + 1]

    @property
    def kv_indptr(self) -> torch.Tensor:
        """`[slots + 1]`: the same for keys: prefix and new tokens."""
        return self.flat[self.slots + 1 : 2 * self.slots + 2]

    @property
    def page_indptr(self) -> torch.Tensor:
        """`[slots + 1]`: where each request's pages begin in `page_indices`; zeros if none."""
        return self.flat[2 * self.slots + 2 : 3 * self.slots + 3]

    @property
    def last_page_len(self) -> torch.Tensor:
        """`[slots]`: keys in the last page of each request; 0 without pages."""
        return self.flat[3 * self.slots + 3 : 4 * self.slots + 3]

    @property
    def page_indices(self) -> torch.Tensor:
        """All requests' pages in order; in a static buffer with a tail that means nothing."""
        return self.flat[4 * self.slots + 3 :]


def slot_numbers(slots: int, pages: int) -> int:
    """How many numbers `slots` slots with `pages` pages in all are.

    >>> slot_numbers(2, 5)
    16
    """
    return 4 * slots + 3 + pages


def fill_slots(
    lengths: Sequence[int],
    prefixes: Sequence[int],
    pages: Sequence[Sequence[int]],
    *,
    slots: int,
    page_size: int,
) -> array[int]:
    """What `Slots.flat` holds on the host, as int32: live requests, then sentinels up to `slots`.
    Pages that a request holds for tokens of later batches are left out: kernels take the number of
    keys from the number of pages. Raises ValueError if there are more requests than slots.

    >>> fill_slots([3], [0], [(4, 7)], slots=2, page_size=16)
    array('i', [0, 3, 3, 0, 3, 3, 0, 1, 1, 3, 0, 4])
    """
    if len(lengths) > slots:
        raise ValueError(f"{len(lengths)} requests do not fit {slots} slots")
    idle = [0] * (slots - len(lengths))
    keys = [prefix + length for prefix, length in zip(prefixes, lengths, strict=True)]
    used = [own[: -(-n // page_size)] for n, own in zip(keys, pages, strict=True)]
    last = [(n - 1) % page_size + 1 if own else 0 for n, own in zip(keys, used, strict=True)]
    return array(
        "i",
        (
            *accumulate([*lengths, *idle], initial=0),
            *accumulate([*keys, *idle], initial=0),
            *accumulate([*map(len, used), *idle], initial=0),
            *last,
            *idle,
            *chain.from_iterable(used),
        ),
    )
