"""Cases 17, 18 and 19: what users of similar tools ran into, on the tiny model."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from accel.prefill.runner import PrefillRunner
from tests.accel.prefill.tiny import TinyModel, prompts_of

Make = Callable[..., PrefillRunner]
BUCKETS = (64, 128, 256)


def own_logits(model: TinyModel, prompt: list[int]) -> torch.Tensor:
    """`[tokens, vocab]`, from the model itself."""
    with torch.no_grad():
        logits: torch.Tensor = model.head(model.own(torch.tensor(prompt, device=model.device)))
    return logits


def greedy(model: TinyModel, prompts: list[list[int]]) -> list[int]:
    """The next token of each prompt, from the model itself."""
    return [int(own_logits(model, prompt)[-1].argmax()) for prompt in prompts]


@pytest.mark.parametrize("mode", ["breakable", "full"])
def test_case_17_every_batch_that_fits_replays(mode: str, tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, mode=mode, buckets=BUCKETS).capture()
    fitting = [[n] for n in range(1, 257, 15)] + [[64], [65], [128], [129], [256]]
    fitting += [[100, 100, 56], [1, 1, 1], [63, 1], [63, 2], [255, 1]]
    for lengths in fitting:
        prompts = prompts_of(*lengths)
        result = runner(prompts)
        assert result.logits.argmax(-1).tolist() == greedy(tiny, prompts)
    assert (runner.report.replays, runner.report.eager_passes) == (len(fitting), 0)
    assert runner.report.captures == len(BUCKETS)


@pytest.mark.parametrize("mode", ["breakable", "full"])
def test_case_17_over_the_limit_is_eager_with_the_reason(
    mode: str, tiny: TinyModel, make: Make
) -> None:
    runner = make(tiny, mode=mode, buckets=BUCKETS)
    prompts = prompts_of(200, 57)
    assert runner(prompts).logits.argmax(-1).tolist() == greedy(tiny, prompts)
    assert (runner.report.replays, runner.report.eager_passes) == (0, 1)
    assert dict(runner.report.reasons) == {"more tokens than max_tokens=256": 1}


@pytest.mark.parametrize("mode", ["eager", "breakable", "full"])
def test_case_18_greedy_tokens_with_chunks_and_prefixes(
    mode: str, tiny: TinyModel, make: Make
) -> None:
    runner = make(tiny, mode=mode, max_tokens=64, buckets=(16, 32), cache_tokens=1024)
    long, middle, short = prompts_of(200, 70, 3)
    whole = runner([long, short, middle])
    assert whole.logits.argmax(-1).tolist() == greedy(tiny, [long, short, middle])
    for cut in (1, 15, 16, 17, 48, 100):
        before = runner([long[:cut]])
        rest = [long[cut : cut + 30], long[cut : cut + 1], middle]
        result = runner(rest, prefix=[before.handle(0), before.handle(0), None])
        expected = greedy(tiny, [long[: cut + 30], long[: cut + 1], middle])
        assert result.logits.argmax(-1).tolist() == expected
    if mode != "eager":
        assert runner.report.eager_passes == 0


def test_case_18_one_attention_break_fires_per_layer(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny).capture()
    assert runner.report.layers == 2
    assert {(b.breaks, b.segments) for b in runner.report.buckets} == {(2, 3)}


def test_case_18_slots_that_were_used_before_are_empty(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, mode="full", max_requests=4)
    many, one = prompts_of(20, 10, 7, 5), prompts_of(12, seed=3)
    alone = make(tiny, mode="full", max_requests=4)(one)
    runner(many)
    assert torch.equal(runner(one).logits, alone.logits)
    assert torch.equal(runner(one).hidden(0), alone.hidden(0))


@pytest.mark.parametrize("requests", [1, 3, 4, 5])
def test_case_19_the_right_route_for_every_number_of_requests(
    requests: int, tiny: TinyModel, make: Make
) -> None:
    prompts = prompts_of(*range(5, 5 + requests))
    for mode in ("breakable", "full"):
        runner = make(tiny, mode=mode, max_requests=4)
        result = runner(prompts)
        assert result.logits.argmax(-1).tolist() == greedy(tiny, prompts)
        over = mode == "full" and requests > 4
        assert (runner.report.replays, runner.report.eager_passes) == (not over, over)
        assert list(runner.report.reasons) == ["more requests than max_requests=4"] * over


@pytest.mark.parametrize("mode", ["breakable", "full"])
def test_case_19_padding_never_moves_a_logit(mode: str, tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, mode=mode, buckets=BUCKETS)
    for edge, step in itertools.product((64, 128, 256), (-1, 0, 1)):
        if edge + step > 256:
            continue
        [prompt, other] = prompts_of(edge + step - 9, 9)
        result = runner([prompt, other])
        for i, mine in enumerate([prompt, other]):
            assert (result.logits[i] - own_logits(tiny, mine)[-1]).abs().max() < 1e-5


def test_case_19_what_lies_in_padding_moves_no_bit(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, mode="full")
    [prompt] = prompts_of(40)
    before = runner([prompt])
    runner(prompts_of(64, seed=5))  # leaves its tokens in the bucket's tail
    after = runner([prompt])
    assert torch.equal(before.logits, after.logits)
    assert torch.equal(before.hidden(0), after.hidden(0))


def test_case_18_a_chunk_brings_no_pages_of_later_chunks(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, mode="full", max_tokens=64, buckets=(32,), cache_tokens=640)
    long, other = prompts_of(400, 100)
    result = runner([other, long])
    assert result.logits.argmax(-1).tolist() == greedy(tiny, [other, long])
    prefix = result.handle(1)
    many = prompts_of(3, 4, 5, 6)
    forked = runner(many, prefix=prefix)
    expected = greedy(tiny, [long + tail for tail in many])
    assert forked.logits.argmax(-1).tolist() == expected
    assert list(runner.report.reasons) == ["more keys than max_tokens + cache_tokens=704"]
