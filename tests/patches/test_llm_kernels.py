"""A prefill runner where there are kernels: right, and the same in every mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import accel
from accel.patches import llm
from accel.prefill.runner import PrefillRunner
from tests.patches.counting_kernels import CountingKernels
from tests.patches.llm_families import own_hidden, own_logits, prompts_of, tiny_lm

Make = Callable[..., PrefillRunner]
FAMILIES = ["llama", "gemma3"]
BATCHES = [(1,), (5, 40, 17), (64,), (65, 1)]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes small runners, and closes them after the test."""
    made: list[PrefillRunner] = []

    def make(model: Any, **options: Any) -> PrefillRunner:
        sizes = {"max_tokens": 128, "max_requests": 3, "buckets": (64,)}
        made.append(accel.prefill_runner(model, **{"attention": "reference", **sizes, **options}))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_modes_agree_bit_for_bit_and_with_the_model(
    family: str, device: torch.device, make: Make, kernels: CountingKernels
) -> None:
    model = tiny_lm(family, device)
    runners = [make(model, mode=mode) for mode in ("eager", "breakable", "full")]
    for lengths in BATCHES:
        prompts = prompts_of(*lengths)
        first, *others = [runner(prompts) for runner in runners]
        for i, prompt in enumerate(prompts):
            assert (first.hidden(i) - own_hidden(model, prompt)).abs().max() < 1e-5
            assert (first.logits[i] - own_logits(model, prompt)[-1]).abs().max() < 1e-5
        for other in others:
            assert torch.equal(first.logits, other.logits)
            assert all(torch.equal(first.hidden(i), other.hidden(i)) for i in range(len(prompts)))
    assert kernels.tanh == kernels.centred == {family == "gemma3"}
    for runner in runners[1:]:
        report = runner.report
        assert (report.declined, report.notes) == (None, [])
        assert (report.replays, report.eager_passes) == (len(BATCHES), 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_half_precision_the_error_is_that_of_bf16(
    family: str, device: torch.device, make: Make, kernels: CountingKernels
) -> None:
    model = tiny_lm(family, device, torch.bfloat16)
    exact = tiny_lm(family, device, torch.bfloat16).float()
    prompts, ours, own = prompts_of(100, 3, 20), 0.0, 0.0
    result = make(model, max_tokens=256)(prompts)
    for i, prompt in enumerate(prompts):
        right = own_hidden(exact, prompt)
        ours += float((result.hidden(i).float() - right).norm() / right.norm())
        own += float((own_hidden(model, prompt).float() - right).norm() / right.norm())
    assert min(kernels.gates, kernels.turns, kernels.norms) > 0
    assert ours <= 1.25 * own


@pytest.mark.parametrize(
    ("family", "fused", "wanted"),
    [
        ("llama", True, (2, 2, 5)),
        ("llama", False, (0, 0, 0)),
        ("qwen3_moe", True, (0, 0, 9)),
        ("phi3", True, (2, 0, 5)),
    ],
)
def test_every_layer_takes_one_of_each_or_none(
    family: str,
    fused: bool,
    wanted: tuple[int, int, int],
    device: torch.device,
    make: Make,
    kernels: CountingKernels,
) -> None:
    """But norms, only without experts, to whom another rounding may send other tokens. Phi3 has one
    projection for both halves of a unit, and turns like the others."""
    model, prompts = tiny_lm(family, device), prompts_of(30)
    runner = make(model, mode="eager", fused=fused)
    kernels.turns = kernels.gates = kernels.norms = 0
    runner(prompts)
    assert (kernels.turns, kernels.gates, kernels.norms) == wanted
    own_hidden(model, prompts[0])
    assert (kernels.turns, kernels.gates, kernels.norms) == wanted


@pytest.mark.parametrize("mode", ["breakable", "full"])
def test_a_replay_calls_no_kernel_from_the_host(
    mode: str, device: torch.device, make: Make, kernels: CountingKernels
) -> None:
    runner = make(tiny_lm("llama", device), mode=mode)
    runner(prompts_of(30))
    before = kernels.turns, kernels.gates, kernels.norms
    runner(prompts_of(31, 4))
    assert (kernels.turns, kernels.gates, kernels.norms) == before and min(before) > 0
    assert runner.report.replays == 2


@pytest.mark.parametrize(
    ("family", "fused", "wanted"),
    [("llama", True, True), ("llama", False, False), ("qwen3_moe", True, True)],
)
def test_kernels_that_are_used_are_asked_for_before_anything_is_recorded(
    family: str, fused: bool, wanted: bool, device: torch.device
) -> None:
    """The first question compiles, and waits. With experts it is norms that ask."""
    with mock.patch.object(llm, "kernels_for") as asked:
        llm.TransformersModel(tiny_lm(family, device), fused=fused)
    assert asked.call_args_list == ([mock.call(device)] if wanted else [])
