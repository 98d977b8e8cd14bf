"""A long recording ends a segment now and then: what is replayed stays the same, also where a cut,
or what is made of one, fails."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.backend import backend_for
from accel.graph import BreakableGraph, Refused, capture
from accel.memory import Pool
from accel.pipelines.tiny import FAMILIES
from tests.accel.common import MakeTwin
from tests.accel.same import assert_same
from tests.accel.test_families import moved
from tests.accel.test_record import record


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.arange(6.0).view(2, 3).to(device)


def seven_ops(x: Tensor) -> Tensor:
    y = x * 2 + 1
    return (y.tanh() - x).exp() / 3 + y


class TestCuts:
    """A long recording ends a segment now and then, so that the device works meanwhile."""

    @pytest.fixture(autouse=True)
    def short_segments(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("accel.record.SEGMENT_OPERATIONS", 3)

    def test_a_long_recording_is_several_segments(self, x: Tensor) -> None:
        graph, y = record(seven_ops, x)
        assert (graph.operations, graph.segments, graph.breaks) == (7, 3, [])
        x.mul_(-0.5)
        graph.replay()
        assert_same(y, seven_ops(x))

    def test_an_error_after_a_cut_leaves_the_pool_usable(self, x: Tensor) -> None:
        pool = Pool(x.device)
        with pytest.raises(ValueError, match="mine"), capture(BreakableGraph(pool)):
            seven_ops(x)
            raise ValueError("mine")
        assert pool.may_cut
        graph = BreakableGraph(pool)
        with capture(graph):
            y = seven_ops(x)
        assert_same(y, seven_ops(x))

    @pytest.mark.parametrize("name", ["sd15", "zimage", "flux", "sana", "wan", "mochi"])
    def test_a_family_in_short_segments(self, name: str, twin: MakeTwin) -> None:
        family = FAMILIES[name]
        both = twin(lambda: family.make(seed=0))
        for seed in range(4):
            both(seed, lambda draw: moved(family.inputs(draw.seed, 0), draw.device))
        if both.report.graphs:
            assert both.report.graphs[0].segments >= both.report.graphs[0].operations // 3

    def test_a_cut_that_fails_is_not_made_again(
        self, sim: torch.device, twin: MakeTwin, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As CUDA's does where work forked to another stream has not joined again."""
        from tests.simulated.segment import SimulatedSegment

        end = SimulatedSegment.end

        def refuses_to_end(self: SimulatedSegment) -> None:
            if len(self.steps) == 3:
                self.refuse("unjoined work")
            end(self)

        monkeypatch.setattr(SimulatedSegment, "end", refuses_to_end)
        both = twin(lambda: seven_ops)
        if both.device.type != "sim":
            pytest.skip("of the simulated device")
        for seed in range(6):
            both(seed)
        assert both.report.captures == 1
        assert both.report.graphs[0].segments == 1

    def test_what_cannot_be_made_launchable_is_not_kept(
        self, twin: MakeTwin, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*of: Any) -> None:
            raise RuntimeError("no room for a graph")

        both = twin(lambda: seven_ops)
        if both.device.type == "sim":
            monkeypatch.setattr("tests.simulated.segment.SimulatedSegment.ready", fails)
        else:
            monkeypatch.setattr("accel.backend._launchable", fails)
        for seed in range(4):
            both(seed)
        assert both.report.captures == 0
        assert "no room for a graph" in str(both.report.declined)

    def test_the_first_error_is_told_where_the_forward_goes_on(
        self, sim: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tests.simulated.segment import SimulatedSegment

        def fails(*of: Any) -> None:
            raise RuntimeError("no room for a graph")

        def goes_on(x: Tensor) -> Tensor:
            with contextlib.suppress(RuntimeError):
                return seven_ops(x) * seven_ops(x).max().item()
            return seven_ops(x + 5)

        monkeypatch.setattr(SimulatedSegment, "ready", fails)
        x, pool = torch.ones(4, device=sim), Pool(sim)
        with pytest.raises(Refused, match="no room for a graph"), capture(BreakableGraph(pool)):
            goes_on(x)
        monkeypatch.undo()
        assert_same(record(seven_ops, x)[1], seven_ops(x))

    def test_a_recording_that_fails_waits_for_what_is_being_made_launchable(
        self, sim: torch.device
    ) -> None:
        """Else its memory would not come back with the pool, for the eager call that is next."""
        from tests.simulated.tensors import arena

        x, pool = torch.ones(4, device=sim), Pool(sim)
        with pytest.raises(torch.OutOfMemoryError), capture(BreakableGraph(pool)):
            seven_ops(x)
            waiting = arena.pools[pool.id].waiting
            assert waiting
            raise torch.OutOfMemoryError
        assert not waiting

    def test_work_forked_across_a_cut_is_recorded_whole_the_next_time(
        self, device: torch.device, twin: MakeTwin
    ) -> None:
        if device.type == "sim":
            pytest.skip("the simulated device does not carry a recording over to a forked stream")
        both = twin(lambda: forks)
        for seed in range(6):
            both(seed)
        assert both.report.captures == 1
        assert both.report.graphs[0].segments == 1
        backend = backend_for(device)
        backend.empty_cache()
        x = torch.empty(
            backend.reserved_bytes(device) + (32 << 20), dtype=torch.uint8, device=device
        )
        before, size = backend.reserved_bytes(device), x.nbytes
        del x
        backend.empty_cache()  # of no effect while the allocator thinks that something is recorded
        assert backend.reserved_bytes(device) <= before - size


def forks(x: Tensor) -> Tensor:
    """Work on a side stream that joins again after several ops on the first."""
    backend: Any = backend_for(x.device)
    here, side = backend.current_stream(x.device), backend.new_stream(x.device)
    backend.wait_stream(side, here)
    with backend.on_stream(side):
        z = x + 1
    y = seven_ops(x)
    backend.wait_stream(here, side)
    return z * y
