"""Models that the runner was not written for: right by graphs, or declined with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import accel
from tests.patches.llm_families import SMALL, own_hidden, own_logits, prompts_of, tiny_lm

PROMPTS = prompts_of(30, 7, 12)


def build(kind: str, device: torch.device, **options: Any) -> Any:
    """A tiny causal LM of any class, in evaluation mode."""
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
        return getattr(transformers, name)(config).eval().to(device)


def right(runner: Any, model: Any) -> bool:
    """Whether hidden states and logits are the model's own."""
    result = runner(PROMPTS)
    return all(
        torch.allclose(result.hidden(i), own_hidden(model, prompt), atol=1e-5)
        and torch.allclose(result.logits[i], own_logits(model, prompt)[-1], atol=1e-5)
        for i, prompt in enumerate(PROMPTS)
    )


def runner_of(model: Any, **options: Any) -> Any:
    return accel.prefill_runner(model, max_tokens=256, buckets=(64,), **options)


def longrope(limit: int) -> dict[str, Any]:
    """RoPE with other frequencies beyond `limit` tokens."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    kind = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0}
    return {"rope_parameters": {**kind, **factors, "original_max_position_embeddings": limit}}


@pytest.mark.parametrize("mode", ["breakable", "full"])
def test_longrope_runs_by_graphs_up_to_its_short_length(mode: str, device: torch.device) -> None:
    model = build("Phi3", device, original_max_position_embeddings=64, **longrope(64))
    runner = runner_of(model, mode=mode, attention="reference")
    assert runner.report.declined is None
    assert right(runner, model) and right(runner, model)
    assert (runner.report.replays, runner.report.recaptures) == (2, 0)
    with pytest.raises(ValueError, match="prompt 0 has 65 tokens, the model takes 64"):
        runner(prompts_of(65))


def test_a_table_of_positions_ends_where_it_ends(device: torch.device) -> None:
    model = build("GPT2", device, n_embd=32, n_layer=2, n_head=4, max_position_embeddings=100)
    runner = runner_of(model, attention="reference")
    assert runner.report.declined is None
    assert right(runner, model) and runner.report.replays == 1
    with pytest.raises(ValueError, match="prompt 0 has 101 tokens, the model takes 100"):
        runner(prompts_of(101))


DECLINED: dict[str, tuple[str, dict[str, Any], str]] = {
    "dynamic RoPE": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        "dynamic RoPE",
    ),
    "no attention": (
        "Mamba",
        {"state_size": 4, "expand": 2, "time_step_rank": 4},
        "",
    ),
    "recurrent layers": (
        "Qwen3Next",
        {
            "head_dim": 8,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "experts_implementation": "eager",
            "layer_types": ["linear_attention", "full_attention"],
        },
        "self-test",
    ),
}


@pytest.mark.parametrize("case", DECLINED)
def test_declined_with_the_reason_and_right_all_the_same(case: str, sim: torch.device) -> None:
    kind, options, says = DECLINED[case]
    model = build(kind, torch.device("cpu"), **options)
    runner = runner_of(model)
    assert runner.report.declined is not None and says in runner.report.declined
    assert right(runner, model)
    assert runner.report.own_passes == len(PROMPTS)


def test_chunked_attention_that_only_the_mask_knows_is_found(device: torch.device) -> None:
    config = transformers.Llama4TextConfig(
        **{**SMALL, "pad_token_id": 0},
        head_dim=8,
        attention_chunk_size=40,
        num_local_experts=2,
        intermediate_size_mlp=48,
        moe_layers=[],
        no_rope_layers=[1, 1],
        attn_temperature_tuning=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = transformers.Llama4ForCausalLM(config).eval().to(device)
    runner = runner_of(model, attention="reference")
    assert runner.report.declined is not None and "self-test" in runner.report.declined
    assert right(runner, model)


def test_offloaded_weights_are_declined() -> None:
    import accelerate

    model = tiny_lm("llama")
    own = [own_logits(model, prompt)[-1] for prompt in PROMPTS]
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    runner = runner_of(model)
    assert runner.report.declined is not None
    for mine, logits in zip(own, runner(PROMPTS).logits, strict=True):
        assert torch.allclose(mine, logits, atol=1e-5)


def test_a_decoder_without_a_head_gives_hidden_states(device: torch.device) -> None:
    model = tiny_lm("qwen3", device).get_decoder()
    result = accel.prefill_runner(model, max_tokens=256, attention="reference")(PROMPTS)
    for i, prompt in enumerate(PROMPTS):
        assert torch.allclose(result.logits[i], own_hidden(model, prompt)[-1], atol=1e-5)


def test_what_is_no_language_model_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear is no transformers causal LM"):
        accel.prefill_runner(torch.nn.Linear(2, 2))


def test_weights_that_change_are_followed(device: torch.device) -> None:
    model = tiny_lm("llama", device)
    runner = runner_of(model, mode="full", attention="reference")
    assert right(runner, model)
    layer = model.model.layers[0]
    layer.mlp.up_proj.weight.data.mul_(2)
    assert right(runner, model)
    layer.self_attn.q_proj.weight = torch.nn.Parameter(layer.self_attn.q_proj.weight * 2)
    assert right(runner, model)
    model.lm_head.weight.data.mul_(-1)
    assert right(runner, model)
    assert (runner.report.replays, runner.report.recaptures) == (4, 1)


def test_adapters_are_followed(device: torch.device) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    model = tiny_lm("llama", device)
    runner = runner_of(model, attention="reference")
    assert right(runner, model)
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    inject_adapter_in_model(lora, model)
    before = own_hidden(model, PROMPTS[0])
    assert right(runner, model)
    for module in model.modules():
        if hasattr(module, "scaling") and isinstance(module.scaling, dict):
            module.scaling["default"] = 0.25
    assert not torch.allclose(own_hidden(model, PROMPTS[0]), before, atol=1e-3)
    assert right(runner, model)
    assert (runner.report.replays, runner.report.recaptures) == (3, 2)


def test_a_head_that_calls_itself_the_decoder_is_none(device: torch.device) -> None:
    model = build("ModernBertDecoder", device, global_attn_every_n_layers=1)
    runner = runner_of(model, attention="reference")
    assert runner.report.declined is None
    for _ in range(2):
        logits = runner(PROMPTS).logits
        for i, prompt in enumerate(PROMPTS):
            assert torch.allclose(logits[i], own_logits(model, prompt)[-1], atol=1e-5)


def test_a_head_of_one_row_for_all_tokens_is_refused() -> None:
    model = build("CsmDepthDecoder", torch.device("cpu"), num_codebooks=4, backbone_hidden_size=32)
    with pytest.raises(ValueError, match=r"is no causal LM: its head makes logits \(1, 1, 97\)"):
        runner_of(model).score([[5, 6, 7]])


@pytest.mark.parametrize("entries", [120, 50])
def test_embeddings_that_are_resized(entries: int, device: torch.device) -> None:
    model = tiny_lm("llama", device)
    [prompt] = prompts_of(20)
    with accel.prefill_runner(model, max_tokens=64, attention="reference") as runner:
        runner([prompt])
        model.resize_token_embeddings(entries)
        with pytest.raises(ValueError, match=f"holds the id {entries}: ids go from 0 to"):
            runner([[entries]])
        hidden = runner([[entries - 1, 5]]).hidden(0)
    assert (hidden - own_hidden(model, [entries - 1, 5])).abs().max() < 1e-4


def test_a_configuration_that_asks_for_tuples(device: torch.device) -> None:
    model = tiny_lm("llama", device)
    [prompt] = prompts_of(20)
    expected = own_logits(model, prompt)[-1]
    model.config.return_dict = False
    for _ in range(2):
        with accel.prefill_runner(model, max_tokens=64, attention="reference") as runner:
            assert (runner([prompt]).logits[0] - expected).abs().max() < 1e-4
            assert runner.report.declined is None
            model.config.return_dict = not model.config.return_dict
            assert (runner([prompt]).logits[0] - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("first", "says"),
    [
        ([1], "1 first tokens for 2 prompts"),
        ([1, 97], r"first tokens \[1, 97\]: ids go to 96"),
        ([1, -1], "ids go to 96"),
        ([1.7, 2.0], "first tokens are whole numbers"),
        (torch.zeros(2, 97), "first tokens are whole numbers"),
        (["a", "b"], "first tokens are whole numbers"),
    ],
    ids=repr,
)
def test_first_tokens_that_are_none(first: Any, says: str, sim: torch.device) -> None:
    options: Any = {"max_tokens": 64, "attention": "reference", "cache_tokens": 64}
    with accel.prefill_runner(tiny_lm("llama", sim), **options) as runner:
        result = runner(prompts_of(5, 6))
        with pytest.raises(ValueError, match=says):
            result.generate_kwargs(first)
        column = torch.tensor([[3], [4]], device=sim)
        assert result.generate_kwargs(column)["input_ids"][:, -1].tolist() == [3, 4]


@pytest.mark.parametrize("most", [6, 8, 11, 12, 40])
def test_what_few_tokens_show_only_at_their_end_is_found(most: int) -> None:
    """Attention in chunks of four tokens, that only the mask knows."""
    options = {"head_dim": 8, "attention_chunk_size": 4, "intermediate_size_mlp": 48}
    config = transformers.Llama4TextConfig(
        **SMALL, **options, num_local_experts=2, attn_temperature_tuning=False
    )
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(config).eval()
    with accel.prefill_runner(model, max_tokens=most, attention="reference") as runner:
        assert "differs from the model's own attention" in str(runner.report.declined)


def test_attention_that_is_scaled_by_the_row_is_declined() -> None:
    """Llama 4's layers without positions number a packed batch through."""
    options = {"head_dim": 8, "intermediate_size_mlp": 48, "layer_types": ["full_attention"] * 2}
    config = transformers.Llama4TextConfig(**SMALL, **options, num_local_experts=2)
    config._experts_implementation = "eager"
    model = transformers.Llama4ForCausalLM(config).eval()
    with accel.prefill_runner(model, max_tokens=64, attention="reference") as runner:
        assert "scaled by a token's row" in str(runner.report.declined)


def test_a_model_that_drops_out_is_declined() -> None:
    config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=97)
    model = transformers.GPT2LMHeadModel(config).train()
    assert any(isinstance(m, torch.nn.Dropout) and m.p for m in model.modules())
    state = torch.get_rng_state()
    with accel.prefill_runner(model, max_tokens=64, attention="reference") as runner:
        assert "call model.eval()" in str(runner.report.declined)
    assert torch.equal(torch.get_rng_state(), state)


def test_more_than_a_decoder_and_a_head_is_refused() -> None:
    """A prompt tuning puts tokens in front, of which the decoder knows nothing."""
    from peft import PromptTuningConfig, get_peft_model

    tuning = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = get_peft_model(tiny_lm("llama", torch.device("cpu")), tuning).eval()
    with pytest.raises(ValueError, match="other logits than its decoder and head"):
        accel.prefill_runner(model, max_tokens=64, attention="reference")
