"""Half precision on a GPU: the kernels that are really used, against float32 and against each
other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import accel
from tests.patches.llm_families import HOOKED, own_hidden, prompts_of, tiny_lm

pytestmark = pytest.mark.gpu
PROMPTS = prompts_of(150, 3, 70, 1)
CAPPED = ("gemma2",)
"""Families with a soft-cap, which torch's kernel has not."""
WITH_EXPERTS = ("qwen3_moe", "gpt_oss", "deepseek_v3")
MODES = ("eager", "breakable", "full")


@pytest.fixture(autouse=True)
def _on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def half(family: str) -> Any:
    """A tiny model in bf16, its experts as real models have them."""
    experts = {"experts_implementation": "grouped_mm"} if family in WITH_EXPERTS else {}
    return tiny_lm(family, "cuda", torch.bfloat16, **experts)


def runner_of(model: Any, mode: str, attention: str, **options: Any) -> Any:
    return accel.prefill_runner(
        model, max_tokens=256, max_requests=4, mode=mode, attention=attention, **options
    )


def error(hidden: torch.Tensor, exact: torch.Tensor) -> float:
    return float((hidden.float() - exact).norm() / exact.norm())


@pytest.mark.parametrize("family", HOOKED)
@pytest.mark.parametrize("attention", ["torch", "reference"])
def test_the_error_is_that_of_bf16(family: str, attention: str) -> None:
    if attention == "torch" and family in CAPPED:
        pytest.skip("torch's kernel has no soft-cap")
    model = half(family)
    exact = copy.deepcopy(model).float()
    if family in WITH_EXPERTS:
        exact.config._experts_implementation = "eager"
    result = runner_of(model, "breakable", attention)(PROMPTS)
    ours, own = [], []
    for i, prompt in enumerate(PROMPTS):
        right = own_hidden(exact, prompt)
        ours.append(error(result.hidden(i), right))
        own.append(error(own_hidden(model, prompt), right))
    assert sum(ours) <= 1.25 * sum(own)


@pytest.mark.parametrize("family", HOOKED)
@pytest.mark.parametrize("attention", ["torch", "reference"])
def test_modes_agree_bit_for_bit(family: str, attention: str) -> None:
    if attention == "torch" and family in CAPPED:
        pytest.skip("torch's kernel has no soft-cap")
    model = half(family)
    first, *others = [runner_of(model, mode, attention) for mode in MODES]
    for lengths in [(5,), (64,), (65, 1, 30), (100, 90, 60, 6)]:
        prompts = prompts_of(*lengths)
        expected = first(prompts)
        for runner in others:
            result = runner(prompts)
            assert torch.equal(expected.logits, result.logits)
            assert all(
                torch.equal(expected.hidden(i), result.hidden(i)) for i in range(len(prompts))
            )
    for runner in others:
        assert (runner.report.replays, runner.report.eager_passes) == (4, 0), runner.report


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss", "gemma3"])
@pytest.mark.parametrize("mode", ["breakable", "full"])
def test_chunks_and_prefixes(family: str, mode: str) -> None:
    model = half(family)
    runner = runner_of(model, mode, "torch", cache_tokens=1024)
    eager = runner_of(model, "eager", "torch", cache_tokens=1024)
    [long, short] = prompts_of(600, 9)
    ours, expected = runner([long, short]), eager([long, short])
    assert torch.equal(ours.logits, expected.logits)
    assert torch.equal(ours.hidden(0), expected.hidden(0))
    assert runner.report.eager_passes == 0


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_grouped_experts_are_captured_on_hopper(family: str) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("grouped matrix products wait for the host before sm90")
    runner = runner_of(half(family), "full", "torch").capture()
    assert {(b.segments, b.breaks) for b in runner.report.buckets} == {(1, 0)}


def test_auto_takes_a_kernel_and_not_the_reference() -> None:
    assert runner_of(half("llama"), "full", "auto").report.attention in ("flashinfer", "torch")
