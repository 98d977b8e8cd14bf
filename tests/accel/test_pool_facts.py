"""What the engine builds on: several graphs in one pool, failures, constants, chance."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from accel.backend import Backend
from accel.graph import BreakableGraph, capture
from accel.memory import Pool


def recorded(pool: Pool, work: Callable[[], torch.Tensor]) -> tuple[BreakableGraph, torch.Tensor]:
    """A graph of `work` in `pool`, and the tensor that its replays write."""
    graph = BreakableGraph(pool)
    with capture(graph):
        result = work()
    return graph, result


def chain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Enough intermediates to make two graphs in a pool fight for memory, if they could."""
    for _ in range(4):
        x = (x @ weight).tanh() + x
    return x


@torch.no_grad()
def test_two_graphs_in_one_pool_recorded_and_replayed_in_turns(device: torch.device) -> None:
    pool, weight = Pool(device), torch.randn(32, 32, device=device)
    small, large = torch.randn(8, 32, device=device), torch.randn(64, 32, device=device)
    chain(small, weight), chain(large, weight)
    first, of_small = recorded(pool, lambda: chain(small, weight))
    second, of_large = recorded(pool, lambda: chain(large, weight))
    third, again = recorded(pool, lambda: chain(small, weight) * 2)
    wanted = {
        first: (of_small, lambda: chain(small, weight)),
        second: (of_large, lambda: chain(large, weight)),
        third: (again, lambda: chain(small, weight) * 2),
    }
    for seed in range(5):
        torch.manual_seed(seed)
        for x in (small, large):
            x.copy_(torch.randn(x.shape).to(device))
        for graph in (second, first, third, first, second):
            graph.replay()
            result, eager = wanted[graph]
            # Read at once: a graph recorded earlier may have had its scratch memory here.
            assert torch.equal(result.clone(), eager())


@torch.no_grad()
def test_a_discarded_graph_takes_no_workspace_from_the_others(device: torch.device) -> None:
    pool, weight = Pool(device), torch.randn(256, 256, device=device)
    inputs = [torch.randn(n, 256, device=device) for n in (16, 64, 128)]
    for x in inputs:
        chain(x, weight)
    made = [recorded(pool, lambda x=x: chain(x, weight)) for x in inputs]
    graph, _ = made.pop(0)
    graph.discard()
    del graph
    scribbles = [torch.full((1 << 20,), float("nan"), device=device) for _ in range(8)]
    for (graph, result), x in zip(made, inputs[1:], strict=True):
        graph.replay()
        assert torch.equal(result, chain(x, weight))
    assert scribbles[0].isnan().all()


@torch.no_grad()
def test_a_constant_is_uploaded_beside_the_recording(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    graph, result = recorded(Pool(device), lambda: x * torch.tensor([1.0, 2.0, 3.0], device=device))
    assert graph.segments == 1
    x.fill_(2)
    graph.replay()
    assert result.tolist() == [2.0, 4.0, 6.0]


@torch.no_grad()
def test_a_failed_recording_is_followed_by_a_good_one(device: torch.device) -> None:
    pool, x = Pool(device), torch.ones(3, device=device)

    def fails() -> torch.Tensor:
        y = x + 1
        raise KeyError(y.shape)

    with pytest.raises(KeyError):
        recorded(pool, fails)
    graph, result = recorded(pool, lambda: x + 1)
    x.fill_(5)
    graph.replay()
    assert result.tolist() == [6.0] * 3


@torch.no_grad()
def test_chance_inside_a_recording_goes_on_as_it_would_eagerly(
    device: torch.device, backend: Backend
) -> None:
    def draw() -> torch.Tensor:
        return torch.randn(7, device=device)

    begin = backend.rng_state(device)
    eager = [draw() for _ in range(4)]
    backend.set_rng_state(device, begin)
    graph, result = recorded(Pool(device), draw)
    drawn = [result.clone()]
    for _ in range(2):
        graph.replay()
        drawn.append(result.clone())
    drawn.append(draw())
    assert all(torch.equal(a, b) for a, b in zip(drawn, eager, strict=True))


@torch.no_grad()
def test_recordings_in_many_threads_leave_the_generator_where_it_was(
    device: torch.device, backend: Backend
) -> None:
    x, begin = torch.ones(3, device=device), backend.rng_state(device)

    def record(_: int) -> list[float]:
        pool = Pool(device)
        made = [recorded(pool, lambda: x + 1) for _ in range(20)]
        for graph, _ in made[::2]:
            graph.discard()
        made[-1][0].replay()
        return made[-1][1].tolist()

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        assert list(threads.map(record, range(18))) == [[2.0] * 3] * 18
    assert torch.equal(backend.rng_state(device), begin)


def test_a_look_at_a_pools_memory_takes_no_reference_from_its_id(
    device: torch.device, backend: Backend
) -> None:
    """Small numbers are for ever in any case, as those of the first pools are."""
    pools = [backend.new_pool() for _ in range(300)]
    before = [sys.getrefcount(number) for number in (*pools[-1], False)]
    for _ in range(20):
        backend.live_blocks(pools[-1]), backend.pool_bytes(pools[-1])
    after = [sys.getrefcount(number) for number in (*pools[-1], False)]
    assert all(now >= then for now, then in zip(after, before, strict=True))


SPOILT = """
import torch
from accel.graph import BreakableGraph, capture
from accel.memory import Pool

pool, x = Pool("cuda"), torch.ones(3, device="cuda")
try:
    with capture(BreakableGraph(pool)):
        y = x + 1
        torch.cuda.synchronize()
except RuntimeError as error:
    print("refused", flush=True)
with capture(graph := BreakableGraph(pool)):
    y = x + 1
graph.replay()
torch.cuda.empty_cache()
print(y.tolist(), flush=True)
"""


@pytest.mark.gpu
def test_a_process_ends_in_peace_after_a_spoilt_recording() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    done = subprocess.run([sys.executable, "-c", SPOILT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "refused\n[2.0, 2.0, 2.0]\n"), done.stderr
