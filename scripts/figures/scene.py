"""The calls that the figures show, made once on the simulated device.

Knows which inputs tell the story; what came of them is read from traces and reports.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from accel.backend import register_backend
from accel.memory import Pool
from accel.recorded import Recorded
from accel.runner import GraphRunner
from figures.example import forward, twelve_ops
from figures.trace import Trace
from tests.simulated import new_device
from tests.simulated.device import card

SIDE = 32
SMALL, OTHER_SMALL, BIG = 1.0, 2.0, 7.0
"""Values of the input: 2 x + 1 stays below 10, again, and does not."""


@dataclass
class Call:
    """One call of the example through a runner."""

    number: int
    value: float
    trace: Trace
    variants: list[Recorded]
    """The recordings there are after it, in the order in which they were made."""
    counts: tuple[int, int, int, int]
    """Eager calls, captures, replays and guard misses so far."""


@functools.cache
def calls() -> list[Call]:
    """The example called with a small value three times, a big one three times, and a small one."""
    device = _new_device()
    runner = GraphRunner(forward, pool=Pool(device), name="forward", capture="always")
    made: list[Call] = []
    order: list[Recorded] = []
    for value in (SMALL, SMALL, OTHER_SMALL, BIG, BIG, BIG + 1, SMALL):
        x = torch.full((SIDE, SIDE), value, device=device)
        expected = forward(x)
        with Trace().open() as trace:
            result = runner(x)
        assert torch.equal(result.cpu(), expected.cpu())
        (entry,) = runner.entries.values()
        order += [variant for variant in entry.variants if variant not in order]
        report = runner.report
        counts = report.eager_calls, report.captures, report.replays, report.guard_misses
        made.append(Call(len(made) + 1, value, trace, order[:], counts))
    return made


@dataclass
class Race:
    """A forward of twelve ops, eager and replayed, at given prices; what "auto" makes of it."""

    host: float
    device: float
    eager: Trace
    replayed: Trace
    declined: str | None


def race(host: float, device: float) -> Race:
    """Runs it where an op costs `host` seconds to issue and `device` seconds to run."""
    always, _ = _race_of("always", host, device)
    _, declined = _race_of("auto", host, device)
    return Race(host, device, *always, declined)


def _race_of(capture: Any, host: float, device: float) -> tuple[tuple[Trace, Trace], str | None]:
    sim = _new_device()
    runner = GraphRunner(twelve_ops, pool=Pool(sim), name="forward", capture=capture)
    clock = card.clock
    clock.default_host, clock.default_cost, clock.replay_host = host, device, host
    x = torch.full((SIDE, SIDE), 0.01, device=sim)
    traces = []
    for run in (twelve_ops, runner, runner, runner, runner, runner, runner):
        card.synchronize(card.current_stream())
        begin = clock.host
        with torch.no_grad(), Trace().open() as trace:
            run(x)
            card.synchronize(card.current_stream())
        for span in trace.spans:
            span.begin, span.end = span.begin - begin, span.end - begin
        traces.append(trace)
    return (traces[0], traces[-1]), runner.report.declined


def _new_device() -> torch.device:
    register_backend("sim", new_device())
    return torch.device("sim:0")
