"""What the simulated device and the engine did during a call, as a list of phases to draw.

Wraps the points where work is issued, recorded and replayed, for as long as a `Trace` is open. It
knows the engine from outside: which segment or break belongs to which graph is looked up in the
graph's own `steps`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

import figures  # noqa: F401  makes tests/ importable
from accel.breaks import Break, GuardMiss
from accel.graph import BreakableGraph
from tests.simulated.device import card
from tests.simulated.segment import SimulatedSegment


@dataclass
class Phase:
    """A stretch of one call: `kind` is "eager", "record", "segment" (a replay) or "break"."""

    kind: str
    names: list[str] = field(default_factory=list)
    subject: Any = None
    """The segment or break."""
    value: Any = None
    """What a break returned to the host."""
    missed: str | None = None
    """Why a break's guard did not fit."""


@dataclass
class Span:
    """Something that lasted from `begin` to `end`, in seconds of the simulated clock."""

    kind: str  # "issue", "launch", "wait", "op", "segment"
    name: str
    begin: float
    end: float


class Trace:
    """Phases and spans of what happens while it is open."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.spans: list[Span] = []

    @contextlib.contextmanager
    def open(self) -> Iterator[Trace]:
        """Watches."""
        with contextlib.ExitStack() as stack:
            for owner, name, watch in (
                (type(card), "issued", self._issued),
                (type(card), "write_seed", self._skip),
                (type(card), "read_by_host", self._read),
                (type(card), "synchronize", self._read),
                (SimulatedSegment, "end", self._end),
                (SimulatedSegment, "replay", self._replay),
                (Break, "_run", self._break_runs),
                (Break, "replay", self._break_replays),
            ):
                stack.enter_context(mock.patch.object(owner, name, _around(owner, name, watch)))
            yield self

    def _issued(self, original: Callable[..., Any], owner: Any, stream: Any, name: str) -> Any:
        host = card.clock.host
        original(owner, stream, name)
        self.spans.append(Span("issue", name, host, card.clock.host))
        self.spans.append(Span("op", name, stream.time - card.clock.cost(name), stream.time))
        if not self.phases or self.phases[-1].kind not in ("eager", "break"):
            self.phases.append(Phase("eager"))
        self.phases[-1].names.append(name)

    def _skip(self, original: Callable[..., Any], *args: Any) -> None:
        """Not drawn: what the device itself does as each segment begins."""

    def _read(self, original: Callable[..., Any], *args: Any) -> Any:
        host = card.clock.host
        original(*args)
        self.spans.append(Span("wait", "", host, card.clock.host))

    def _end(self, original: Callable[..., Any], segment: SimulatedSegment) -> Any:
        original(segment)
        if segment.steps:
            names = [step.name for step in segment.steps]
            self.phases.append(Phase("record", names, segment))

    def _replay(self, original: Callable[..., Any], segment: SimulatedSegment) -> Any:
        host, stream = card.clock.host, card.current_stream()
        device = max(stream.time, host + card.clock.replay_host)
        original(segment)
        self.spans.append(Span("launch", "", host, card.clock.host))
        self.spans.append(Span("segment", "", device, stream.time))
        self.phases.append(Phase("segment", [step.name for step in segment.steps], segment))

    def _break_runs(self, original: Callable[..., Any], step: Break) -> Any:
        phase = Phase("break", [], step)
        self.phases.append(phase)
        result = original(step)
        phase.value = None if isinstance(result, torch.Tensor) else result
        return result

    def _break_replays(self, original: Callable[..., Any], step: Break) -> Any:
        try:
            return original(step)
        except GuardMiss as miss:
            self.phases[-1].missed = str(miss)
            self.phases.append(Phase("eager"))
            raise


def _around(owner: Any, name: str, watch: Callable[..., Any]) -> Callable[..., Any]:
    original = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        return watch(original, *args, **kwargs)

    return watched


def place(graph: BreakableGraph, subject: Any) -> int:
    """The number, from 1, of a segment among the graph's segments or a break among its breaks."""
    alike = [x for x in graph.steps if isinstance(x, Break) == isinstance(subject, Break)]
    return alike.index(subject) + 1
