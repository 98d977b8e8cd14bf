"""What capturing to the ceiling will take, told before it is done.

All buckets share one pool, so the largest decides; its activations grow with its rows. They are
noted in two small eager passes, storage by storage, and each is drawn out to the ceiling.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accel.memory import Pool
from accel.prefill.arena import Event, peak, pieces
from accel.prefill.batch import NUMBER, ROW, Request
from accel.prefill.buckets import Ladder
from accel.prefill.packed_body import PackedBody
from accel.prefill.slots import slot_numbers
from accel.signature import leaves

MEASURED = (64, 128)
"""Rows of the two passes; the ceiling's half and itself where that is lower."""


@dataclass(frozen=True)
class MemoryPlan:
    """Device memory in bytes. `needed` is what capturing adds to what is held already.

    >>> plan = MemoryPlan(64, activations=100, buffers=20, results=10, held=50, free=90)
    >>> plan.needed, plan.fits
    (130, False)
    """

    max_tokens: int
    activations: int
    """The pool: what the larger buckets' forwards need to have a place for all their tensors."""
    buffers: int
    """Batch tensors of all graphs."""
    results: int
    """The hidden states of the largest batch, which a call copies out of the pool."""
    held: int
    """Cache and attention's workspace, taken at construction."""
    free: int
    """What the device has left, the allocator's spare memory included."""
    pieces: tuple[int, ...] = ()
    """In which pieces the activations are best taken."""

    @property
    def needed(self) -> int:
        """Bytes that capturing all buckets takes, and the largest call."""
        return self.activations + self.buffers + self.results

    @property
    def fits(self) -> bool:
        """Whether that much is free."""
        return self.needed <= self.free


_PLAIN = {torch.Tensor, torch.nn.Parameter}


class Lives(TorchDispatchMode):
    """While open, notes the storages that operators make, from birth to death.

    >>> with Lives() as noted:
    ...     x = torch.zeros(256, device=device)
    ...     x = x + 1
    >>> noted.events, peak(noted.events)
    ([(0, 1024), (1, 1024), (0, -1)], 2048)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._born = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if not _PLAIN.issuperset(types):  # a subclass: what it is made of comes by itself
            return NotImplemented
        given = {_key(x) for x in leaves([args, kwargs or {}]) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in leaves(result):
            if isinstance(x, torch.Tensor) and not x.is_cpu and _key(x) not in given:
                self._note(x.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, number = storage._cdata, self._born
        if key in self._alive:
            return

        def died(_: Any) -> None:
            del self._alive[key]
            self.events.append((number, -1))

        self._alive[key] = weakref.ref(storage, died)
        self._born += 1
        self.events.append((number, storage.nbytes()))


def _key(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def plan_for(
    body: PackedBody, ladder: Ladder, pool: Pool, *, results: int, held: int, graphs: int
) -> MemoryPlan:
    """The plan for `graphs` graphs up to the ladder's ceiling. Runs the body twice, eagerly."""
    few, many = min(MEASURED[0], -(-ladder.largest // 2)), min(MEASURED[1], ladder.largest)
    small, large = _lives(body, few), _lives(body, many)
    slope = max(0, peak(large) - peak(small)) / max(1, many - few)
    activations = round(peak(large) + slope * (ladder.largest - many))
    rows = [n / many for n in reversed(ladder.sizes)]
    taken = _pieces(small, large, rows, few / many, activations)
    free, _ = pool.backend.memory(pool.device)
    return MemoryPlan(
        max_tokens=ladder.largest,
        activations=max(sum(taken), activations),
        buffers=_batch_bytes(body, ladder, graphs),
        results=results,
        held=held,
        free=free + pool.backend.reclaimable_bytes(pool.device),
        pieces=tuple(taken),
    )


def _batch_bytes(body: PackedBody, ladder: Ladder, graphs: int) -> int:
    """Batch tensors: those of the largest bucket, which all graphs have in turns, or each graph's
    own where they hold pages: then there are two a bucket."""
    if graphs == len(ladder.sizes):
        return 3 * ROW * ladder.largest + NUMBER * slot_numbers(body.slots, 0)
    rows = graphs // len(ladder.sizes) * sum(ladder.sizes)
    return 3 * ROW * rows + graphs * ROW * body.kv_bound


def _lives(body: PackedBody, rows: int) -> list[Event]:
    with Lives() as noted:
        body.eager(body.pack([Request((0,) * rows)], rows))
    events: list[Event] = noted.events
    return events


def _pieces(
    small: list[Event],
    large: list[Event],
    growths: Sequence[float],
    ratio: float,
    activations: int,
) -> list[int]:
    """Pieces for one pass for each of `growths`, the largest first: so many times the rows of
    `large`, of whose rows `small` has a `ratio`. All in one where the tensors, drawn out, do not
    add up to `activations`.
    """
    passes = [drawn_out(small, large, growth, ratio) for growth in growths]
    if abs(peak(passes[0]) - activations) > activations // 16:
        return [activations]
    return pieces(*passes)


def drawn_out(small: list[Event], large: list[Event], growth: float, ratio: float) -> list[Event]:
    """The events of a larger pass. A tensor grows with the rows if there is one in the smaller pass
    that is as much smaller; others (a kernel's workspace, which the first pass may make alone) stay
    as they are.

    >>> drawn_out([(0, 64), (1, 10)], [(0, 10), (1, 128), (1, -1)], growth=4, ratio=0.5)
    [(0, 10), (1, 512), (1, -1)]
    """
    known = {nbytes for _, nbytes in small}
    return [
        (number, round(nbytes * growth) if nbytes > 0 and nbytes * ratio in known else nbytes)
        for number, nbytes in large
    ]
