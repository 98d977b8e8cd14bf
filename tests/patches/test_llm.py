"""Families of causal LMs behind the prefill runner: equal to the model's own attention, prompt by
prompt, and equal bit for bit from mode to mode."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import accel
from accel.prefill.runner import PrefillRunner
from tests.patches.llm_families import (
    CACHED,
    HOOKED,
    OPTIONS,
    own_hidden,
    own_logits,
    prompts_of,
    tiny_lm,
)

Make = Callable[..., PrefillRunner]
SLOTS = 3
BATCHES = [(1,), (64,), (5, 40, 17), (1, 30, 1, 31), (65, 63, 1)]
"""One request to one more than there are slots; bucket edges and one to either side."""


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes small runners, and closes them after the test."""
    made: list[PrefillRunner] = []

    def make(model: Any, **options: Any) -> PrefillRunner:
        defaults: dict[str, Any] = {"attention": "reference", "buckets": (64, 128)}
        sizes = {"max_tokens": 160, "max_requests": SLOTS}
        made.append(accel.prefill_runner(model, **{**defaults, **sizes, **options}))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


def differences(runner: PrefillRunner, model: Any, prompts: list[list[int]]) -> float:
    """The largest difference from the model's own hidden states and last logits."""
    result = runner(prompts)
    found = []
    for i, prompt in enumerate(prompts):
        found.append((result.hidden(i) - own_hidden(model, prompt)).abs().max().item())
        found.append((result.logits[i] - own_logits(model, prompt)[-1]).abs().max().item())
    return max(found)


@pytest.mark.parametrize("family", OPTIONS)
@pytest.mark.parametrize("mode", ["eager", "breakable", "full"])
def test_ragged_batches_equal_the_models_own(
    family: str, mode: str, device: torch.device, make: Make
) -> None:
    model = tiny_lm(family, device)
    runner = make(model, mode=mode)
    assert runner.report.declined is None
    for lengths in BATCHES:
        assert differences(runner, model, prompts_of(*lengths)) < 1e-5
    eager = {"eager": 5, "breakable": 0, "full": 1}[runner.report.mode]
    assert (runner.report.eager_passes, runner.report.replays) == (eager, 5 - eager)


@pytest.mark.parametrize("family", OPTIONS)
def test_modes_agree_bit_for_bit(family: str, device: torch.device, make: Make) -> None:
    model = tiny_lm(family, device)
    runners = [make(model, mode=mode) for mode in ("eager", "breakable", "full")]
    for lengths in BATCHES:
        prompts = prompts_of(*lengths)
        first, *others = [runner(prompts) for runner in runners]
        for other in others:
            assert torch.equal(first.logits, other.logits)
            assert all(torch.equal(first.hidden(i), other.hidden(i)) for i in range(len(prompts)))


@pytest.mark.parametrize("family", CACHED)
@pytest.mark.parametrize("mode", ["eager", "breakable", "full"])
def test_chunks_and_prefixes_equal_the_whole(
    family: str, mode: str, device: torch.device, make: Make
) -> None:
    model = tiny_lm(family, device)
    runner = make(model, mode=mode, cache_tokens=512, max_tokens=64, buckets=(32,))
    [long, short] = prompts_of(150, 20)
    assert differences(runner, model, [long, short]) < 1e-5
    prefix = runner([long[:37]])
    results = runner([long[37:70], short], prefix=[prefix.handle(0), None])
    again = runner([long[37:41]], prefix=prefix.handle(0))
    assert (results.hidden(0) - own_hidden(model, long[:70])[37:]).abs().max() < 1e-5
    assert (results.hidden(1) - own_hidden(model, short)).abs().max() < 1e-5
    assert (again.hidden(0) - own_hidden(model, long[:41])[37:]).abs().max() < 1e-5
    assert runner.report.declined is None


@pytest.mark.parametrize("family", CACHED)
def test_generate_goes_on_behind_ragged_prompts(
    family: str, device: torch.device, make: Make
) -> None:
    model = tiny_lm(family, device)
    runner = make(model, cache_tokens=256)
    prompts = prompts_of(23, 9)
    result = runner(prompts)
    first = result.logits.argmax(-1)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    continued = model.generate(**result.generate_kwargs(first), **options)[:, -5:]
    for prompt, token, ours in zip(prompts, first.tolist(), continued.tolist(), strict=True):
        ids = torch.tensor([[*prompt, token]], device=device)
        own = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert own[0, -5:].tolist() == ours


@pytest.mark.parametrize("family", HOOKED)
def test_scores_are_the_models_log_probabilities(
    family: str, device: torch.device, make: Make
) -> None:
    model = tiny_lm(family, device)
    prompts = prompts_of(33, 1, 90, 12, 2)
    for prompt, score in zip(prompts, make(model).score(prompts), strict=True):
        own = own_logits(model, prompt).float().log_softmax(-1).cpu()
        expected = own[:-1].gather(-1, torch.tensor(prompt)[1:, None])[:, 0]
        assert torch.allclose(score, expected, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_the_model_is_left_as_it_was(family: str, device: torch.device, make: Make) -> None:
    model = tiny_lm(family, device)
    [prompt] = prompts_of(20)
    before = own_logits(model, prompt)
    state = [(m, {k: id(v) for k, v in vars(m).items()}) for m in model.modules()]
    name = model.config._attn_implementation
    runner = make(model, mode="full", cache_tokens=64)
    runner([prompt])
    runner.close()
    assert model.config._attn_implementation == name
    assert all({k: id(v) for k, v in vars(m).items()} == kept for m, kept in state)
    assert torch.equal(own_logits(model, prompt), before)


def test_two_runners_of_one_model_leave_each_others_graphs_alone(
    device: torch.device, make: Make
) -> None:
    model = tiny_lm("llama", device)
    runners = [make(model), make(model, mode="full", cache_tokens=256)]
    batches = [prompts_of(5 + n, 20, seed=n) for n in range(6)]
    own = [[own_hidden(model, prompt) for prompt in batch] for batch in batches]
    wrong: list[Any] = []

    def work(runner: PrefillRunner) -> None:
        for batch, expected in zip(batches, own, strict=True):
            result = runner(batch)
            pairs = enumerate(expected)
            wrong.extend(i for i, x in pairs if (result.hidden(i) - x).abs().max() > 1e-4)

    threads = [threading.Thread(target=work, args=(runner,)) for runner in runners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    for runner in runners:
        assert (runner.report.recaptures, runner.report.replays) == (0, 6), runner.report


@pytest.mark.parametrize("family", OPTIONS)
def test_in_half_precision_the_error_is_that_of_bf16(
    family: str, device: torch.device, make: Make
) -> None:
    model = tiny_lm(family, device, torch.bfloat16)
    exact = tiny_lm(family, device, torch.bfloat16).float()
    runner = make(model, max_tokens=256, max_requests=4)
    assert runner.report.declined is None
    prompts = prompts_of(150, 3, 70, 1)
    result = runner(prompts)
    ours, own = 0.0, 0.0
    for i, prompt in enumerate(prompts):
        right = own_hidden(exact, prompt)
        ours += float((result.hidden(i).float() - right).norm() / right.norm())
        own += float((own_hidden(model, prompt).float() - right).norm() / right.norm())
    assert ours <= 1.25 * own
