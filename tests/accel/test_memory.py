"""Pools: order, generations, memory given back."""

from __future__ import annotations

import concurrent.futures
import gc
import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from accel import memory
from accel.backend import Backend
from accel.graph import BreakableGraph, capture
from accel.memory import Pool
from accel.runner import GraphRunner

MIB = 2**20


def test_a_device_without_graphs_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing can be recorded on cpu"):
        Pool("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing can be recorded on cuda"):
        Pool("cuda")


def test_the_device_gets_its_number(device: torch.device) -> None:
    assert Pool(device.type).device == torch.device(device.type, 0)


def filled(pool: Pool) -> GraphRunner:
    runner = GraphRunner(lambda x: (x.repeat(1 << 18) * 2)[:3], pool=pool, capture="always")
    with torch.no_grad():
        for _ in range(3):
            runner(torch.ones(4, device=pool.device))
    assert runner.report.captures == 1
    return runner


def reserved_but_for_scratch(pool: Pool) -> int:
    """Bytes, once the math libraries have what they keep for the pool's stream, whoever's it is."""
    with pool.recording():
        pool.backend.empty_cache()
    return pool.backend.reserved_bytes(pool.device)


def test_retiring_gives_all_memory_back(pool: Pool, backend: Backend) -> None:
    before = reserved_but_for_scratch(pool)
    runner = filled(pool)
    assert pool.bytes() > 1 << 20
    pool.retire()
    gc.collect()
    backend.empty_cache()
    assert pool.bytes() == 0
    assert backend.reserved_bytes(pool.device) - before < 1 << 20
    assert pool.generation == 1
    assert runner.report.graphs == []


def test_a_closed_pool_leaves_nothing(pool: Pool, backend: Backend) -> None:
    before = reserved_but_for_scratch(pool)
    filled(pool)
    pool.retire()
    gc.collect()
    pool.close()
    assert backend.reserved_bytes(pool.device) - before < 1 << 20


def narrow_then_wide(device: torch.device) -> None:
    """Three tensors of 24 MiB at once, then two of 40."""
    narrow = [torch.empty(24, MIB, dtype=torch.uint8, device=device) for _ in range(3)]
    del narrow
    wide = [torch.empty(40, MIB, dtype=torch.uint8, device=device) for _ in range(2)]
    del wide


@pytest.mark.parametrize(("room", "taken"), [(0, 72 + 80), (88, 88)])
def test_memory_taken_in_one_piece_serves_tensors_of_all_sizes(
    pool: Pool, room: int, taken: int
) -> None:
    with pool.entered():
        pool.anchor(room * MIB)
    with torch.no_grad(), capture(BreakableGraph(pool)):
        narrow_then_wide(pool.device)
    assert pool.bytes() == taken * MIB


def test_a_pool_does_without_a_piece_that_is_not_there(pool: Pool) -> None:
    with pool.entered(), pytest.raises(torch.OutOfMemoryError):
        pool.anchor(1 << 48)
    assert pool.bytes() == 0
    pool.relieve()
    with torch.no_grad(), capture(graph := BreakableGraph(pool)):
        y = torch.ones(2, device=pool.device) + 1
    graph.replay()
    assert y.tolist() == [2.0, 2.0]


def test_the_stream_of_a_closed_pool_is_the_next_ones(device: torch.device) -> None:
    pool = Pool(device)
    first, x = pool.stream, torch.ones(2, device=device)
    pool.close()
    heir = Pool(device)
    assert heir.stream is first
    with torch.no_grad(), capture(graph := BreakableGraph(pool)):  # by a thread that came late
        y = x + 1
    graph.replay()
    assert pool.stream is not first
    assert y.tolist() == [2.0, 2.0]


