"""Where calls run: on the pool's stream, results in the caller's memory."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from accel import memory
from accel.backend import Backend
from accel.prefill.model import Attend
from accel.prefill.runner import PrefillRunner
from tests.accel.prefill.tiny import TinyModel, prompts_of

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
