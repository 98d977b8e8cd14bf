"""In which pieces to take the memory of a forward pass, so that little is lost between its tensors.

Knows how torch's allocator finds places: of the free blocks the smallest that is large enough, cut
to size; neighbours that are free become one again; up to 1 MiB a tensor has a block of another
kind. Does not know what the tensors are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

SMALL = 2**20
"""Bytes of a tensor up to which others are none of its neighbours."""
ROUNDED = 512
"""Bytes that a block is a multiple of."""
WORTH, UNIT = 10 * 2**20, 2 * 2**20
"""Bytes from which on a piece is worth while: the allocator takes 20 MiB for a smaller one. And the
bytes that it takes whole multiples of."""
STEPS, MOST, SLACK = 128, 2, 32
"""Pieces grow by a 128th of what is alive at the peak, up to twice as much. A 32nd of the last one
comes in addition, for what ops need while they run."""
DISTINCT = 8
"""Sizes, of the largest, that a piece may be made for."""

Event = tuple[int, int]
"""A tensor is born: its number, and its bytes; or dies: its number, and -1."""


def peak(events: Sequence[Event]) -> int:
    """The most bytes that are alive at a time.

    >>> peak([(0, 5), (1, 7), (0, -1), (2, 1)])
    12
    """
    alive: dict[int, int] = {}
    now = most = 0
    for number, nbytes in events:
        if nbytes >= 0:
            alive[number] = nbytes
            now += nbytes
            most = max(most, now)
        else:
            now -= alive.pop(number)
    return most


def pieces(*passes: Sequence[Event]) -> list[int]:
    """Sizes in bytes of up to three pieces in which all tensors of each pass find places. The first
    pass is the largest; in one of fewer rows another block may be the smallest that is large
    enough.

    Tried are a piece for the two largest tensors, one for one or two others, and the rest, with and
    without each of the first two: what takes least in all is found.

    >>> pieces([(0, 32 << 20), (1, 16 << 20), (0, -1), (2, 24 << 20)])
    [52428800]
    """
    large = [_large(events) for events in passes]
    least = peak(large[0])
    for total in range(least, MOST * least, max(least // STEPS, ROUNDED)):
        for first in _beginnings(large[0]):
            rest = total - sum(first)
            if rest >= WORTH or (rest >= 0 and not first):
                found = [_taken_as(size) for size in (*first, rest + rest // SLACK)]
                if all(fit(events, found) for events in large):
                    return found
    return [_taken_as(least + least // SLACK)]


def _taken_as(nbytes: int) -> int:
    """What the allocator takes for a piece."""
    return -(-nbytes // UNIT) * UNIT


def _large(events: Sequence[Event]) -> list[Event]:
    """Those of tensors that others are neighbours of."""
    large = {number for number, nbytes in events if nbytes > SMALL}
    return [event for event in events if event[0] in large]


def _beginnings(events: Sequence[Event]) -> Iterator[list[int]]:
    """What pieces may begin with, before the rest: nothing, first of all."""
    sizes = sorted((nbytes for _, nbytes in events if nbytes > 0), reverse=True)
    few = list(dict.fromkeys(sizes))[:DISTINCT]
    others = sorted({a + b for a in few[1:] for b in (0, *few[1:]) if a + b >= WORTH})
    for first in ([], [sum(sizes[:2])]):
        yield first
        yield from ([*first, other] for other in others)


def fit(events: Sequence[Event], sizes: Sequence[int]) -> bool:
    """Whether all tensors find places in pieces of these sizes.

    >>> mib, events = 2**20, [(0, 2 << 20), (1, 2 << 20), (0, -1), (2, 4 << 20)]
    >>> fit(events, [6 * mib]), fit(events, [8 * mib]), fit(events, [4 * mib, 2 * mib])
    (False, True, False)
    """
    free = [(piece << 50, size) for piece, size in enumerate(sizes)]  # far apart: no neighbours
    taken: dict[int, tuple[int, int]] = {}
    for number, nbytes in events:
        if nbytes < 0:
            free = _given_back(free, *taken.pop(number))
            continue
        needed = max(-(-nbytes // ROUNDED), 1) * ROUNDED
        place = min((block for block in free if block[1] >= needed), key=_size, default=None)
        if place is None:
            return False
        free.remove(place)
        begin, size = place
        if size - needed > SMALL:
            free.append((begin + needed, size - needed))
            size = needed
        taken[number] = begin, size
    return True


def _size(block: tuple[int, int]) -> tuple[int, int]:
    return block[1], block[0]


def _given_back(free: list[tuple[int, int]], begin: int, size: int) -> list[tuple[int, int]]:
    """The free blocks with one more, neighbours joined."""
    others = []
    for other, length in free:
        if other + length == begin:
            begin, size = other, size + length
        elif begin + size == other:
            size += length
        else:
            others.append((other, length))
    return [*others, (begin, size)]
