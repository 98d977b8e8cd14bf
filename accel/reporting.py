"""Counters and reasons: what was captured, replayed, broken, declined, and why.

A `PartReport` belongs to one runner (one patched module).
This module holds facts; it decides nothing. What a person reads is made of them elsewhere.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class BreakReport:
    """Where a recording was interrupted: `where` is a source line, `what` the op or function.

    >>> BreakReport("model.py:7", "aten::nonzero", "automatic", guarded=True).what
    'aten::nonzero'
    """

    where: str
    what: str
    kind: str  # "automatic", "explicit", "module"
    guarded: bool


@dataclass
class GraphReport:
    """One recording: its inputs in words, its segments and breaks, and what it cost.

    `seconds` is the wall time of the recording call; `pool_bytes` what the shared pool grew by.

    >>> GraphReport("2x4", segments=1, operations=12, seconds=0.01, pool_bytes=512).replays
    0
    """

    signature: str
    segments: int
    operations: int
    seconds: float
    pool_bytes: int
    replays: int = 0
    breaks: list[BreakReport] = field(default_factory=list)


@dataclass
class PartReport:
    """What one runner did. A call is exactly one of `replays`, `captures`, `eager_calls`.

    `reasons` counts, in words, why calls ran eagerly, `changes` what made recordings unfit.

    >>> part = PartReport("unet", "UNet2DConditionModel")
    >>> part.eager("first call of the module")
    >>> part.eager_calls, dict(part.reasons)
    (1, {'first call of the module': 1})
    """

    name: str
    kind: str
    captures: int = 0
    replays: int = 0
    eager_calls: int = 0
    guard_misses: int = 0
    recaptures: int = 0
    evictions: int = 0
    declined: str | None = None
    reasons: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)
    graphs: list[GraphReport] = field(default_factory=list)

    def eager(self, reason: str) -> None:
        """Counts one call that ran eagerly, and why."""
        self.eager_calls += 1
        self.reasons[reason] += 1
