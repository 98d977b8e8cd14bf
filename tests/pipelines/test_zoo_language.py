"""The zoo's language models have their published sizes; no real size is made here."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from accel.pipelines import zoo_language
from accel.pipelines.random_weights import on_meta

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
SMALL_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3-4b": {},
    "qwen3-30b-a3b": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt-oss-20b": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt-oss-120b": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm-5": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "index_topk": 12,
        "index_n_heads": 8,
        "index_head_dim": 16,
    },
}


def shrink(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The same architecture, but narrow."""
    whole = zoo_language.LANGUAGES[name]
    small = {**whole.config, **SMALL, **SMALL_EXPERTS[name]}
    monkeypatch.setitem(zoo_language.LANGUAGES, name, replace(whole, config=small))


@pytest.mark.parametrize("name", zoo_language.names())
def test_every_model_has_its_published_size_within_one_percent(name: str) -> None:
    published, source = zoo_language.LANGUAGES[name].published
    assert abs(zoo_language.parameter_count(name) / published - 1) < 0.01, source


@pytest.mark.parametrize("name", zoo_language.names())
def test_what_is_built_by_default_fits_a_gpu(name: str) -> None:
    built = zoo_language.parameter_count(name, zoo_language.default_layers(name))
    assert built * 2 < 120e9, "bytes in bf16; an H200 has 151e9"


def test_a_cut_model_has_whole_layers_and_both_kinds_of_them() -> None:
    with torch.device("meta"):
        glm, oss = (
            zoo_language.LANGUAGES[name].make(layers)
            for name, layers in (("glm-5", 8), ("gpt-oss-120b", 18))
        )
    assert glm.config.mlp_layer_types == ["dense"] * 3 + ["sparse"] * 5
    assert oss.config.layer_types.count("sliding_attention") == 9
    counts = [zoo_language.parameter_count("gpt-oss-120b", layers) for layers in (17, 18, 36)]
    assert counts[2] - counts[1] == 18 * (counts[1] - counts[0])


@pytest.mark.parametrize("name", zoo_language.names())
def test_weights_are_made_in_bf16_finite_and_varied(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch, name)
    model = zoo_language.build(name, "cpu", layers=4)
    assert model.config.num_hidden_layers == 4
    assert not model.training
    for path, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16, path
        assert parameter.isfinite().all(), path
        assert parameter.std() > 0, path
    ids = torch.randint(0, 97, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    assert logits.isfinite().all()
    assert logits[0].std(dim=0).min() > 0, "every token moves the result"


def test_nothing_large_is_allocated_before_weights_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(
        zoo_language, "build_random", lambda make, *others: made.append(on_meta(make))
    )
    zoo_language.build("glm-5", layers=4)  # a layer's experts alone would be 26 GB
    (model,) = made
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}


def test_rotary_tables_are_those_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch, "qwen3-4b")
    rotary = zoo_language.build("qwen3-4b", "cpu", layers=1).model.rotary_emb
    expected = 1e6 ** -(torch.arange(0, 16, 2) / 16)
    assert torch.allclose(rotary.inv_freq, expected)


def test_names_in_words() -> None:
    assert doctest.testmod(zoo_language).failed == 0
    assert zoo_language.setting("glm-5") == "glm-5, 8 of 78 layers"
    assert zoo_language.setting("qwen3-4b", 2) == "qwen3-4b, 2 of 36 layers"


@pytest.mark.parametrize(
    "call", [zoo_language.build, zoo_language.parameter_count, zoo_language.default_layers]
)
def test_an_unknown_model_is_named(call: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match=r"'nothing'.*qwen3-4b"):
        call("nothing")
