"""Counters and reasons of one prefill runner: facts only, what a person reads is made elsewhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class BucketReport:
    """One captured graph: its rows, whether its keys come from the cache, what it cost.

    `pool_bytes` is what the shared pool grew by, `seconds` the wall time of the capture.

    >>> BucketReport(64, paged=False, segments=3, breaks=2, pool_bytes=0, seconds=0.1).replays
    0
    """

    bucket: int
    paged: bool
    segments: int
    breaks: int
    pool_bytes: int
    seconds: float
    replays: int = 0


@dataclass
class PrefillReport:
    """What a runner did. Every forward pass is one of `replays`, `eager_passes`; `own_passes` are
    prompts that a declined model ran by itself.

    >>> report = PrefillReport("llama", "full", "reference")
    >>> report.eager("4 requests, max_requests=2")
    >>> report.eager_passes, dict(report.reasons)
    (1, {'4 requests, max_requests=2': 1})
    """

    name: str
    mode: str
    """How it runs: "breakable", "full" or "eager"."""
    attention: str
    asked: str = field(init=False)
    """The mode that was asked for: what `mode` was at first."""
    declined: str | None = None
    """Why prompts run through the model's own forward, one by one; None if they do not."""
    layers: int = 0
    groups: int = 0
    calls: int = 0
    tokens: int = 0
    padding: int = 0
    """Rows that were computed and meant nothing."""
    captures: int = 0
    recaptures: int = 0
    replays: int = 0
    eager_passes: int = 0
    own_passes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    """What was decided at construction or while capturing, in words."""
    buckets: list[BucketReport] = field(default_factory=list)
    cache_bytes: int = 0
    output_bytes: int = 0
    """Hidden states of the largest batch: a result's copy of what graphs leave in the pool."""
    buffer_bytes: int = 0
    workspace_bytes: int = 0
    pool_bytes: int = 0

    def __post_init__(self) -> None:
        self.asked = self.mode

    def untold_notes(self) -> list[str]:
        """The notes, without what `reasons` say as well.

        >>> report = PrefillReport("llama", "eager", "reference")
        >>> report.notes.append("nothing can be captured on cpu")
        >>> report.eager("nothing can be captured on cpu")
        >>> report.untold_notes()
        []
        """
        return [note for note in self.notes if note not in self.reasons]

    def __str__(self) -> str:
        """The same in words, a line for each fact, as `accel.report` does for pipelines.

        >>> report = PrefillReport("llama", "full", "reference", calls=2, tokens=9, replays=1)
        >>> report.eager("3 requests, max_requests=2")
        >>> print(report)
        llama (full, attention reference): 2 calls, 9 tokens, 0 of padding
          0 captured, 1 replayed, 1 eager
          eager x1: 3 requests, max_requests=2
        """
        mode = self.mode if self.mode == self.asked else f"{self.mode} instead of {self.asked}"
        how = f"{mode}, attention {self.attention}"
        did = f"{self.calls} calls, {self.tokens} tokens, {self.padding} of padding"
        lines = [f"{self.name} ({how}): {did}"]
        lines += [f"  declined: {self.declined}"] if self.declined else []
        counts = f"{self.captures} captured, {self.replays} replayed, {self.eager_passes} eager"
        lines.append(f"  {counts}" + (f", {self.own_passes} own" if self.own_passes else ""))
        for made in self.buckets:
            paged = ", paged" if made.paged else ""
            lines.append(f"  graph {made.bucket}{paged}: {made.replays} replays")
        lines += [f"  eager x{n}: {reason}" for reason, n in self.reasons.most_common()]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.untold_notes())])

    def eager(self, reason: str) -> None:
        """Counts one forward pass that ran eagerly, and why."""
        self.eager_passes += 1
        self.reasons[reason] += 1
