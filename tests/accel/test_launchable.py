"""What the driver makes of a recording: launched on the current stream, and given back."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from accel import launchable as module
from accel.launchable import Launchable


class Graph:
    """As much of a `torch.cuda.CUDAGraph` as is needed."""

    def raw_cuda_graph(self) -> int:
        return 2**40 + 7


class Driver:
    """Answers every call with `error`, and notes it."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.calls: list[tuple[Any, ...]] = []

    def cuGraphInstantiateWithFlags(self, into: Any, graph: Any, flags: Any) -> int:
        self.calls.append(("made", graph.value, flags.value))
        if not self.error:
            into._obj.value = 55
        return self.error

    def cuGraphLaunch(self, handle: Any, stream: Any) -> int:
        self.calls.append(("launched", handle.value, stream.value))
        return self.error

    def cuGraphExecDestroy(self, handle: Any) -> int:
        self.calls.append(("destroyed", handle.value))
        return self.error


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    asked = Driver()
    monkeypatch.setattr(module, "_driver", lambda: asked)
    monkeypatch.setattr(module, "_stream", lambda: 99)
    return asked


def test_it_is_made_once_launched_at_will_and_given_back(driver: Driver) -> None:
    launchable = Launchable(Graph())  # type: ignore[arg-type]
    launchable.launch()
    launchable.launch()
    assert driver.calls == [("made", 2**40 + 7, 0), ("launched", 55, 99), ("launched", 55, 99)]
    del launchable
    gc.collect()
    assert driver.calls[3:] == [("destroyed", 55)]


@pytest.mark.parametrize(("error", "kind"), [(2, torch.OutOfMemoryError), (700, RuntimeError)])
def test_what_the_driver_refuses_is_told_and_not_given_back(
    error: int, kind: type[Exception], driver: Driver
) -> None:
    driver.error = error
    with pytest.raises(kind, match="cuGraphInstantiateWithFlags"):
        Launchable(Graph())  # type: ignore[arg-type]
    gc.collect()
    assert [call[0] for call in driver.calls] == ["made"]
    driver.error = 0
    launchable = Launchable(Graph())  # type: ignore[arg-type]
    driver.error = error
    with pytest.raises(kind, match="cuGraphLaunch"):
        launchable.launch()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memory_that_is_given_back_serves_the_next() -> None:
    """200 graphs in turns take no more than a few at a time do."""
    x, stream = torch.ones(256, device="cuda"), torch.cuda.Stream()
    graphs = []
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(200):
            graphs.append(torch.cuda.CUDAGraph(keep_graph=True))
            graphs[-1].capture_begin(capture_error_mode="relaxed")
            for _ in range(20):
                x.add_(1)
            graphs[-1].capture_end()
        first = Launchable(graphs[0])
        first.launch()
        stream.synchronize()
        free, _ = torch.cuda.mem_get_info()
        for graph in graphs[1:]:
            following = Launchable(graph)
            following.launch()
            stream.synchronize()
        first.launch()  # what the others gave back was not its own
        stream.synchronize()
        taken = free - torch.cuda.mem_get_info()[0]
    assert x[0].item() == 1 + 201 * 20
    assert taken <= 8 << 20  # all of them would take 30 MiB
