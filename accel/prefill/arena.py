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
STEPS, MOST = 64, 3
"""Pieces grow by a 64th of what is alive at the peak, up to three times as much."""

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


def pieces(events: Sequence[Event]) -> list[int]:
    """Sizes in bytes of the pieces in which all tensors find places: one, or two, the first for the
    two largest tensors, whichever is less in all.

    >>> pieces([(0, 4 << 20), (1, 2 << 20), (0, -1), (2, 3 << 20)])
    [6291456]
    """
    large = [(number, nbytes) for number, nbytes in events if not 0 <= nbytes <= SMALL]
    born = {number for number, nbytes in large if nbytes > 0}
    large = [event for event in large if event[0] in born]
    least, sizes = peak(large), sorted((nbytes for _, nbytes in large), reverse=True)[:2]
    apart = next((ps for ps in _growing(least, sum(sizes)) if fit(large, ps)), None)
    for one in _growing(least, 0):
        if apart is not None and sum(apart) <= sum(one):
            return apart
        if fit(large, one):
            return one
    return apart or [least]


def _growing(least: int, first: int) -> Iterator[list[int]]:
    """A piece of `first` bytes, if any, and one that grows; `least` bytes at first."""
    step = max(least // STEPS, ROUNDED)
    for rest in range(max(least - first, 0), MOST * least - first, step):
        yield [size for size in (first, rest) if size]


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
