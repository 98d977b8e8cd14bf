"""CUDA's segments, without a device: what is kept while one is made launchable."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from accel import backend
from accel.backend import Segment


class Graph:
    """As much of a `torch.cuda.CUDAGraph` as is needed."""

    go = threading.Event()
    fails = False

    def __init__(self, keep_graph: bool) -> None:
        self.launches = 0

    def instantiate(self) -> None:
        self.go.wait(5)
        if self.fails:
            raise RuntimeError("no room for a graph")

    def replay(self) -> None:
        self.launches += 1


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(Graph, "go", threading.Event())
    monkeypatch.setattr(Graph, "fails", False)
    yield
    Graph.go.set()


def test_a_segment_that_cannot_be_made_launchable_keeps_nothing_of_its_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Graph, "fails", True)
    Graph.go.set()
    segment, alive = Segment((0, 1)), list[Any]()
    segment.prepare()

    def forward() -> None:
        activation = torch.ones(1)
        alive.append(weakref.ref(activation))
        segment.ready()

    gc.disable()  # as it is while something is recorded
    try:
        with pytest.raises(RuntimeError, match="no room"):
            forward()
    finally:
        gc.enable()
    gc.collect()
    assert alive[0]() is None


def test_a_segment_can_be_replayed_when_no_thread_can_be_started_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The main thread has ended, others still serve."""
    Graph.go.set()
    preparing = ThreadPoolExecutor(1)
    preparing.shutdown()
    monkeypatch.setattr(backend, "_preparing", preparing)
    segment = Segment((0, 1))
    segment.prepare()
    segment.ready()
    segment.replay()
    assert segment._graph.launches == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("ended", [False, True], ids=["a thread", "no thread any more"])
def test_a_segment_that_is_to_run_beside_is_launched_once_and_on_that_stream(
    ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Graph.go.set()
    entered, preparing = list[object](), ThreadPoolExecutor(1)

    @contextlib.contextmanager
    def on(stream: object) -> Iterator[None]:
        entered.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(backend, "_preparing", preparing)
    if ended:
        preparing.shutdown()
    segment, beside = Segment((0, 1)), object()
    segment.prepare(beside)
    segment.ready()
    assert (entered, segment._graph.launches) == ([beside], 1)  # type: ignore[attr-defined]


def test_once_a_segment_is_ready_nobody_else_holds_it() -> None:
    """Its pool's memory would not come back with the pool."""
    Graph.go.set()
    for _ in range(200):
        segment = Segment((0, 1))
        graph = weakref.ref(segment._graph)
        segment.prepare()
        segment.ready()
        del segment
        assert graph() is None
