"""The rules on lifetimes and effects, L1 to L12: each stops a silent corruption.

Where the simulated device can show it, a rule is also switched off, and then the fault must show:
else the test above it would prove nothing.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.backend import Backend, backend_for
from accel.graph import BreakableGraph, Outputs, capture, eager_on_graph
from accel.guard import Ambient, Held
from accel.memory import Pool
from accel.runner import GraphRunner
from accel.signature import StaticInputs
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
        def hand_over(self: Outputs, x: Any) -> Any:
            self._targets.append(x)
            return x

        monkeypatch.setattr(Outputs, "_receive", hand_over)
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
        monkeypatch.setattr(Pool, "_warm_up", lambda self: None)
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


class TestL7FailedRecordings:
    """A recording that fails reports the first exception and leaves the process usable."""

    def test_a_device_error(self, device: torch.device, backend: Any, runner: MakeRunner) -> None:
        def hostile(x: Tensor) -> Tensor:
            x.add(1)
            getattr(torch, x.device.type).synchronize()
            raise AssertionError("never reached in a recording")

        def fine(x: Tensor) -> Tensor:
            return x * 3

        pool = Pool(device)
        good, bad = runner(fine, pool=pool), runner(hostile, pool=pool)
        x = torch.ones(3, device=device)
        with torch.no_grad():
            for _ in range(3):
                good(x)
                with pytest.raises(AssertionError, match="never reached"):
                    bad(x)
            for _ in range(3):
                assert good(x).tolist() == [3.0] * 3
        gc.collect()
        assert "never reached" not in str(bad.report.declined)
        assert good.report.captures == 2
        if device.type == "sim":
            assert backend.aborts == 0

    def test_a_python_error_costs_no_graph(self, device: torch.device, runner: MakeRunner) -> None:
        def raises(x: Tensor) -> Tensor:
            raise ValueError("no" * x.add(1).dim())

        pool = Pool(device)
        good, bad = runner(lambda x: x * 3, pool=pool), runner(raises, pool=pool)
        x = torch.ones(3, device=device)
        with torch.no_grad():
            for _ in range(4):
                good(x)
                with pytest.raises(ValueError, match="no"):
                    bad(x)
        assert (good.report.captures, good.report.replays) == (1, 2)
        assert pool.generation == 0

    def test_an_interrupt_leaves_everything_usable(
        self, device: torch.device, runner: MakeRunner
    ) -> None:
        raised: list[bool] = []

        def interrupted(x: Tensor) -> Tensor:
            y = x * 2
            if len(raised) == 1:
                raised.append(True)
                raise KeyboardInterrupt
            raised.append(True)
            return y

        watched, x = runner(interrupted), torch.ones(3, device=device)
        with torch.no_grad():
            watched(x)
            with pytest.raises(KeyboardInterrupt):
                watched(x)
            for _ in range(3):
                assert watched(x).tolist() == [2.0] * 3
        assert watched.report.captures == 1


class TestL8Results:
    """What a call returns is a copy, except inputs and weights, which are themselves."""

    def test_inputs_and_weights_are_themselves(
        self, device: torch.device, runner: MakeRunner
    ) -> None:
        model = nn.Linear(3, 3).to(device)
        watched = runner(lambda x: (x, x[1:], model.weight, x + 1), module=model)
        with torch.no_grad():
            for _ in range(4):
                x = torch.randn(2, 3).to(device)
                same, part, weight, new = watched(x)
                assert same is x
                assert part.data_ptr() == x[1:].data_ptr()
                assert weight is model.weight
                assert new.data_ptr() != x.data_ptr()
        assert watched.report.replays == 2

    def test_results_that_shared_memory_share_it_again(
        self, device: torch.device, runner: MakeRunner
    ) -> None:
        def forward(x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * 2
            return y, y.t()

        watched, x = runner(forward), torch.randn(2, 3).to(device)
        with torch.no_grad():
            for _ in range(4):
                one, other = watched(x)
                one[0, 1] = 7.0
                assert other[1, 0].item() == 7.0
                assert_same(watched(x)[0], x * 2)


class TestL9Effects:
    """No guard may follow an effect; a replay that is abandoned leaves the generator alone."""

    def test_a_guard_after_a_write(self, device: torch.device, runner: MakeRunner) -> None:
        total = torch.zeros(3, device=device)

        def forward(x: Tensor) -> Tensor:
            total.add_(x)
            return x + total.sum().item()

        watched = runner(forward)
        with torch.no_grad():
            for turn in range(1, 6):
                watched(torch.ones(3, device=device))
                assert total.tolist() == [float(turn)] * 3
        assert watched.report.captures == 0
        assert "after aten.add_.Tensor has written" in str(watched.report.declined)

    def test_a_write_after_a_guard_is_recorded(
        self, device: torch.device, runner: MakeRunner
    ) -> None:
        total = torch.zeros(3, device=device)

        def forward(x: Tensor) -> Tensor:
            y = x + x.sum().item()
            total.add_(y)
            return y

        watched = runner(forward)
        with torch.no_grad():
            for turn in range(1, 6):
                watched(torch.ones(3, device=device))
                assert total.tolist() == [4.0 * turn] * 3
        assert (watched.report.captures, watched.report.replays) == (1, 3)

    def test_an_impure_break_before_a_guard(self, device: torch.device, runner: MakeRunner) -> None:
        seen: list[float] = []

        @eager_on_graph
        def note(x: Tensor) -> None:
            seen.append(float(x[0]))

        def forward(x: Tensor) -> Tensor:
            note(x)
            return x + x.sum().item()

        watched = runner(forward)
        with torch.no_grad():
            for turn in range(4):
                watched(torch.full((3,), float(turn), device=device))
        assert watched.report.captures == 0
        assert "the break" in str(watched.report.declined)

    def test_random_numbers_after_a_missed_guard(self, twin: MakeTwin) -> None:
        def forward(x: Tensor) -> Tensor:
            noise = torch.rand_like(x)
            return x + noise * x.sum().item() + torch.rand_like(x)

        both = twin(lambda: forward)
        for seed in (1, 1, 1, 2, 1, 2, 3, 3, 1):
            both(seed)
        assert both.report.replays > 0
        assert both.report.guard_misses > 0


class TestL10KeptTensors:
    """A tensor of the recording that the model keeps means decline, with the reason."""

    @pytest.mark.parametrize("keep", ["result", "intermediate", "argument", "break"])
    def test_kept_on_the_module(self, keep: str, device: torch.device, runner: MakeRunner) -> None:
        class Keeps(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                y = x * 2
                found = (x > -1e9).nonzero()
                kept = {"result": y, "intermediate": x + 1, "argument": x, "break": found}
                self.kept = kept[keep]
                return y

        model = Keeps()
        watched = runner(model, module=model)
        with torch.no_grad():
            for turn in range(4):
                watched(torch.full((2, 2), float(turn), device=device))
                before = model.kept.tolist()
                scribble(device, 4, 8)
                assert model.kept.tolist() == before
        assert watched.report.captures == 0
        assert "keeps a tensor" in str(watched.report.declined)


class TestL11StaticInputs:
    """Static inputs reproduce strides and alignment."""

    def test_strides_and_alignment(self, device: torch.device, backend: Backend) -> None:
        base = torch.randn(64).to(device)
        given = [
            base[3].expand(4),
            base[:12].view(3, 4).t(),
            base[1:17].view(4, 4),
            base[:24].view(1, 2, 3, 4).permute(0, 3, 1, 2),
            base[::2],
            base[:0],
        ]
        static = StaticInputs(given, backend)
        assert_same(static.tensors, given)
        for x, y in zip(static.tensors, given, strict=True):
            if y.numel() > 1 and 0 not in y.stride():
                assert backend.address(x) % 16 == backend.address(y) % 16
        fresh = [base[40].expand(4), *(x * 2 for x in given[1:2]), base[9:25].view(4, 4)]
        fresh += [x * 2 for x in given[3:]]
        static.fill(fresh)
        for x, y in zip(static.tensors, fresh, strict=True):
            assert torch.equal(x, y)


class TestL12Context:
    """Breaks replay in the context that they were recorded in."""

    @staticmethod
    def products(device: torch.device) -> tuple[Any, GraphRunner]:
        @eager_on_graph
        def product(x: Tensor) -> Tensor:
            return x @ x + torch.ones(2, 2, device=x.device)

        def forward(x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, dtype=torch.bfloat16):
                y = product(x)
            return y.float() * 2

        runner = GraphRunner(forward, pool=Pool(device), capture="always")
        with torch.no_grad():
            for seed in range(5):
                x = torch.randn(2, 2, generator=torch.Generator().manual_seed(seed)).to(device)
                assert_same(runner(x), forward(x))
        return runner.report

    def test_autocast_around_a_break(self, device: torch.device) -> None:
        report: Any = self.products(device)
        assert (report.captures, report.replays, report.guard_misses) == (1, 3, 0)

    def test_unrestored_the_break_computes_something_else(
        self, sim: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Ambient, "restored", lambda self: contextlib.nullcontext())
        with pytest.raises(AssertionError):
            self.products(sim)

    def test_default_dtype_around_a_break(self, device: torch.device, runner: MakeRunner) -> None:
        @eager_on_graph
        def ones(x: Tensor) -> Tensor:
            return x + torch.ones(2, device=x.device)

        def forward(x: Tensor) -> Tensor:
            torch.set_default_dtype(torch.float64)
            try:
                return ones(x) * 2
            finally:
                torch.set_default_dtype(torch.float32)

        watched = runner(forward)
        with torch.no_grad():
            for _ in range(4):
                assert watched(torch.ones(2, device=device)).dtype == torch.float64
        assert watched.report.replays == 2

    def test_weights_cast_in_a_recording_do_not_stay_in_the_autocast_cache(
        self, device: torch.device, runner: MakeRunner
    ) -> None:
        model = nn.Linear(8, 8).to(device)
        watched, x = runner(model, module=model), torch.randn(2, 8).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16), torch.no_grad():
            expected = model(x)
            for _ in range(4):
                assert_same(watched(x), expected)
                scribble(device, 64, 32)
                assert_same(model(x), expected)