class TestFewStreams:
    """Torch has 32 streams a device, and gives them out again."""

    @pytest.fixture
    def streams(self, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """Four, given out in turns from now on: two for what runs beside, two for pools."""
        made = [backend.new_stream(torch.device(backend.device_type, 0)) for _ in range(4)]
        turns = itertools.cycle(made)
        monkeypatch.setattr(backend, "new_stream", lambda device: next(turns), raising=False)
        monkeypatch.setattr(memory, "_idle_streams", defaultdict(list))
        monkeypatch.setattr(memory, "_sides", {})
        return made

    def test_nothing_travels_beside_on_a_stream_that_a_pool_records_on(
        self, device: torch.device, streams: list[Any]
    ) -> None:
        pools = [Pool(device) for _ in range(4)]
        pools[0].close()
        pools.append(Pool(device))
        assert not {pool.stream for pool in pools} & set(streams[:2])
        with torch.no_grad(), capture(graph := BreakableGraph(pools[-1])):
            y = torch.ones(2, device=device) + torch.tensor([1.0, 2.0]).to(device)
        assert (graph.segments, y.tolist()) == (1, [2.0, 3.0])

    def test_a_stream_that_no_pool_has_comes_first(
        self, device: torch.device, backend: Backend, streams: list[Any]
    ) -> None:
        first = Pool(device)
        while backend.new_stream(device) is not streams[0]:  # someone else's, as is the next
            pass
        for _ in range(3):
            backend.new_stream(device)
        second, third = Pool(device), Pool(device)
        assert {first.stream, second.stream} == set(streams[2:])
        assert third.stream in streams[2:]

    def test_pools_on_one_stream_record_one_after_the_other(
        self, device: torch.device, streams: list[Any]
    ) -> None:
        first, _, third = (Pool(device) for _ in range(3))
        assert first.stream == third.stream
        x, order = torch.ones(2, device=device), list[str]()

        def record(pool: Pool, name: str) -> list[float]:
            with torch.no_grad(), capture(graph := BreakableGraph(pool), automatic=False):
                order.append(f"{name} begins")
                y = x + 1
                time.sleep(0.05)
                y = y + 1
                order.append(f"{name} ends")
            graph.replay()
            return y.tolist()

        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            made = list(threads.map(record, (first, third), ("one", "other")))
        assert made == [[3.0, 3.0]] * 2
        begun = [words.split()[0] for words in order]
        assert begun[0] == begun[1] and begun[2] == begun[3]


def test_a_pools_stream_is_entered_and_left_in_order(sim: torch.device) -> None:
    from accel.backend import backend_for

    backend: Any = backend_for(sim)
    pool, outer = Pool(sim), backend.new_stream(sim)
    outer.time = 4.0
    with backend.on_stream(outer), pool.entered() as caller:
        assert caller is outer and backend.current_stream(sim) is pool.stream
        assert pool.stream.time == 4.0
        with pool.entered() as inner, pool.recording():
            assert inner is pool.stream
        pool.stream.time = 7.0
    assert outer.time == 7.0
    with pytest.raises(KeyError), backend.on_stream(outer), pool.entered():
        pool.stream.time = 9.0
        raise KeyError
    assert outer.time == 9.0


@pytest.fixture
def warmed(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[torch.device, torch.dtype]]:
    """What libraries were warmed for, call by call."""
    asked, warm = list[tuple[torch.device, torch.dtype]](), backend.warm_libraries

    def noted(device: torch.device, dtype: torch.dtype) -> None:
        asked.append((device, dtype))
        warm(device, dtype)

    monkeypatch.setattr(backend, "warm_libraries", noted, raising=False)
    return asked


def test_scratch_memory_is_made_once_a_thread_and_generation(
    pool: Pool, warmed: list[tuple[torch.device, torch.dtype]]
) -> None:
    def work() -> None:
        for _ in range(2):
            with pool.entered():
                pool.warm()

    work()
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        other.submit(work).result()
    assert [device for device, _ in warmed] == [pool.device] * 2
    pool.retire()
    work()
    assert [device for device, _ in warmed] == [pool.device] * 3


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float16, torch.float16), (torch.float32, torch.float32), (torch.uint8, torch.bfloat16)],
)
def test_libraries_are_warmed_in_the_dtype_that_is_in_use(
    device: torch.device,
    warmed: list[tuple[torch.device, torch.dtype]],
    dtype: torch.dtype,
    expected: torch.dtype,
) -> None:
    """Another's kernels would have to be loaded first. There are none of integers."""
    with Pool(device, dtype=dtype).recording():
        pass
    assert [dtype for _, dtype in warmed] == [expected]


