"""What overlaps with a call: handles that are released, results that are collected, a runner that
is closed, scores of prompts beside cached ones."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from accel.prefill.kv_cache import KVCache
from accel.prefill.result import Handle
from accel.prefill.runner import PrefillRunner
from tests.accel.prefill.tiny import TinyModel, prompts_of

Make = Callable[..., PrefillRunner]
MODES = ["eager", "breakable", "full"]


class Acting:
    """A token id that does something when it is looked at: another thread's chance."""

    def __init__(self, token: int, act: Callable[[], Any]) -> None:
        self._token, self._act = token, act

    def __index__(self) -> int:
        self._act()
        return self._token


@pytest.mark.parametrize("length", [16, 20, 40])
def test_a_prefix_released_meanwhile_is_not_read(length: int, tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, mode="eager", cache_tokens=256)
    handle = runner(prompts_of(length)).handle(0)
    prompt: Any = [Acting(3, handle.release), 4, 5]
    with pytest.raises(ValueError, match="released while it was asked for"):
        runner([prompt], prefix=handle)
    assert runner.free_cache_tokens == 256


def test_pages_of_a_released_prefix_that_another_prompt_took(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, mode="eager", cache_tokens=64)
    handle = runner(prompts_of(40)).handle(0)
    prompt: Any = [Acting(3, handle.release), 4, 5]
    with pytest.raises(ValueError, match="released while it was asked for"):
        runner([[7] * 50, prompt], prefix=[None, handle])
    assert runner.free_cache_tokens == 64


def test_collecting_a_result_while_pages_are_taken_ends() -> None:
    cache = KVCache([(1, 8, 8)], 640, torch.float32, torch.device("cpu"))
    ended = threading.Event()

    def work() -> None:
        for _ in range(30):
            circle: list[Any] = [Handle(cache, [1], cache.take(1))]
            circle.append(circle)
            del circle
            cache.release(cache.take(2))
        ended.set()

    usual = gc.get_threshold()
    gc.set_threshold(1)
    try:
        threading.Thread(target=work, daemon=True).start()
        assert ended.wait(20)
    finally:
        gc.set_threshold(*usual)
    gc.collect()
    assert cache.free_tokens == 640


def test_a_prompt_that_is_asked_for_is_not_dismissed() -> None:
    cache = KVCache([(1, 8, 8)], 64, torch.float32, torch.device("cpu"))
    kept, gone = (Handle(cache, [1], cache.take(1)) for _ in range(2))
    assert kept.ask_for() and not kept.dismiss() and kept.alive
    assert gone.dismiss() and not gone.dismiss() and not gone.ask_for()


def test_closing_in_two_threads_during_a_call(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, mode="eager")
    begun, errors = threading.Event(), list[Exception]()

    def close() -> None:
        begun.wait(10)
        try:
            runner.close()
        except Exception as error:
            errors.append(error)

    closing = [threading.Thread(target=close) for _ in range(2)]
    for thread in closing:
        thread.start()
    prompt: Any = [Acting(3, lambda: (begun.set(), time.sleep(0.2)))]
    runner([prompt])
    for thread in closing:
        thread.join(10)
    assert not errors


@pytest.mark.parametrize("mode", MODES)
def test_scores_need_no_room_in_the_cache(mode: str, tiny: TinyModel, make: Make) -> None:
    small, none = (
        make(tiny, mode=mode, cache_tokens=n, max_requests=64, buckets=(64,)) for n in (64, 0)
    )
    for prompts in (prompts_of(100, 50), [[1, 2]] * 60):
        for ours, expected in zip(small.score(prompts), none.score(prompts), strict=True):
            assert torch.allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_scores_leave_cached_prompts_alone(mode: str, tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, mode=mode, cache_tokens=128, buckets=(64,))
    [prompt] = prompts_of(60)
    result = runner([prompt])
    runner.score(prompts_of(80, 5))
    more = runner([[3]], prefix=result.handle(0))
    own = tiny.own(torch.tensor([*prompt, 3], device=tiny.device))
    assert (more.hidden(0)[-1] - own[-1]).abs().max() < 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_an_interrupted_capture_leaves_the_runner_usable(
    mode: str, tiny: TinyModel, make: Make
) -> None:
    runner = make(tiny, mode=mode, buckets=(64,), cache_tokens=256)
    tiny.fails_in_capture = KeyboardInterrupt
    if mode == "eager":
        runner(prompts_of(20))
    else:
        with pytest.raises(KeyboardInterrupt):
            runner(prompts_of(20))
    tiny.fails_in_capture = None
    for prompts in (prompts_of(20), prompts_of(20, 30)):
        result = runner(prompts)
        for i, prompt in enumerate(prompts):
            own = tiny.own(torch.tensor(prompt, device=tiny.device))
            assert (result.hidden(i) - own).abs().max() < 1e-5
    del result
    assert runner.report.replays == (0 if mode == "eager" else 2)
    assert runner.free_cache_tokens == 256
