"""Where calls run: on the pool's stream, eager work in graphs' memory, results in the caller's."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from accel import memory
from accel.backend import Backend
from accel.graph import current_recording
from accel.prefill.model import Attend
from accel.prefill.runner import PrefillRunner
from accel.runner import GraphRunner
from tests.accel.prefill.tiny import TinyModel, prompts_of

Make = Callable[..., PrefillRunner]
MODES = ["breakable", "full"]
BUCKETS = (16, 64, 128)
SEVERAL = [prompts_of(*lengths) for lengths in ((140,), (20, 50), (64,), (100, 60), (3,), (256,))]


def agrees(runner: PrefillRunner, model: TinyModel, prompts: list[list[int]]) -> bool:
    """Whether a batch's results are the model's own."""
    result = runner(prompts)
    with torch.no_grad():
        own = [model.own(torch.tensor(prompt, device=model.device)) for prompt in prompts]
        logits = [model.head(states[-1:])[0] for states in own]
    hidden = all(torch.allclose(result.hidden(i), x, atol=1e-5) for i, x in enumerate(own))
    return hidden and torch.allclose(result.logits, torch.stack(logits), atol=1e-5)


def pool_of(runner: PrefillRunner) -> memory.Pool:
    assert runner._pool is not None
    return runner._pool


class Watched(TinyModel):
    """Notes the streams that it works on."""

    def __init__(self, device: torch.device, backend: Backend) -> None:
        super().__init__(device)
        self.backend, self.streams = backend, set[Any]()

    def note(self) -> None:
        self.streams.add(self.backend.current_stream(self.device))

    def body(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        self.note()
        return super().body(ids, positions, attend)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        self.note()
        return super().head(hidden)


@pytest.mark.parametrize("mode", MODES)
def test_all_work_is_done_on_the_pools_stream(
    mode: str, device: torch.device, backend: Backend, make: Make
) -> None:
    model = Watched(device, backend)
    runner = make(model, mode=mode, buckets=BUCKETS, unpadded_above=0, cache_tokens=512)
    for prompts in (*SEVERAL, prompts_of(300)):
        runner(prompts)
        runner.score(prompts)
    runner.plan()
    assert runner.report.eager_passes and runner.report.replays
    assert model.streams == {pool_of(runner).stream}


def test_mode_eager_works_on_the_callers_stream(
    device: torch.device, backend: Backend, make: Make
) -> None:
    model = Watched(device, backend)
    make(model, mode="eager")(prompts_of(20))
    assert model.streams == {backend.current_stream(device)}


def test_the_callers_stream_and_the_pools_wait_for_each_other(
    sim: torch.device, make: Make
) -> None:
    from tests.simulated.backend import SimulatedBackend

    backend = SimulatedBackend()
    runner, caller = make(TinyModel(sim)), backend.new_stream(sim)
    stream = pool_of(runner).stream
    caller.time = 5.0
    with backend.on_stream(caller):
        runner(prompts_of(20))
    assert caller.time == stream.time > 5.0


@pytest.mark.parametrize("mode", MODES)
def test_callers_on_streams_of_their_own(
    mode: str, tiny: TinyModel, backend: Backend, make: Make
) -> None:
    runner = make(tiny, mode=mode, buckets=BUCKETS, unpadded_above=64)
    home = backend.current_stream(tiny.device)
    for prompts in SEVERAL:
        side = backend.new_stream(tiny.device)
        backend.wait_stream(side, home)
        with backend.on_stream(side):
            assert agrees(runner, tiny, prompts)
        assert agrees(runner, tiny, prompts)
        assert backend.current_stream(tiny.device) == home


@pytest.mark.parametrize("mode", MODES)
def test_eager_passes_and_the_head_leave_nothing_in_the_pool(
    mode: str, tiny: TinyModel, backend: Backend, make: Make
) -> None:
    runner = make(tiny, mode=mode, buckets=BUCKETS, unpadded_above=0).capture()
    pool = pool_of(runner)
    live, generation = backend.live_blocks(pool.id), pool.generation
    kept = [runner(prompts) for prompts in SEVERAL]
    assert runner.report.eager_passes and runner.report.replays
    assert backend.live_blocks(pool.id) == live
    assert pool.generation == generation
    for prompts, result in zip(SEVERAL, kept, strict=True):
        own = tiny.own(torch.tensor(prompts[-1], device=tiny.device))
        assert torch.allclose(result.hidden(len(prompts) - 1), own, atol=1e-5)


class TestMemory:
    """Of the simulated device, at its peak, in bytes."""

    BATCHES = tuple(prompts_of(*n) for n in ((512, 512), (300, 300), (512,), (100, 30), (512, 400)))

    def peak(self, model: TinyModel, make: Make, lends: bool = True, **options: Any) -> int:
        from tests.simulated.tensors import arena

        gc.collect()
        arena.empty_cache()
        before = arena.peak = arena.reserved()
        sizes = {"max_tokens": 1024, "buckets": (64, 256, 512), "unpadded_above": 0}
        runner = make(model, **{**sizes, **options})
        lent = runner._place._lent
        assert lent is not None
        lent._lends = lends
        runner.capture()
        for prompts in self.BATCHES * 2:
            runner(prompts)
        runner.close()
        return arena.peak - before

    @pytest.fixture
    def model(self, sim: torch.device) -> TinyModel:
        model = TinyModel(sim)
        model.position_limit = None
        return model

    def test_graphs_take_what_eager_passes_take(self, model: TinyModel, make: Make) -> None:
        plain = self.peak(model, make, mode="eager")
        assert plain > 30 << 20
        assert self.peak(model, make, mode="full", unpadded_above=1024) <= plain
        lent, beside = (self.peak(model, make, mode="full", lends=x) for x in (True, False))
        assert lent <= 1.4 * plain  # slabs are cut another way
        assert beside >= 1.7 * plain

    def test_measuring_finds_its_memory_in_the_pool(self, model: TinyModel, make: Make) -> None:
        sizes: dict[str, Any] = {"max_tokens": 1024, "buckets": (64, 256, 512), "mode": "full"}
        padded = make(model, unpadded_above=1024, **sizes).capture()
        runner = make(model, unpadded_above=None, **sizes).capture()
        assert runner.report.unpadded_above is not None
        most = 1.6 * padded.report.pool_bytes  # twice, were it beside the graphs
        assert padded.report.pool_bytes <= pool_of(runner).bytes() <= most

    def test_eager_passes_before_the_first_graph_leave_it_room(
        self, model: TinyModel, make: Make
    ) -> None:
        from tests.simulated.tensors import arena

        gc.collect()
        arena.empty_cache()
        before = arena.reserved()
        sizes: dict[str, Any] = {"max_tokens": 1024, "buckets": (64, 256, 512), "mode": "full"}
        runner = make(model, unpadded_above=0, **sizes)
        runner(self.BATCHES[1])
        without = arena.reserved() - before
        runner(self.BATCHES[0])
        assert runner.report.replays == 1 and without > 10 << 20
        assert arena.reserved() - before <= runner.report.pool_bytes + (4 << 20)

    def test_beyond_the_ceiling_the_pool_does_not_grow(self, model: TinyModel, make: Make) -> None:
        runner = make(model, max_tokens=128, mode="full").capture()
        before = pool_of(runner).bytes()
        runner(prompts_of(100, 100, 100, 100))
        assert pool_of(runner).bytes() == before


class Keeping(TinyModel):
    """Makes a table for every length, eagerly, and keeps it."""

    def __init__(self, device: torch.device, heads: bool) -> None:
        super().__init__(device)
        self.tables: dict[int, torch.Tensor] = {}
        self.heads = heads

    def with_table(self, hidden: torch.Tensor, keep: bool) -> torch.Tensor:
        rows = hidden.shape[-2]
        if not keep or current_recording() is not None:
            return hidden * torch.full((rows, 1), 2.0, device=self.device)
        if rows not in self.tables:
            self.tables[rows] = torch.full((rows, 1), 2.0, device=self.device)
        return hidden * self.tables[rows]

    def body(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        return self.with_table(super().body(ids, positions, attend), not self.heads)

    def own(self, ids: torch.Tensor) -> torch.Tensor:
        return super().own(ids) * 2

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().head(self.with_table(hidden, self.heads))


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_table_that_the_model_keeps_is_not_written_over(
    mode: str, heads: bool, device: torch.device, backend: Backend, make: Make
) -> None:
    model = Keeping(device, heads)
    runner = make(model, mode=mode, buckets=BUCKETS, unpadded_above=64).capture()
    pool = pool_of(runner)
    generation = pool.generation
    for _ in range(2):
        for prompts in SEVERAL:
            assert agrees(runner, model, prompts)
    for table in model.tables.values():
        assert table.eq(2).all().item()
    assert pool.generation == generation + 1
    assert runner.report.eager_passes and runner.report.replays
    kept = {backend.storage(table).data_ptr() for table in model.tables.values()}
    assert not kept & backend.live_blocks(pool.id)
    assert runner._place._lent is not None and not runner._place._lent._lends


def test_graphs_that_measuring_costs_are_captured_again(sim: torch.device, make: Make) -> None:
    model = Keeping(sim, heads=False)
    runner = make(model, buckets=BUCKETS, unpadded_above=None).capture()
    assert runner.report.unpadded_above is not None
    assert [bucket.bucket for bucket in runner.report.buckets] == [256, 128, 64, 16]
    assert all(agrees(runner, model, prompts) for prompts in SEVERAL)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyError])
def test_eager_work_that_fails(error: type[Exception], tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, buckets=BUCKETS, unpadded_above=64).capture()
    pool, head, failures = pool_of(runner), tiny.module.head.forward, [error("no")]
    generation, replays = pool.generation, runner.report.replays

    def failing(hidden: torch.Tensor) -> torch.Tensor:
        if failures:
            raise failures.pop()
        logits: torch.Tensor = head(hidden)
        return logits

    tiny.module.head.forward = failing
    if error is KeyError:
        with pytest.raises(KeyError):
            runner(SEVERAL[2])
    else:
        runner(SEVERAL[2])  # tried again, outside
    assert not failures
    assert agrees(runner, tiny, SEVERAL[2]) and agrees(runner, tiny, SEVERAL[0])
    assert runner.report.replays == replays + 2
    assert pool.generation == generation and runner._place._lent.lends  # type: ignore[union-attr]


def test_before_there_are_graphs_nothing_is_lent(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, buckets=BUCKETS, unpadded_above=0)
    runner(SEVERAL[0])
    assert (runner.report.eager_passes, pool_of(runner).bytes()) == (1, 0)


def test_nothing_is_lent_where_the_compiler_records(
    tiny: TinyModel, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make(tiny, buckets=BUCKETS, unpadded_above=0).capture()
    lent = runner._place._lent
    assert lent is not None and lent.lends
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", sys)
    assert not lent.lends
    assert all(agrees(runner, tiny, prompts) for prompts in SEVERAL)


def test_a_recorded_part_of_the_model_records_nothing_in_lent_memory(
    tiny: TinyModel, make: Make
) -> None:
    runner = make(tiny, buckets=BUCKETS, unpadded_above=0).capture()
    pool, part = memory.Pool(tiny.device), tiny.module.layers[0].up
    recorder = GraphRunner(part.forward, pool=pool, module=part, capture="always")
    part.forward = recorder
    for _ in range(3):
        runner(SEVERAL[0])
    assert (runner.report.eager_passes, recorder.report.captures) == (3, 0)
    assert all(agrees(runner, tiny, SEVERAL[0]) for _ in range(3))
    assert recorder.report.captures == 1  # of the model by itself


def test_ranks_share_no_memory_with_their_graphs(tiny: TinyModel, make: Make) -> None:
    tiny.ranks = 2
    runner = make(tiny, buckets=BUCKETS, unpadded_above=64).capture()
    assert runner._place._lent is None
    assert all(agrees(runner, tiny, prompts) for prompts in SEVERAL)
    assert runner.report.eager_passes and runner.report.replays


class Locked(TinyModel):
    """One that only one runner at a time may work with, as with transformers' models."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.lock = threading.RLock()

    def body(self, *arguments: Any) -> torch.Tensor:
        with self.lock:
            return super().body(*arguments)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        with self.lock:
            return super().head(hidden)

    def state(self) -> object:
        with self.lock:
            return super().state()

    def capturing(self) -> AbstractContextManager[Any]:
        @contextlib.contextmanager
        def locked() -> Iterator[None]:
            with self.lock:
                yield

        return locked()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_runners_of_one_model_in_two_threads_come_to_an_end(
    ranks: int, shared: bool, device: torch.device, backend: Backend, make: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = Locked(device)
    model.ranks = ranks
    options = {"buckets": BUCKETS, "unpadded_above": 64}
    first = make(model, **options)
    if shared:  # torch has 32 streams
        stream = pool_of(first).stream
        monkeypatch.setattr(memory.Pool, "_take_stream", _takes(stream))
    runners = [first, make(model, mode="full", **options)]
    assert (pool_of(runners[0]).stream == pool_of(runners[1]).stream) == shared
    expected = {id(p): [model.own(torch.tensor(x, device=device)) for x in p] for p in SEVERAL}
    started, wrong = threading.Barrier(2), list[str]()

    def work(turn: int) -> None:
        runner = runners[turn]
        started.wait(10)
        for _ in range(2):
            for prompts in SEVERAL:
                result = runner(prompts)
                pairs = enumerate(expected[id(prompts)])
                if not all(torch.allclose(result.hidden(i), x, atol=1e-5) for i, x in pairs):
                    wrong.append(f"{turn}: {[len(p) for p in prompts]}")
            if ranks == 1:
                pool_of(runner).retire()  # and all is captured again

    threads = [threading.Thread(target=work, args=(turn,), daemon=True) for turn in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"
    assert not wrong
    assert all(runner.report.replays and runner.report.eager_passes for runner in runners)


def _takes(stream: Any) -> Callable[[memory.Pool], None]:
    def take(pool: memory.Pool) -> None:
        pool.stream, pool._turn = stream, memory._turns[stream]
        pool._give_stream_back = memory.weakref.finalize(pool, lambda: None)

    return take
