"""Learning rates by the clock: training ends at a moment, not after a number of steps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator


def shares(until: float, warm_up: int) -> Iterator[tuple[int, float]]:
    """(step, learning rate factor) until the clock (`time.monotonic`) reads `until`: a linear rise
    over `warm_up` steps under half a cosine over the time."""
    begin, step = time.monotonic(), 0
    while (now := time.monotonic()) < until:
        share = (now - begin) / (until - begin)
        yield step, min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * share))
        step += 1
