"""What the self-test does where rounding is as large as a fault: deep mixtures of experts, small
weights in half precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers import GptOssConfig, GptOssForCausalLM

import accel
from accel.patches.state import StateProbe
from accel.prefill import reference_attention
from accel.prefill.reference_attention import ReferenceAttention
from accel.prefill.stages import heard
from tests.patches.llm_families import SMALL

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


def test_a_mixture_of_experts_that_rounding_sends_elsewhere_is_taken(mixture: Any) -> None:
    assert declined(mixture) is None


@pytest.mark.parametrize("first", [0, 12])
@pytest.mark.parametrize("forgotten", ["window", "sinks"])
def test_a_mixture_of_experts_whose_attention_is_another_is_declined(
    forgotten: str, first: int, mixture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all layers, or in the second half of them."""
    run = ReferenceAttention.run

    def without(self: Any, layer: Any, *tensors: torch.Tensor) -> None:
        if layer.index < first:
            return run(self, layer, *tensors)
        if forgotten == "window":
            layer = replace(layer, group=replace(layer.group, window=None))
        layer = replace(layer, sinks=None) if forgotten == "sinks" else layer
        return run(self, layer, *tensors)

    monkeypatch.setattr(ReferenceAttention, "run", without)
    assert "differs from the model's own attention" in str(declined(mixture))


def test_a_mixture_of_experts_whose_prompts_see_each_other_is_declined(
    mixture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_before(batch: Any, keys: int, window: int | None) -> torch.Tensor:
        return torch.ones(batch.bucket, keys, dtype=torch.bool).tril()

    monkeypatch.setattr(reference_attention, "visible", all_before)
    assert "differs from the model's own attention" in str(declined(mixture))


LEAKING: dict[str, dict[str, Any]] = {
    "FalconH1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_d_state": 8},
    "RecurrentGemma": {"attention_window_size": 16, "lru_width": 32, "num_hidden_layers": 3},
    "LaraMini": {"sliding_window": 16},
    "BlenderbotSmall": {"d_model": 32, "decoder_attention_heads": 4, "decoder_layers": 2},
}
"""By convolution and recurrence; the last one numbers a packed batch's tokens through."""


@pytest.mark.parametrize("name", LEAKING)
def test_small_leaks_are_found_in_half_precision(name: str) -> None:
    """With small weights they are hardly larger than rounding, or smaller."""
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"this transformers has no {name}")
    kind = getattr(transformers, f"{name}ForCausalLM")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        options = {**SMALL, "head_dim": 8, **LEAKING[name]}
        model = kind(getattr(transformers, f"{name}Config")(**options)).eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.02)
    assert "self-test" in str(declined(model.to(torch.bfloat16)))


@pytest.mark.parametrize("most", [2, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_few_tokens_at_a_time_are_no_leak_with_experts(most: int, seed: int) -> None:
    """Experts sum in another order for other tokens, and too few prompts tell by how much."""
    config = transformers.Qwen3MoeConfig(
        **SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    )
    config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.Qwen3MoeForCausalLM(config).eval()
    with accel.prefill_runner(model, max_tokens=most, attention="reference") as runner:
        assert runner.report.declined is None


def test_hooks_of_a_self_test_elsewhere_are_no_change() -> None:
    """Another thread may make a second runner of the same model just now."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    probe = StateProbe(model)
    before = probe()
    with heard(model):
        assert probe() == before
        assert probe.veto() is None
