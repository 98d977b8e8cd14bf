"""Bad input gets one clear line: what, where, why, and which argument changes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from accel.prefill.choice import choose
from accel.prefill.kv_cache import CacheFull
from accel.prefill.runner import PrefillRunner
from tests.accel.prefill.attending import PLAIN
from tests.accel.prefill.tiny import POSITIONS, TinyModel, prompts_of

Make = Callable[..., PrefillRunner]

PROMPTS: dict[str, tuple[Any, str]] = {
    "none": ([], "no prompts"),
    "empty": ([[1], []], "prompt 1 is empty"),
    "too large an id": ([[1, 61]], "prompt 0 holds the id 61: ids go from 0 to 60"),
    "an id beyond 64 bits": ([[1], [2, 2**70]], f"prompt 1 holds the id {2**70}: ids go from 0"),
    "a negative id": ([[1], [5, -1]], "prompt 1 holds the id -1"),
    "text": (["hello"], "prompt 0 is a string: give token ids"),
    "bytes": ([b"hello"], "prompt 0 is a string: give token ids"),
    "one prompt": ([1, 2, 3], "prompt 0 is 1: a prompt is a list of token ids"),
    "nothing": (None, "prompts are a list of lists of token ids, this is one NoneType"),
    "a tokenizer's answer": ({"input_ids": [[1]]}, "token ids, this is one dict"),
    "one number": (torch.tensor(3), "token ids, this is one int"),
    "fractions": ([[0.5]], "prompt 0 holds 0.5: token ids are whole numbers"),
    "too long": ([[1] * 257], "prompt 0 has 257 tokens, max_tokens=256: .*cache_tokens="),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts(case: str, tiny: TinyModel, make: Make) -> None:
    prompts, says = PROMPTS[case]
    runner = make(tiny)
    for call in (runner, runner.score, runner.check):
        with pytest.raises(ValueError, match=says) as caught:
            call(prompts)
        assert "\n" not in str(caught.value)
    assert runner(prompts_of(3)).logits.isfinite().all()


def test_scoring_counts_a_prompt_among_all_and_runs_none_before(
    tiny: TinyModel, make: Make
) -> None:
    runner = make(tiny, max_tokens=64)
    for call in (runner.score, runner.check):
        with pytest.raises(ValueError, match=r"^prompt 2 has 70 tokens"):  # each is a pass
            call(prompts_of(50, 60, 70))
    assert (runner.report.tokens, runner.report.calls) == (0, 0)
    runner.check(prompts_of(50, 60, 64))
    assert runner.report.tokens == 0


@pytest.mark.parametrize(
    "options, says",
    [
        ({"mode": "fast"}, "mode='fast': one of breakable, full, eager"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_requests": 0}, "max_requests=0"),
        ({"cache_tokens": -1}, "cache_tokens=-1"),
        ({"max_tokens": 256.0}, "max_tokens=256.0: a whole number"),
        ({"max_requests": 2.5}, "max_requests=2.5: a whole number"),
        ({"cache_tokens": True}, "cache_tokens=True: a whole number"),
        ({"buckets": (64.0,)}, r"buckets=\[64.0\]: whole numbers"),
        ({"attention": "flash"}, "attention='flash': one of auto, flashinfer, torch, reference"),
        ({"buckets": (512,)}, r"buckets=\[512\]: sizes lie between 1 and max_tokens=256"),
    ],
)
def test_arguments(options: dict[str, Any], says: str, tiny: TinyModel, make: Make) -> None:
    with pytest.raises(ValueError, match=says):
        make(tiny, **options)


def test_a_prompt_beyond_the_models_positions(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, cache_tokens=1024)
    with pytest.raises(ValueError, match=f"prompt 0 has 600 tokens, the model takes {POSITIONS}"):
        runner(prompts_of(600))


def test_a_full_cache(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, cache_tokens=64)
    held = runner(prompts_of(40))
    held.handle(0)
    with pytest.raises(CacheFull, match=r"48 of 64 tokens and 32 more are needed.*cache_tokens="):
        runner(prompts_of(20))
    held.release()
    assert len(runner(prompts_of(20))) == 1


def test_handles(tiny: TinyModel, make: Make) -> None:
    runner, without = make(tiny, cache_tokens=64), make(tiny)
    handle = runner(prompts_of(3)).handle(0)
    with pytest.raises(ValueError, match="1 prefixes for 2 prompts"):
        runner(prompts_of(1, 2), prefix=[handle])
    with pytest.raises(ValueError, match="another runner's cache"):
        make(tiny, cache_tokens=64)(prompts_of(1), prefix=handle)
    handle.release()
    with pytest.raises(ValueError, match="prefix of prompt 0 was released"):
        runner(prompts_of(1), prefix=handle)
    with pytest.raises(ValueError, match=r"nothing is cached.*cache_tokens="):
        without(prompts_of(1)).handle(0)


def test_the_torch_kernel_without_half_precision(tiny: TinyModel, make: Make) -> None:
    why = "torch's flash kernel needs CUDA|no float32, only half precision"
    with pytest.raises(ValueError, match=rf"attention='torch': ({why})"):
        make(tiny, attention="torch")


def test_a_plan_that_does_not_fit(sim: torch.device, make: Make) -> None:
    from tests.simulated.backend import SimulatedBackend

    runner = make(TinyModel(sim), max_tokens=8192)
    backend = SimulatedBackend()
    weights = torch.empty(16 << 20, dtype=torch.uint8, device=sim)  # memory is scarce, not gone
    backend.set_total_memory(backend.reserved_bytes(sim) + (2 << 20))
    with pytest.raises(
        ValueError, match=r"capturing to max_tokens=8192 takes about .* lower max_t"
    ):
        runner.capture()
    del weights


def test_no_plan_where_nothing_is_captured(tiny: TinyModel, make: Make) -> None:
    with pytest.raises(ValueError, match="nothing is captured, so there is no plan: mode='eager'"):
        make(tiny, mode="eager").plan()


def test_auto_says_why_it_passed_over_a_backend() -> None:
    backend, passed = choose("auto", torch.device("cpu"), [PLAIN], static=True, paged=True)
    assert (backend.name, passed) == ("reference", [])
