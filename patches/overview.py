"""What `accel.report(obj)` returns: the parts' reports together, as text and as plain data.

Holds facts and prints them; it decides nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from accel.reporting import PartReport


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
