"""Random shapes of batches, the same wherever they are drawn. Knows lengths, and which of them a
runner's graphs have room for."""

from __future__ import annotations

import itertools
import math
import random

CROWDED, LONG, TURN = 7, 17, 20
"""Of every `TURN` batches one has more requests than there are slots, and one more tokens than any
bucket. Neither is the first of them: what is measured now and then are ordinary ones."""


def shapes(batches: int, max_requests: int, max_tokens: int, seed: int) -> list[list[int]]:
    """Lengths of the prompts of so many batches: the edges first, then random ones, from 1 to
    `max_requests` prompts of 1 to `max_tokens` tokens in all. Sizes are even on a logarithmic
    scale, so that small buckets come by as often as large ones. No prompt is longer than
    `max_tokens`.

    >>> shapes(6, 4, 64, seed=0)
    [[16, 16, 16, 16], [1], [64], [1, 1, 1, 1], [1, 1, 1, 1, 1], [64, 1]]
    """
    draw = random.Random(seed)
    found = edges(max_requests, max_tokens)
    for number in range(len(found), batches):
        if number % TURN == LONG:
            found.append(_long(draw, max_requests, max_tokens))
            continue
        crowd = (max_requests + 1, 2 * max_requests)
        requests = draw.randint(*crowd if number % TURN == CROWDED else (1, max_requests))
        found.append(_cut(_size(draw, requests, max_tokens), requests, draw))
    return found[:batches]


def edges(max_requests: int, max_tokens: int) -> list[list[int]]:
    """The least and the most of everything, and one more than that. The first is what is measured
    in any case: it has all the tokens there can be."""
    even = [max_tokens // max_requests] * max_requests
    even[0] += max_tokens % max_requests
    return [
        even,
        [1],
        [max_tokens],
        [1] * max_requests,
        [1] * (max_requests + 1),
        [max_tokens, 1],
    ]


def fits(lengths: list[int], mode: str, max_requests: int, max_tokens: int) -> bool:
    """Whether a graph of this mode has room for the batch; what has not runs eagerly.

    >>> fits([1] * 5, "full", 4, 64), fits([1] * 5, "breakable", 4, 64)
    (False, True)
    >>> fits([64, 1], "breakable", 4, 64), fits([64], "eager", 4, 64)
    (False, False)
    """
    roomy = mode != "full" or len(lengths) <= max_requests
    return mode != "eager" and roomy and sum(lengths) <= max_tokens


def _size(draw: random.Random, least: int, most: int) -> int:
    size = math.exp(draw.uniform(math.log(least), math.log(most + 1)))
    return min(max(int(size), least), most)


def _cut(tokens: int, requests: int, draw: random.Random) -> list[int]:
    """So many tokens in so many prompts, cut where chance will have it."""
    cuts = [0, *sorted(draw.sample(range(1, tokens), requests - 1)), tokens]
    return [stop - start for start, stop in itertools.pairwise(cuts)]


def _long(draw: random.Random, max_requests: int, max_tokens: int) -> list[int]:
    """Up to half as many tokens again as fit: two halves, one of them in pieces."""
    tokens = max_tokens + draw.randint(1, max(1, max_tokens // 2))
    half = tokens // 2
    pieces = draw.randint(1, max(1, min(max_requests - 1, half)))
    return [tokens - half, *_cut(half, pieces, draw)]
