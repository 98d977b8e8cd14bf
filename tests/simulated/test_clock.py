"""The fake clock: who waits for whom, and for how long."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def test_the_host_runs_ahead_until_it_waits(sim: torch.device, backend: Any) -> None:
    x, here = torch.zeros(3, device=sim), backend.current_stream(sim)
    backend.synchronize(here)
    backend.clock.op_cost["add"] = 1e-3
    start, event = backend.now(), backend.record_event(here)
    for _ in range(5):
        x.add_(1)
    assert backend.now() == start
    done = backend.record_event(here)
    assert not done.query()
    assert event.elapsed_time(done) == pytest.approx(5.0)
    backend.synchronize(here)
    assert backend.now() - start == pytest.approx(5e-3)
    assert done.query()


def test_a_slow_host_keeps_the_device_waiting(sim: torch.device, backend: Any) -> None:
    x, here = torch.zeros(3, device=sim), backend.current_stream(sim)
    backend.synchronize(here)
    backend.clock.default_host = 50e-6
    start = backend.now()
    for _ in range(10):
        x.add_(1)
    issued = backend.now()
    backend.synchronize(here)
    assert issued - start == pytest.approx(500e-6)
    assert backend.now() - issued == pytest.approx(10e-6)  # the last operation only


def test_reading_a_value_waits(sim: torch.device, backend: Any) -> None:
    x = torch.zeros(3, device=sim)
    before = backend.counters.host_reads
    backend.clock.op_cost["sum"] = 1.0
    assert x.sum().item() == 0.0
    assert backend.now() >= 1.0
    assert backend.counters.host_reads == before + 1


def test_streams_wait_for_each_other_when_told(sim: torch.device, backend: Any) -> None:
    x, main, side = torch.zeros(3, device=sim), *(backend.new_stream(sim) for _ in range(2))
    backend.clock.op_cost["add"] = 1.0
    with backend.on_stream(main):
        x + 1
        assert backend.current_stream(sim) is main
    with backend.on_stream(side):
        x + 1
    assert main.time == pytest.approx(side.time)
    backend.wait_stream(side, main)
    with backend.on_stream(side):
        x + 1
    assert side.time == pytest.approx(main.time + 1)
    backend.wait_event(main, backend.record_event(side))
    assert main.time == pytest.approx(side.time)


def test_a_replay_costs_the_device_and_not_the_host(
    sim: torch.device, backend: Any, record: Any
) -> None:
    backend.clock.default_host = 50e-6
    x = torch.zeros(3, device=sim)
    segment, _ = record(lambda: [x.add_(1) for _ in range(10)])
    backend.clock.replay_host = 5e-6
    here = backend.current_stream(sim)
    backend.synchronize(here)
    start = backend.now()
    segment.replay()
    assert backend.now() - start == pytest.approx(5e-6)
    backend.synchronize(here)
    assert backend.now() - start == pytest.approx(105e-6)


def test_the_clock_counts_what_ran(sim: torch.device, backend: Any) -> None:
    x = torch.zeros(3, device=sim)
    executed = backend.counters.executed
    x.add_(1)
    x.view(1, 3).t()  # touches no memory
    assert backend.counters.executed == executed + 1
    assert backend.counters.by_name["add"] == 1
