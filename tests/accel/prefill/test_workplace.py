"""Where calls run: on the pool's stream, results in the caller's memory."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from accel import memory
from accel.backend import Backend
from accel.prefill.model import Attend
from accel.prefill.runner import PrefillRunner
from accel.prefill.workplace import Workplace
from tests.accel.prefill.tiny import VOCAB, TinyModel, prompts_of

Make = Callable[..., PrefillRunner]
MODES = ["breakable", "full"]
BUCKETS = (16, 64, 128)
LENGTHS = (140,), (20, 50), (64,), (100, 60), (3,), (150, 150), (256,)
SEVERAL = [prompts_of(*lengths) for lengths in LENGTHS]
"""One of them is more than the largest bucket, and so runs eagerly."""


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
    runner = make(model, mode=mode, buckets=BUCKETS)
    for prompts in SEVERAL:
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
    runner = make(tiny, mode=mode, buckets=BUCKETS)
    home = backend.current_stream(tiny.device)
    for prompts in SEVERAL:
        side = backend.new_stream(tiny.device)
        backend.wait_stream(side, home)
        with backend.on_stream(side):
            assert agrees(runner, tiny, prompts)
        assert agrees(runner, tiny, prompts)
        assert backend.current_stream(tiny.device) == home


class TestMemory:
    """Of the simulated device, at its peak, in bytes."""

    BATCHES = tuple(prompts_of(*n) for n in ((512, 512), (300, 300), (512,), (100, 30), (512, 400)))

    def peak(self, model: TinyModel, make: Make, mode: str) -> int:
        from tests.simulated.tensors import arena

        gc.collect()
        arena.empty_cache()
        before = arena.peak = arena.reserved()
        runner = make(model, max_tokens=1024, buckets=(64, 256, 512), mode=mode).capture()
        for prompts in self.BATCHES * 2:
            runner(prompts)
        runner.close()
        return arena.peak - before

    def test_graphs_take_what_eager_passes_take(self, sim: torch.device, make: Make) -> None:
        model = TinyModel(sim)
        model.position_limit = None
        plain = self.peak(model, make, "eager")
        assert plain > 30 << 20
        assert self.peak(model, make, "full") <= plain


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
    first = make(model, buckets=BUCKETS)
    if shared:  # torch has 32 streams
        stream = pool_of(first).stream
        monkeypatch.setattr(memory.Pool, "_take_stream", _takes(stream))
    runners = [first, make(model, mode="full", buckets=BUCKETS)]
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


class Busy(TinyModel):
    """Others go on working on the caller's stream, and release pages that they read, while prompts
    are looked at."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.happens: Callable[[], None] = lambda: None
        self.began: list[float] = []

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        self.happens()
        return VOCAB

    def body(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        from tests.simulated.device import card

        self.began.append(card.current_stream().time)
        return super().body(ids, positions, attend)


def test_pages_are_written_after_what_others_queued_before_they_released_them(
    sim: torch.device, make: Make
) -> None:
    from tests.simulated.device import card

    model = Busy(sim)
    runner = make(model, cache_tokens=64)
    prefix = runner(prompts_of(300 - 256)).handle(0)
    caller, copied = card.current_stream(), list[float]()

    def advance() -> None:
        caller.time += 5.0

    def copy_page(*pages: int) -> None:
        copied.append(card.current_stream().time)

    model.happens = advance
    runner._cache.copy_page = copy_page  # type: ignore[union-attr, method-assign]
    before = caller.time
    runner(prompts_of(3), prefix=prefix)
    assert min(copied) >= before + 5.0
    prefix.release()
    runner._graphs.forget_graphs()  # type: ignore[union-attr]
    before = caller.time
    runner(prompts_of(3))
    assert model.began[-1] >= before + 5.0


def test_what_is_handed_out_lives_until_the_callers_stream_has_waited(
    device: torch.device, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = memory.Pool(device)
    place, home = Workplace(pool, ranks=1), backend.current_stream(device)
    x, waited = torch.ones(4, device=device), list[bool]()
    with place.entered(graphs=True):
        given = [weakref.ref(place.taken_out(x)), weakref.ref(place.joined([x, x]))]
        wait = backend.wait_stream

        def noting(stream: Any, other: Any) -> None:
            if (stream, other) == (home, pool.stream):
                waited.extend(ref() is not None for ref in given)
            wait(stream, other)

        monkeypatch.setattr(pool, "backend", Waits(backend, noting))
    assert waited == [True, True]
    assert [ref() for ref in given] == [None, None]


class Waits:
    """A backend that tells who waits for whom."""

    def __init__(self, backend: Backend, wait_stream: Callable[[Any, Any], None]) -> None:
        self._backend, self.wait_stream = backend, wait_stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class Counting(TinyModel):
    """Counts the passes whose hidden states are alive while the head works."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.passes = weakref.WeakSet[Any]()
        self.alive: list[int] = []

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden._base is not None:
            self.passes.add(hidden._base)
        self.alive.append(len(self.passes))
        return super().head(hidden)


@pytest.mark.parametrize("mode", [*MODES, "eager"])
def test_score_lets_go_of_hidden_states_from_pass_to_pass(
    mode: str, device: torch.device, make: Make
) -> None:
    model = Counting(device)
    make(model, mode=mode).score(prompts_of(*[200] * 6))
    assert max(model.alive) <= 2
    assert len(model.alive) >= 6


def test_an_eager_pass_after_the_graphs_were_given_up_has_its_scratch_memory_in_its_place(
    sim: torch.device, make: Make
) -> None:
    from tests.simulated.device import card

    class Moving(TinyModel):
        """Never stays as it is."""

        def state(self) -> object:
            self.setting += 1
            return self.setting

    runner = make(Moving(sim), buckets=BUCKETS)
    runner(prompts_of(20))
    assert runner.report.eager_passes == 1
    stream = pool_of(runner).stream
    assert card.workspaces[stream][0] is card.scratch[stream]


def test_a_runner_that_nobody_has_any_more_is_gone_at_once(
    sim: torch.device, tiny: TinyModel
) -> None:
    gc.collect()
    gc.disable()
    try:
        for mode in MODES:
            runner = PrefillRunner(tiny, max_tokens=64, mode=mode, attention="reference")
            assert runner(prompts_of(20)) and runner.report.replays
            pool = weakref.ref(pool_of(runner))
            del runner
            assert pool() is None
    finally:
        gc.enable()
