"""How the prompts of a call are cut into forward passes.

Knows lengths only. One pass takes at most `max_tokens`; with a cache a prompt may go on in the next
pass. Without one each must fit, and what does not fit together runs together, in one eager pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Tokens `start` to `stop` of prompt `prompt`."""

    prompt: int
    start: int
    stop: int


def cut(lengths: Sequence[int], max_tokens: int, cached: bool) -> list[list[Piece]]:
    """The passes of a call, in order. A prompt's pieces are in different passes, in order.

    >>> cut([3, 4], 8, cached=False)
    [[Piece(prompt=0, start=0, stop=3), Piece(prompt=1, start=0, stop=4)]]
    >>> [[tuple(piece) for piece in one] for one in cut([3, 10], 8, cached=True)]
    [[(0, 0, 3), (1, 0, 5)], [(1, 5, 10)]]
    """
    if not cached or sum(lengths) <= max_tokens:
        return [[Piece(i, 0, length) for i, length in enumerate(lengths)]]
    passes: list[list[Piece]] = [[]]
    room = max_tokens
    for prompt, length in enumerate(lengths):
        start = 0
        while start < length:
            if not room:
                passes.append([])
                room = max_tokens
            stop = min(length, start + room)
            passes[-1].append(Piece(prompt, start, stop))
            room -= stop - start
            start = stop
    return passes


def fitting(lengths: Sequence[int], max_tokens: int, max_requests: int) -> list[list[int]]:
    """Prompts, by number, in groups that fit one pass each, in order.

    >>> fitting([3, 4, 5], 8, 16), fitting([1, 1, 1], 8, 2)
    ([[0, 1], [2]], [[0, 1], [2]])
    """
    groups: list[list[int]] = []
    room = 0
    for prompt, length in enumerate(lengths):
        if not groups or length > room or len(groups[-1]) == max_requests:
            groups.append([])
            room = max_tokens
        groups[-1].append(prompt)
        room -= length
    return groups
