"""Token buckets: the sizes that batches are padded to, so that a few graphs serve every length.

Knows numbers only. Small buckets are wide apart, since there the device has nothing to do but read
the weights; large ones are closer, since there padding costs what it weighs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

SMALL = (64, 128, 192, 256, 384, 512, 768, 1024)
TILE = 256
"""Rows of the largest tiles that matrix products work through: from 2,048 on, sizes closer to each
other would save next to nothing. Up to there they lie 128 apart, above 8,192 there are 16 a
doubling."""


class Ladder:
    """Bucket sizes in rising order; the largest is `max_tokens`.

    >>> Ladder(256).sizes, Ladder(300).sizes
    ((64, 128, 192, 256), (64, 128, 192, 256, 300))
    >>> Ladder(8192).sizes[-4:], len(Ladder(8192).sizes)
    ((7424, 7680, 7936, 8192), 40)
    >>> Ladder(256).bucket(129), Ladder(256).bucket(257)
    (192, None)
    """

    def __init__(self, max_tokens: int, sizes: Sequence[int] | None = None) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens}: a batch has at least one token")
        sizes = None if sizes is None else [*sizes]
        if sizes is not None and not all(isinstance(n, int) for n in sizes):
            raise ValueError(f"buckets={sizes}: whole numbers, sizes in tokens")
        if sizes is not None and (not sizes or min(sizes) < 1 or max(sizes) > max_tokens):
            raise ValueError(f"buckets={sizes}: sizes lie between 1 and max_tokens={max_tokens}")
        below = (n for n in (_usual(max_tokens) if sizes is None else sizes) if n < max_tokens)
        self.sizes = (*sorted({*below}), max_tokens)

    @property
    def largest(self) -> int:
        """The ceiling, `max_tokens`."""
        return self.sizes[-1]

    def bucket(self, tokens: int) -> int | None:
        """The smallest bucket with room for `tokens` rows; None if there is none."""
        at = bisect_left(self.sizes, tokens)
        return self.sizes[at] if at < len(self.sizes) else None

    def fewest(self, bucket: int) -> int:
        """The fewest tokens that a batch in that bucket has: one more than the next smaller holds.

        >>> Ladder(256).fewest(64), Ladder(256).fewest(192)
        (1, 129)
        """
        at = bisect_left(self.sizes, bucket)
        return self.sizes[at - 1] + 1 if at else 1

    def rows(self, tokens: int) -> int:
        """The bucket, or beyond the ceiling the next multiple of the smallest size.

        >>> Ladder(256).rows(10), Ladder(256).rows(257)
        (64, 320)
        """
        step = self.sizes[0]
        return self.bucket(tokens) or -(-tokens // step) * step


def _usual(max_tokens: int) -> list[int]:
    sizes, doubling = list(SMALL), SMALL[-1]
    while doubling < max_tokens:
        step = max(min(doubling // 8, TILE), doubling // 16)
        sizes += range(doubling, 2 * doubling, step)
        doubling *= 2
    return sizes