def test_the_default_limit_is_half_of_what_is_free(pool: Pool, backend: Backend) -> None:
    assert pool.limit is None
    pool.set_default_limit()
    _, total = backend.memory(pool.device)
    assert pool.limit is not None
    assert 0 < pool.limit <= total // 2
    kept = pool.limit
    pool.set_default_limit()
    assert pool.limit == kept


def test_a_limit_given_is_kept(device: torch.device) -> None:
    pool = Pool(device, memory_limit=1 << 20)
    pool.set_default_limit()
    assert pool.limit == 1 << 20


def test_an_abandoned_pool_records_again_and_its_wreck_is_never_destroyed(
    sim: torch.device,
) -> None:
    from accel.backend import backend_for

    backend: Any = backend_for(sim)
    pool = Pool(sim)
    with pool.recording():
        wreck = backend.segment(pool.id)
        wreck.begin()
        with pytest.raises(RuntimeError):
            torch.sim.synchronize()  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError):
            wreck.end()
        pool.abandon(wreck)
    del wreck
    gc.collect()
    assert backend.aborts == 0
    filled(pool)


def test_work_waits_for_the_pools_last_use(sim: torch.device) -> None:
    from accel.backend import backend_for

    backend: Any = backend_for(sim)
    pool, other = Pool(sim), backend.new_stream(sim)
    with pool.use():
        backend.current_stream(sim).time = 5.0
    with backend.on_stream(other), pool.use():
        assert other.time >= 5.0


class TestMemoryRunsOut:
    """Of eager code, that is, while graphs hold some."""

    def test_elsewhere_and_the_next_call_gives_the_graphs_up(
        self, device: torch.device, runner: Callable[..., GraphRunner]
    ) -> None:
        watched = runner(lambda x: x * 2)
        x = torch.ones(4, device=device)
        for _ in range(3):
            watched(x)
        assert watched.pool.bytes() > 0
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 40, dtype=torch.uint8, device=device)
        generation = watched.pool.generation
        assert watched(x).tolist() == [2.0] * 4
        assert watched.pool.generation == generation + 1
        assert watched(x).tolist() == [2.0] * 4
        assert watched.report.captures == 2

    @pytest.mark.parametrize("device", ["sim"], indirect=True)  # whose memory can be made small
    def test_in_an_eager_call_of_a_watched_module_that_then_goes_on(
        self, device: torch.device, backend: Any, pool: Pool, runner: Callable[..., GraphRunner]
    ) -> None:
        small = runner(lambda x: (x * 2 + 1) * 3)
        for _ in range(3):
            small(torch.ones(1 << 20, device=device))
        calls = []

        def large(x: torch.Tensor) -> torch.Tensor:
            calls.append(torch.rand(1, device=device).item())
            return torch.empty(6 << 20, dtype=torch.uint8, device=device) if x is not None else x

        watched, x = runner(large), torch.ones(4, device=device)
        gc.collect()
        backend.empty_cache()
        backend.set_total_memory(backend.reserved_bytes(device) + (4 << 20))
        state = backend.rng_state(device)
        assert watched(x).shape == (6 << 20,)
        assert calls[0] == calls[1]
        assert not torch.equal(backend.rng_state(device), state)
        assert not any(entry.variants for entry in small.entries.values())

    def test_and_without_graphs_the_error_is_the_users(
        self, device: torch.device, runner: Callable[..., GraphRunner]
    ) -> None:
        def large(x: torch.Tensor) -> torch.Tensor:
            return torch.empty(1 << 40, dtype=torch.uint8, device=x.device)

        with pytest.raises(torch.OutOfMemoryError):
            runner(large)(torch.ones(1, device=device))
