"""Counters and reasons: what was captured, replayed, broken, declined, and why.

A `PartReport` belongs to one runner (one patched module), a `Report` gathers a pipeline's parts.
This module holds facts and prints them; it decides nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


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


@dataclass
class Report:
    """What `accel.report(pipe)` returns: a `PartReport` a patched part, and the graphs' memory.

    `inactive` says why nothing is accelerated here (no CUDA, say), else None. `str(report)` is a
    short text; `report.to_dict()` is plain data for JSON.

    >>> print(Report(inactive="no CUDA device: the pipeline runs eagerly"))
    accel is inactive: no CUDA device: the pipeline runs eagerly
    """

    parts: list[PartReport] = field(default_factory=list)
    pool_bytes: int = 0
    memory_limit: int | None = None
    inactive: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, numbers and strings."""
        plain = asdict(self, dict_factory=dict)
        for part, reported in zip(plain["parts"], self.parts, strict=True):
            part["reasons"] = dict(reported.reasons)  # asdict takes a Counter apart wrongly
            part["changes"] = dict(reported.changes)
        return plain

    def __getitem__(self, name: str) -> PartReport:
        named = {part.name: part for part in self.parts}
        if name not in named:
            known = ", ".join(named) or "none"
            raise KeyError(f"no patched part named {name!r}; patched parts: {known}")
        return named[name]

    def __str__(self) -> str:
        if self.inactive is not None:
            return f"accel is inactive: {self.inactive}"
        lines = [line for part in self.parts for line in _lines_of(part)]
        return "\n".join(lines) or "nothing patched"


def _lines_of(part: PartReport) -> list[str]:
    counts = f"{part.captures} captured, {part.replays} replayed, {part.eager_calls} eager"
    lines = [f"{part.name} ({part.kind}): {counts}"]
    if part.declined is not None:
        lines.append(f"  declined: {part.declined}")
    for graph in part.graphs:
        made = f"{graph.segments} segments, {graph.operations} ops, {graph.seconds * 1e3:.0f} ms"
        lines.append(f"  graph {graph.signature}: {made}, {graph.replays} replays")
        lines.extend(f"    {b.kind} break at {b.where}: {b.what}" for b in graph.breaks)
    lines.extend(f"  changed x{count}: {what}" for what, count in part.changes.most_common())
    lines.extend(f"  eager x{count}: {reason}" for reason, count in part.reasons.most_common())
    return lines
