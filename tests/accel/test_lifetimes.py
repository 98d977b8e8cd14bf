"""The rules on lifetimes, L1 to L6: each stops a silent corruption (L7 to L12: test_effects.py).

Where the simulated device can show it, a rule is also switched off, and then the fault must show:
else the test above it would prove nothing.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.backend import backend_for
from accel.breaks import Break
from accel.graph import BreakableGraph, capture, eager_on_graph
from accel.guard import Held
from accel.memory import Pool
from accel.runner import GraphRunner
from tests.accel.same import assert_same
from tests.accel.twin import Twin

MakeTwin = Callable[..., Twin]
MakeRunner = Callable[..., GraphRunner]


def scribble(device: torch.device, *sizes: int) -> None:
    """Takes, fills and frees memory: whatever was freed by mistake now holds something else."""
    taken = [torch.full((n,), 1e9, device=device) for n in sizes for _ in range(8)]
    del taken


class TestL1BoundaryBuffers:
    """A break's result is copied into the graph's own buffer."""

    @staticmethod
    def tables_after_replays(device: torch.device) -> tuple[list[Any], Any]:
        tables = [torch.full((3,), float(i), device=device) for i in range(3)]
        turns = iter([0, 1, 2])

        @eager_on_graph
        def table() -> Tensor:
            return tables[next(turns)]

        graph = BreakableGraph(Pool(device))
        with torch.no_grad(), capture(graph):
            y = table() * 10
        results = [y.tolist()]
        for _ in range(2):
            graph.replay()
            results.append(y.tolist())
        return results, [x.tolist() for x in tables]

    def test_a_models_table_is_never_the_graphs(self, device: torch.device) -> None:
        results, tables = self.tables_after_replays(device)
        assert results == [[0.0] * 3, [10.0] * 3, [20.0] * 3]
        assert tables == [[0.0] * 3, [1.0] * 3, [2.0] * 3]

    def test_without_the_copy_tables_are_overwritten(
        self, sim: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Break, "_buffered", lambda self, x: x)
        _, tables = self.tables_after_replays(sim)
        assert tables != [[0.0] * 3, [1.0] * 3, [2.0] * 3]


class TestL2WeakInputs:
    """An explicit break's inputs that were born in the recording are not kept alive."""

    @staticmethod
    def pool_bytes(device: torch.device, breaks: int) -> int:
        @eager_on_graph
        def total(x: Tensor) -> Tensor:
            return x.sum()

        pool = Pool(device)
        graph = BreakableGraph(pool)
        x = torch.ones(1 << 20, device=device)
        with torch.no_grad(), capture(graph):
            y = torch.zeros((), device=device)
            for i in range(breaks):
                y = y + total(x * i)
        assert y.item() == sum(range(breaks)) * float(1 << 20)
        x.fill_(2)
        graph.replay()
        assert y.item() == 2 * sum(range(breaks)) * float(1 << 20)
        return pool.bytes()

    def test_many_breaks_need_the_memory_of_one(self, device: torch.device) -> None:
        assert self.pool_bytes(device, 8) <= self.pool_bytes(device, 2) + (4 << 20)

    def test_held_strongly_they_need_the_sum(
        self, sim: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(type(backend_for(sim)), "alias", lambda self, tensor: tensor)
        assert self.pool_bytes(sim, 8) >= self.pool_bytes(sim, 2) + (16 << 20)

    def test_what_a_break_is_given_from_outside_stays_alive(self, device: torch.device) -> None:
        @eager_on_graph
        def add(x: Tensor, y: Tensor) -> Tensor:
            return x + y

        graph = BreakableGraph(Pool(device))
        x, outside = torch.ones(64, device=device), torch.full((64,), 5.0, device=device)
        with torch.no_grad(), capture(graph):
            y = add(x, outside) * 2
        del outside
        scribble(device, 64)
        graph.replay()
        assert y.tolist() == [12.0] * 64


class TestL3HeldStorages:
    """What recorded work reads from outside is held, and its replacement noticed."""

    @staticmethod
    def serve(device: torch.device) -> tuple[list[Any], list[Any], GraphRunner]:
        @functools.lru_cache(1)
        def table(size: int) -> Tensor:
            return torch.arange(float(size), device=device)

        def forward(x: Tensor) -> Tensor:
            return x + table(x.shape[0])

        runner = GraphRunner(forward, pool=Pool(device), capture="always")
        results, expected = [], []
        with torch.no_grad():
            for size in (64, 64, 64, 32, 64, 32, 32, 64):
                results.append(runner(torch.ones(size, device=device)))
                expected.append(torch.ones(size, device=device) + torch.arange(size, device=device))
                scribble(device, 64, 32)
        return results, expected, runner

    def test_a_table_evicted_from_a_cache(self, device: torch.device) -> None:
        results, expected, runner = self.serve(device)
        assert_same(results, expected)
        assert runner.report.recaptures > 0

    def test_unheld_it_is_read_after_its_death(
        self, sim: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Held, "hold", lambda self, storage: None)
        results, expected, _ = self.serve(sim)
        with pytest.raises(AssertionError):
            assert_same(results, expected)

    def test_a_table_replaced_in_every_call_is_given_up_with_the_reason(
        self, device: torch.device, runner: MakeRunner
    ) -> None:
        shelf = {"table": torch.zeros(4, device=device)}
        watched = runner(lambda x: x + shelf["table"])
        with torch.no_grad():
            for turn in range(10):
                if turn > 1:
                    shelf["table"] = torch.full((4,), float(turn), device=device)
                expected = torch.ones(4, device=device) + shelf["table"]
                assert_same(watched(torch.ones(4, device=device)), expected)
        assert "replaced a tensor" in str(watched.report.declined)

    @pytest.mark.parametrize("where", ["host", "device"])
    @pytest.mark.parametrize("elements", [4, 400])
    def test_recordings_that_hold_one_table_see_both_that_it_is_replaced(
        self, device: torch.device, runner: MakeRunner, where: str, elements: int
    ) -> None:
        there = torch.device("cpu") if where == "host" else device
        shelf = {"table": torch.full((elements,), 2.0, device=there)}

        def forward(x: Tensor) -> Tensor:
            table = shelf["table"]
            return x * table[:2].to(x.device).sum() + table[1:].to(x.device).sum()

        watched, calls = runner(forward), [torch.ones(n, device=device) for n in (2, 3)]
        with torch.no_grad():
            for value in (2.0, 5.0):
                shelf["table"] = torch.full((elements,), value, device=there)
                for x in calls * 4:
                    assert_same(watched(x), forward(x))
        assert (watched.report.captures, watched.report.recaptures) == (4, 2)

    @pytest.mark.parametrize("elements", [4, 400])
    def test_a_host_table_that_changes_in_place(
        self, device: torch.device, runner: MakeRunner, elements: int
    ) -> None:
        table, x = torch.full((elements,), 2.0), torch.ones(2, device=device)
        watched = runner(lambda x: x * table.to(x.device).sum())
        with torch.no_grad():
            for value in (2.0, 7.0):
                table[3] = value
                for _ in range(4):
                    assert watched(x).tolist() == [2.0 * (elements - 1) + value] * 2
        assert watched.report.replays > 1

    @pytest.mark.parametrize("elements", [4, 400])
    def test_a_view_of_a_host_table_that_changes_in_place(
        self, device: torch.device, runner: MakeRunner, elements: int
    ) -> None:
        table, x = torch.full((elements,), 2.0), torch.ones(2, device=device)
        head, tail = table[:2], table[2:]
        watched = runner(lambda x: x * head.to(x.device).sum() + tail.to(x.device).sum())
        with torch.no_grad():
            for value in (2.0, 7.0):
                tail[-1] = value
                for _ in range(4):
                    assert watched(x).tolist() == [4.0 + 2.0 * (elements - 3) + value] * 2
        assert watched.report.replays > 1

    def test_weights_are_not_kept_alive(self, device: torch.device, runner: MakeRunner) -> None:
        model = nn.Linear(8, 8).to(device)
        watched = runner(model, module=model)
        with torch.no_grad():
            for _ in range(3):
                watched(torch.ones(2, 8, device=device))
        assert watched.report.captures == 1
        weight = weakref.ref(model.weight.untyped_storage())
        model.weight.data = model.weight.data.clone()
        gc.collect()
        assert weight() is None


class TestL4FirstCalls:
    """The first call is eager; math libraries' handles are made before a recording."""

    @staticmethod
    def in_threads(device: torch.device) -> GraphRunner:
        model = nn.Linear(8, 8).to(device)
        runner = GraphRunner(model, pool=Pool(device), capture="always", module=model)

        def work(rows: int) -> None:
            with torch.no_grad():
                for _ in range(3):
                    runner(torch.ones(rows, 8, device=device))

        for rows in (1, 2, 3):
            thread = threading.Thread(target=work, args=(rows,))
            thread.start()
            thread.join()
        return runner

    def test_recordings_in_fresh_threads(self, device: torch.device) -> None:
        report = self.in_threads(device).report
        assert (report.captures, report.replays, report.eager_calls) == (3, 3, 3)

    def test_without_handles_they_fail(
        self, sim: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend: Any = backend_for(sim)
        monkeypatch.setattr(type(backend), "warm_libraries", lambda self, *asked: None)
        reasons = self.in_threads(sim).report.reasons
        assert any("recording failed" in reason and "handle" in reason for reason in reasons)


class TestL5PoolAnchor:
    """A pool's id outlives its graphs."""

    @staticmethod
    def record_forget_record(device: torch.device) -> GraphRunner:
        runner = GraphRunner(lambda x: x * 2, pool=Pool(device), capture="always")
        with torch.no_grad():
            for _ in range(3):
                runner(torch.ones(2, device=device))
            runner.forget_graphs()
            gc.collect()
            for _ in range(2):
                assert runner(torch.ones(2, device=device)).tolist() == [2.0, 2.0]
        return runner

    def test_all_graphs_forgotten_then_recorded_again(self, device: torch.device) -> None:
        report = self.record_forget_record(device).report
        assert (report.captures, report.declined) == (2, None)

    def test_without_anchor_and_graveyard_no_recording_works_again(
        self, sim: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Pool, "anchor", lambda self: None)
        monkeypatch.setattr(Pool, "bury", lambda self, segments: None)
        assert "INTERNAL ASSERT" in str(self.record_forget_record(sim).report.declined)


class TestL6Graveyard:
    """Discarded segments are destroyed with their pool's generation, not before."""

    def test_no_segment_dies_before_its_generation(self, device: torch.device) -> None:
        pool = Pool(device)
        runner = GraphRunner(lambda x: x @ x, pool=pool, capture="always")
        with torch.no_grad():
            for _ in range(3):
                runner(torch.ones(4, 4, device=device))
        (entry,) = runner.entries.values()
        segment = weakref.ref(entry.variants[0].graph.steps[0])
        runner.forget_graphs()
        del entry
        gc.collect()
        assert segment() is not None
        pool.retire()
        gc.collect()
        assert segment() is None
        assert pool.bytes() == 0


def test_what_a_refused_recording_left_somewhere_is_not_overwritten_by_older_graphs(
    twin: MakeTwin,
) -> None:
    def build() -> Any:
        kept: dict[str, Tensor] = {}
        calls: list[int] = []

        def forward(x: Tensor) -> Tensor:
            if x.shape[0] == 2:
                for _ in range(6):
                    x = (x * 2).relu() + 1
                return x
            calls.append(1)
            if len(calls) == 2:
                kept["table"] = x * 0 + 5
            y = x * 3
            return y + kept["table"] if "table" in kept else y

        return forward

    both = twin(build)
    for seed in range(3):
        both(seed, lambda draw: (draw(2, 64),))
    for seed in range(3):
        both(seed, lambda draw: (draw(4, 32),))
        both(seed, lambda draw: (draw(2, 64),))
    for seed in range(4):
        both(seed, lambda draw: (draw(2, 64),))
        both(seed, lambda draw: (draw(4, 32),))
