"""What the self-test lets through: rounding, also where experts make much of it; nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM

import accel
from accel.prefill import reference_attention, self_test
from accel.prefill.reference_attention import ReferenceAttention
from tests.patches.llm_families import SMALL
from tests.patches.test_llm_kinds import build

DEEP: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "head_dim": 32,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 24,
    "initializer_range": 0.02,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.fixture(scope="module")
def mixture() -> Any:
    """A deep mixture of experts in bf16 whose experts are all but equally likely."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(2)
        model = GptOssForCausalLM(GptOssConfig(**{**SMALL, **DEEP})).eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.02)
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(0, 1)
        return model.to(torch.bfloat16)


def declined(model: Any) -> str | None:
    with accel.prefill_runner(model, max_tokens=128, attention="reference", mode="eager") as runner:
        why: str | None = runner.report.declined
        return why


def test_a_mixture_of_experts_that_rounding_sends_elsewhere_is_taken(
    mixture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert declined(mixture) is None
    monkeypatch.setattr(self_test, "_rounding", lambda *_: 0.0)
    assert "differs from the model's own attention" in str(declined(mixture))


@pytest.mark.parametrize("forgotten", ["window", "sinks"])
def test_a_mixture_of_experts_whose_attention_is_another_is_declined(
    forgotten: str, mixture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ReferenceAttention.run

    def without(self: Any, layer: Any, *tensors: torch.Tensor) -> None:
        if forgotten == "window":
            layer = replace(layer, group=replace(layer.group, window=None))
        run(self, replace(layer, sinks=None) if forgotten == "sinks" else layer, *tensors)

    monkeypatch.setattr(ReferenceAttention, "run", without)
    assert "differs from the model's own attention" in str(declined(mixture))


def test_a_mixture_of_experts_whose_prompts_see_each_other_is_declined(
    mixture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_before(batch: Any, keys: int, window: int | None) -> torch.Tensor:
        return torch.ones(batch.bucket, keys, dtype=torch.bool).tril()

    monkeypatch.setattr(reference_attention, "visible", all_before)
    assert "differs from the model's own attention" in str(declined(mixture))


def test_other_threads_use_the_model_as_it_is_meanwhile(mixture: Any) -> None:
    ids = torch.tensor([[5, 6, 7]])

    @torch.no_grad()
    def hidden() -> torch.Tensor:
        states: torch.Tensor = mixture.model(ids, use_cache=False).last_hidden_state
        return states

    before = hidden()
    with self_test._nudged_embeddings(mixture), ThreadPoolExecutor(1) as threads:
        elsewhere = threads.submit(hidden).result()
        assert not torch.equal(hidden(), before)
    assert torch.equal(elsewhere, before)


def test_the_prompt_that_leaks_stays_within_a_table_of_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(self_test, "tolerance", lambda model: -1.0)  # so that rounding is asked
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "max_position_embeddings": 100}
    model = build("GPT2", torch.device("cpu"), **sizes)
    with accel.prefill_runner(
        model, max_tokens=128, cache_tokens=512, attention="reference"
    ) as runner:
        assert "differs from the model's own" in str(runner.report.declined)
