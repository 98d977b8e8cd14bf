"""When a runner records, replays or runs eagerly, and when it steps aside."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from accel.backend import Backend
from accel.entry import BARRED_CALLS
from accel.graph import BreakableGraph, capture
from accel.memory import Pool
from accel.runner import GraphRunner

MakeRunner = Callable[..., GraphRunner]


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.arange(4.0).to(device)


def double(x: Tensor) -> Tensor:
    return x * 2


def counts(runner: GraphRunner) -> tuple[int, int, int]:
    report = runner.report
    return report.captures, report.replays, report.eager_calls


def ready(runner: GraphRunner, x: Tensor, calls: int = 3) -> GraphRunner:
    """A runner that has recorded its call with `x`."""
    with torch.no_grad():
        for _ in range(calls):
            runner(x)
    assert counts(runner) == (1, calls - 2, 1)
    return runner


class TestWhen:
    def test_always_records_at_a_signatures_second_call(
        self, runner: MakeRunner, x: Tensor
    ) -> None:
        watched = ready(runner(double), x, calls=5)
        assert watched.report.reasons == {"first call of the module": 1}

    def test_a_probe_that_changes_makes_another_variant(
        self, runner: MakeRunner, x: Tensor
    ) -> None:
        state = {"scale": 2.0}
        watched = runner(lambda x: x * state["scale"], probe=lambda: state["scale"])
        with torch.no_grad():
            for scale in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 2.0, 3.0, 2.0):
                state["scale"] = scale
                assert watched(x).tolist() == [i * scale for i in range(4)]
        assert watched.report.captures == 2
        assert watched.report.replays >= 4

    def test_a_veto_keeps_from_recording(self, runner: MakeRunner, x: Tensor) -> None:
        reason: list[str | None] = ["offload is on"]
        watched = runner(double, veto=lambda *seen: reason[0])
        with torch.no_grad():
            for _ in range(3):
                watched(x)
            assert watched.report.reasons == {"offload is on": 3}
            reason[0] = None
            for _ in range(4):
                watched(x)
        assert watched.report.captures == 1

    def test_no_more_than_four_variants(self, runner: MakeRunner, device: torch.device) -> None:
        watched = runner(lambda x: x * x.sum().item())
        with torch.no_grad():
            for value in (1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6):
                watched(torch.full((2,), float(value), device=device))
                (entry,) = watched.entries.values()
                assert len(entry.variants) <= 4
        assert len(watched.report.graphs) == len(entry.variants)

    def test_all_variants_stale_at_once_are_one_turn(
        self, runner: MakeRunner, device: torch.device
    ) -> None:
        shelf = {"table": torch.zeros(2, device=device)}
        watched = runner(lambda x: x * x.sum().item() + shelf["table"])
        with torch.no_grad():
            for turn in range(2):
                shelf["table"] = torch.full((2,), float(turn), device=device)
                for value in (1, 1, 2, 2, 3, 3, 4, 4, 1, 2, 3, 4):
                    result = watched(torch.full((2,), float(value), device=device))
                    assert result.tolist() == [2.0 * value * value + turn] * 2
        (entry,) = watched.entries.values()
        assert (watched.report.declined, entry.stale_turns) == (None, 1)
        assert watched.report.recaptures == 4

    def test_arguments_on_another_device(self, runner: MakeRunner) -> None:
        watched = runner(lambda x: x * 2)
        for _ in range(4):
            assert watched(torch.ones(100)).tolist() == [2.0] * 100
        assert watched.report.captures == 0
        assert watched.report.eager_calls == 4

    def test_arguments_on_a_device_of_the_pools_kind_that_is_not_its_own(
        self, sim: torch.device
    ) -> None:
        watched = GraphRunner(double, pool=Pool(sim), capture="always")
        watched.pool.device = torch.device(sim.type, 1)
        for _ in range(4):
            assert watched(torch.ones(2, device=sim)).tolist() == [2.0, 2.0]
        assert watched.report.reasons == {f"an argument is on {sim}, not on {sim.type}:1": 4}

    def test_forgotten_graphs_are_made_again(self, runner: MakeRunner, x: Tensor) -> None:
        watched = ready(runner(double), x)
        watched.forget_graphs()
        assert watched.report.graphs == []
        with torch.no_grad():
            assert watched(x).tolist() == [0.0, 2.0, 4.0, 6.0]
        assert counts(watched) == (2, 1, 1)

    def test_a_pool_that_is_retired_is_recorded_into_again(
        self, runner: MakeRunner, x: Tensor
    ) -> None:
        watched = ready(runner(double), x)
        watched.pool.retire()
        with torch.no_grad():
            for _ in range(2):
                assert watched(x).tolist() == [0.0, 2.0, 4.0, 6.0]
        assert counts(watched) == (2, 2, 1)


class TestMemory:
    def test_out_of_memory_while_recording_is_an_eager_call(self, sim: torch.device) -> None:
        from accel.backend import backend_for

        backend: Any = backend_for(sim)

        def forward(x: Tensor) -> Tensor:
            return (x.repeat(1 << 14 if backend.is_capturing() else 1) * 2)[:4]

        watched = GraphRunner(forward, pool=Pool(sim), capture="always")
        x = torch.ones(4096, device=sim)
        with torch.no_grad():
            watched(x)
            backend.set_total_memory(backend.reserved_bytes(sim) + (32 << 20))
            for _ in range(3):
                assert watched(x).tolist() == [2.0] * 4
        assert counts(watched) == (0, 0, 4)
        assert "out of memory" in str(watched.report.declined)
        assert watched.pool.bytes() == 0

    def test_a_limit_below_one_graph(self, device: torch.device) -> None:
        watched = GraphRunner(double, pool=Pool(device, memory_limit=1), capture="always")
        with torch.no_grad():
            for _ in range(6):
                assert watched(torch.ones(4, device=device)).tolist() == [2.0] * 4
        assert watched.report.captures <= 2
        assert any("memory limit of 1 bytes" in reason for reason in watched.report.reasons)
        assert watched.pool.bytes() <= 1


class TestTransparent:
    """Where someone else watches or records, the call is the plain forward."""

    def test_inside_another_runner(self, runner: MakeRunner, pool: Pool, x: Tensor) -> None:
        inner = ready(runner(double, pool=pool), x)
        outer = ready(runner(lambda x: inner(x) + 1, pool=pool), x + 1)
        assert inner.report.captures == 1
        assert inner.report.replays == 2  # of its own, and in the other's first, eager call
        with torch.no_grad():
            assert outer(x + 1).tolist() == [3.0, 5.0, 7.0, 9.0]

    def test_inside_a_capture(self, runner: MakeRunner, pool: Pool, x: Tensor) -> None:
        watched = ready(runner(double), x)
        graph = BreakableGraph(pool)
        with capture(graph):
            y = watched(x) + 1
        x.fill_(1)
        graph.replay()
        assert y.tolist() == [3.0] * 4
        assert counts(watched) == (1, 1, 1)

    def test_under_a_foreign_dispatch_mode(self, runner: MakeRunner, x: Tensor) -> None:
        class Names(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                seen.append(str(func))
                return func(*args, **(kwargs or {}))

        seen: list[str] = []
        watched = ready(runner(double), x)
        with torch.no_grad(), Names():  # type: ignore[no-untyped-call]
            watched(x)
        assert seen == ["aten.mul.Tensor"]
        assert counts(watched) == (1, 1, 1)

    def test_under_functorch(self, runner: MakeRunner, x: Tensor) -> None:
        watched = ready(runner(double), x)
        assert torch.func.grad(lambda x: watched(x).sum())(x).tolist() == [2.0] * 4
        assert counts(watched) == (1, 1, 1)

    def test_under_forward_mode_gradients(self, runner: MakeRunner, x: Tensor) -> None:
        watched = ready(runner(double), x)
        with torch.no_grad(), forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))  # type: ignore[no-untyped-call]
            tangent = forward_ad.unpack_dual(watched(dual)).tangent
        assert tangent.tolist() == [2.0] * 4
        assert counts(watched) == (1, 1, 1)

    def test_with_fake_and_meta_tensors(self, runner: MakeRunner) -> None:
        watched = runner(double)
        for _ in range(3):
            assert watched(torch.ones(3, device="meta")).shape == (3,)
        with FakeTensorMode():
            assert watched(torch.ones(3)).shape == (3,)
        assert watched.report.captures == 0

    def test_on_a_stream_that_records_already(
        self, runner: MakeRunner, pool: Pool, backend: Backend, x: Tensor
    ) -> None:
        watched = ready(runner(double), x)
        segment = backend.segment(pool.id)
        with torch.no_grad(), pool.recording():
            segment.begin()
            y = watched(x)
            segment.end()
            segment.replay()
        assert y.tolist() == [0.0, 2.0, 4.0, 6.0]
        assert counts(watched) == (1, 1, 1)


class TestErrors:
    def test_the_functions_own_error_comes_through(self, runner: MakeRunner, x: Tensor) -> None:
        def picky(x: Tensor) -> Tensor:
            if x.shape[0] != 4:
                raise ValueError("four, please")
            return x * 2

        watched = runner(picky)
        with torch.no_grad():
            for _ in range(3):
                watched(x)
                with pytest.raises(ValueError, match="four, please"):
                    watched(x[:3])
        assert counts(watched)[0] == 1

    def test_a_bug_in_recording_is_an_eager_call(
        self, runner: MakeRunner, x: Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("bug")

        monkeypatch.setattr("accel.runner.Recorded", broken)
        watched = runner(double)
        with torch.no_grad():
            for _ in range(3):
                assert watched(x).tolist() == [0.0, 2.0, 4.0, 6.0]
        assert watched.report.declined == "recording failed: RuntimeError: bug"

    def test_an_op_that_fails_in_a_recording_is_a_break_from_then_on(
        self, sim: torch.device
    ) -> None:
        def waits(x: Tensor) -> Tensor:
            torch.sim.synchronize()  # type: ignore[attr-defined]
            return x.clone()

        library = torch.library.Library("accel_tests", "FRAGMENT")
        library.define("waits(Tensor x) -> Tensor")
        library.impl("waits", waits, "PrivateUse1")
        watched = GraphRunner(
            lambda x: torch.ops.accel_tests.waits(x * 2) + 1, pool=Pool(sim), capture="always"
        )
        other = GraphRunner(double, pool=Pool(sim), capture="always")
        with torch.no_grad():
            for value in range(5):
                x = torch.full((2,), float(value), device=sim)
                assert watched(x).tolist() == [2.0 * value + 1] * 2
                other(x)
        assert counts(watched) == (1, 2, 2)
        (graph,) = watched.report.graphs
        assert [b.what for b in graph.breaks] == ["accel_tests::waits"]
        assert counts(other) == (1, 3, 1)

    def test_a_forward_that_prints_costs_no_other_graph(
        self, runner: MakeRunner, pool: Pool, x: Tensor
    ) -> None:
        other, watched = runner(double, pool=pool), runner(lambda x: (str(x * 2), x + 1)[1])
        with torch.no_grad():
            for _ in range(4):
                other(x)
                assert watched(x).tolist() == [1.0, 2.0, 3.0, 4.0]
        assert "part of a text" in str(watched.report.declined)
        assert (counts(other), pool.generation) == ((1, 2, 1), 0)

    def test_what_failed_holds_no_tensors(
        self, runner: MakeRunner, device: torch.device, backend: Backend
    ) -> None:
        def fails(x: Tensor) -> Tensor:
            big = x.repeat(1 << 18)
            if backend.is_capturing():
                raise RuntimeError("no")
            return big[:4] + 1

        watched = runner(fails)
        with torch.no_grad():
            for _ in range(3):
                watched(torch.ones(4, device=device))
        backend.empty_cache()
        before = backend.reclaimable_bytes(device)
        assert before >= 0
        assert watched.report.captures == 0


def test_first_replays_are_right_under_every_kind_of_module(runner: MakeRunner) -> None:
    layers: list[Any] = [nn.GELU(), nn.Softmax(-1), nn.LayerNorm(4), nn.Identity()]
    pool = Pool(runner(double).pool.device)
    for layer in layers:
        layer.to(pool.device)
        watched = runner(layer, module=layer, pool=pool)
        with torch.no_grad(), contextlib.nullcontext():
            for seed in range(4):
                y = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)).to(pool.device)
                assert torch.equal(watched(y), layer(y))
        assert watched.report.replays == 2


def test_host_numbers_that_another_thread_draws_delay_a_recording_only(
    runner: Callable[..., GraphRunner], device: torch.device
) -> None:
    disturbed = [True]

    def forward(x: Tensor) -> Tensor:
        if disturbed[0]:
            thread = threading.Thread(target=random.random)
            thread.start()
            thread.join()
        return x * 2

    watched, x = runner(forward), torch.ones(2, device=device)
    for _ in range(3):
        watched(x)
    assert watched.report.declined == "the forward draws random numbers on the host"
    disturbed[0] = False
    for _ in range(BARRED_CALLS + 3):
        assert watched(x).tolist() == [2.0, 2.0]
    assert watched.report.captures == 1
    assert watched.report.replays >= 1
    assert watched.report.declined is None
