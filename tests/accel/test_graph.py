"""Graphs: segments, explicit breaks, boundary buffers, and what becomes of a failed recording."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.breaks import GuardMiss
from accel.graph import (
    BreakableGraph,
    Refused,
    break_graph,
    capture,
    current_recording,
    eager_on_graph,
)
from accel.memory import Pool
from tests.accel.same import assert_same


@pytest.fixture
def graph(pool: Pool) -> BreakableGraph:
    return BreakableGraph(pool)


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.arange(4.0).to(device)


def test_recording_runs_the_body_for_real(graph: BreakableGraph, x: Tensor) -> None:
    with capture(graph):
        y = x * 2
    assert y.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert graph.segments == 1
    assert graph.breaks == []


def test_a_graph_that_rested_computes_the_same(pool: Pool, x: Tensor) -> None:
    """Also one that rests while the device is at work on it."""
    graph = BreakableGraph(pool, rests=True)
    weight = torch.eye(4).to(x.device)
    with capture(graph, automatic=False):
        y = x
        for _ in range(50):
            y = y @ weight
        break_graph()
        z = y * 2
    for start in range(1, 5):
        x.fill_(start)
        graph.replay()
        graph.rest()
        assert z.tolist() == [2.0 * start] * 4
    assert graph.segments == 2


def test_a_graph_that_rests_may_be_cut(pool: Pool, x: Tensor) -> None:
    graph = BreakableGraph(pool, rests=True)
    with capture(graph) as recording:
        y = x + 1
        recording.cut()
        z = y * 2
    assert z.tolist() == [2.0, 4.0, 6.0, 8.0]
    graph.rest()
    x.fill_(5)
    graph.replay()
    assert z.tolist() == [12.0] * 4


def test_what_nobody_needs_is_recorded_without_running(graph: BreakableGraph, x: Tensor) -> None:
    ran: list[str] = []

    @eager_on_graph
    def double(y: Tensor) -> None:
        ran.append("break")
        y.mul_(2)

    written = torch.zeros_like(x)
    with capture(graph, automatic=False, run=False):
        y = x + 1
        double(y)
        written.copy_(y * 10)
    assert (written.tolist(), graph.segments, ran) == ([0.0] * 4, 2, ["break"])
    graph.replay()
    assert (written.tolist(), ran) == ([20.0, 40.0, 60.0, 80.0], ["break"] * 2)


def test_no_guard_on_what_was_not_computed(graph: BreakableGraph, x: Tensor) -> None:
    capturing = capture(graph, automatic=False, run=False)
    with pytest.raises(Refused, match="was not computed"), capturing:
        y = x + 1
        eager_on_graph(y.sum().item, pure=True)()


def test_replay_reads_what_is_there_now(graph: BreakableGraph, x: Tensor) -> None:
    with capture(graph):
        y = (x + 1).cumsum(0)
    x.fill_(1)
    graph.replay()
    assert y.tolist() == [2.0, 4.0, 6.0, 8.0]


def test_replay_runs_no_python_but_the_breaks(graph: BreakableGraph, x: Tensor) -> None:
    ran: list[str] = []

    @eager_on_graph
    def noted(y: Tensor) -> Tensor:
        ran.append("break")
        return y + len(ran)

    with capture(graph):
        ran.append("body")
        y = noted(x * 1) * 10
    graph.replay()
    assert ran == ["body", "break", "break"]
    assert y[0].item() == 30.0


def test_breaks_run_in_order_with_true_values(graph: BreakableGraph, x: Tensor) -> None:
    seen: list[float] = []

    @eager_on_graph
    def see(y: Tensor) -> None:
        seen.append(y.sum().item())

    with capture(graph):
        y = x
        for _ in range(3):
            y = y + 1
            see(y)
    assert seen == [10.0, 14.0, 18.0]
    x.zero_()
    graph.replay()
    assert seen[3:] == [4.0, 8.0, 12.0]
    assert [b.kind for b in graph.breaks] == ["explicit"] * 3
    assert graph.segments == 4


def test_a_break_may_write_into_what_it_is_given(graph: BreakableGraph, x: Tensor) -> None:
    @eager_on_graph
    def attend(y: Tensor, out: Tensor) -> Tensor:
        return torch.add(y, 1, out=out)

    with capture(graph):
        out = torch.empty_like(x)
        z = attend(x * 2, out) * 10 + out
    x.fill_(1)
    graph.replay()
    assert z.tolist() == [33.0] * 4


def test_a_break_that_raises_where_the_forward_catches_it_is_no_recording(
    pool: Pool, x: Tensor
) -> None:
    @eager_on_graph(pure=True)
    def fails(x: Tensor) -> Tensor:
        raise KeyError("mine")

    @eager_on_graph(pure=True)
    def works(x: Tensor) -> Tensor:
        return x + 1

    def forward(x: Tensor) -> Tensor:
        with contextlib.suppress(KeyError):
            fails(x)
        return works(x * 2) * 3

    with pytest.raises(Refused, match="a break raises: KeyError"), capture(BreakableGraph(pool)):
        y = forward(x)
        assert_same(y, (x * 2 + 1) * 3)
    with pytest.raises(KeyError, match="mine"), capture(BreakableGraph(pool)):
        fails(x)
    graph = BreakableGraph(pool)
    with capture(graph):
        y = works(x)
    assert_same(y, x + 1)


def test_a_break_inside_a_break_is_plain(graph: BreakableGraph, x: Tensor) -> None:
    @eager_on_graph
    def inner(y: Tensor) -> Tensor:
        assert current_recording() is None
        return y + 1

    @eager_on_graph
    def outer(y: Tensor) -> Tensor:
        return inner(y) * 2

    with capture(graph):
        z = outer(x)
    assert len(graph.breaks) == 1
    assert z.tolist() == [2.0, 4.0, 6.0, 8.0]


def test_without_a_recording_a_break_is_the_function(x: Tensor) -> None:
    @eager_on_graph(pure=True)
    def total(y: Tensor) -> float:
        """Sums."""
        return y.sum().item()

    assert total(x) == 6.0
    assert total.__doc__ == "Sums."
    break_graph()


def test_a_pure_breaks_host_value_is_guarded(graph: BreakableGraph, x: Tensor) -> None:
    @eager_on_graph(pure=True)
    def total(y: Tensor) -> float:
        return y.sum().item()

    with capture(graph):
        y = x + total(x)
    assert graph.breaks[0].guarded
    graph.replay()
    x.fill_(1)
    with pytest.raises(GuardMiss, match=r"total returned 4\.0, in the recording 6\.0"):
        graph.replay()
    assert y.tolist() == [6.0, 7.0, 8.0, 9.0]


def test_an_impure_break_may_not_return_host_values(graph: BreakableGraph, x: Tensor) -> None:
    @eager_on_graph
    def total(y: Tensor) -> float:
        return y.sum().item()

    with pytest.raises(Refused, match="pure=True"), capture(graph):
        total(x)


CHANGED: dict[str, tuple[Any, str]] = {
    "shape": (lambda x: x[:2], r"returned shape \(2,\)"),
    "dtype": (lambda x: x.double(), "another kind of value"),
    "structure": (lambda x: (x, x), "another structure"),
    "kind": (lambda x: None, "another kind of value"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_break_that_returns_something_else(what: str, graph: BreakableGraph, x: Tensor) -> None:
    later, complaint = CHANGED[what]
    returns = [lambda x: x + 1]

    @eager_on_graph
    def fickle(y: Tensor) -> Any:
        return returns[-1](y)

    with capture(graph):
        fickle(x) * 2
    returns.append(later)
    with pytest.raises(GuardMiss, match=complaint):
        graph.replay()


def test_only_explicit_breaks_where_automatic_ones_are_off(
    graph: BreakableGraph, x: Tensor
) -> None:
    with capture(graph, automatic=False):
        y = x + 1
        break_graph()
        z = y * 2
    x.zero_()
    graph.replay()
    assert z.tolist() == [2.0] * 4
    assert graph.segments == 2


def test_capture_leaves_the_modes_alone(graph: BreakableGraph, x: Tensor) -> None:
    with torch.enable_grad(), capture(graph):
        assert not torch.is_grad_enabled()
        x + 1
    assert torch.is_grad_enabled()
    assert current_recording() is None


def test_a_recording_under_inference_mode(graph: BreakableGraph, x: Tensor) -> None:
    with torch.inference_mode():
        with capture(graph):
            y = x * 2
        assert not y.is_inference()
        x.fill_(3)
        graph.replay()
        assert y.tolist() == [6.0] * 4


def test_an_error_ends_a_recording_and_the_next_works(pool: Pool, x: Tensor) -> None:
    failed = BreakableGraph(pool)
    with pytest.raises(ValueError, match="half-way"), capture(failed):
        x + 1
        raise ValueError("half-way")
    assert failed.steps == []
    assert current_recording() is None
    graph = BreakableGraph(pool)
    with capture(graph):
        y = x * 3
    assert y.tolist() == [0.0, 3.0, 6.0, 9.0]
    assert pool.generation == 0


def test_a_failed_recording_takes_its_writes_back(pool: Pool, device: torch.device) -> None:
    outside = torch.ones(4, device=device)
    with pytest.raises(ValueError, match="late"), capture(BreakableGraph(pool)):
        outside[1:].mul_(5)
        outside.add_(1)
        break_graph() if current_recording() is None else None
        raise ValueError("late")
    assert outside.tolist() == [1.0] * 4


def test_graphs_of_one_pool_share_memory_and_stay_right(pool: Pool, device: torch.device) -> None:
    graphs, results = [], []
    x = torch.ones(1 << 18, device=device)
    for i in range(4):
        graph = BreakableGraph(pool)
        with capture(graph):
            y = ((x * i).relu() + i).sum()
        graphs.append(graph)
        results.append(y)
    one = pool.bytes()
    x.fill_(2)
    for i in (2, 0, 3, 1):
        graphs[i].replay()
        assert results[i].item() == (2 * i + i) * float(1 << 18)
    assert pool.bytes() == one
    assert one < 4 * 4 * (1 << 20)


def test_a_discarded_graph_leaves_the_others_alone(pool: Pool, x: Tensor) -> None:
    first, second = BreakableGraph(pool), BreakableGraph(pool)
    with capture(first):
        x @ x
    with capture(second):
        y = (x @ x) + 1
    first.discard()
    del first
    gc.collect()
    x.fill_(1)
    second.replay()
    assert y.item() == 5.0


def test_threads_take_turns(pool: Pool, device: torch.device) -> None:
    inputs = [torch.full((64,), float(i), device=device) for i in range(4)]
    graphs, outputs = [], []
    for x in inputs:
        graph = BreakableGraph(pool)
        with capture(graph):
            outputs.append((x * 2 + 1).clone())
        graphs.append(graph)
    wrong: list[Any] = []

    def work(i: int) -> None:
        for _ in range(10):
            with pool.use():
                graphs[i].replay()
                if outputs[i][0].item() != 2.0 * i + 1:
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []


def test_where_a_break_is_is_a_line_of_the_model(graph: BreakableGraph, x: Tensor) -> None:
    with capture(graph):
        x.sum().item()
    assert "test_graph.py:" in graph.breaks[0].where
    assert graph.breaks[0].what == "aten::_local_scalar_dense"
