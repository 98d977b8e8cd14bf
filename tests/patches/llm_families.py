"""Tiny random causal LMs, one per family, and prompts for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCAB = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Weights of std 0.2, so that attention moves the result of two layers as real weights do."""
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 11}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 8, **EXPERTS}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "query_pre_attn_scalar": 12,
            "attn_implementation": "eager",
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 20}),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 8,
            "sliding_window": 9,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "first_k_dense_replace": 1}),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {
            **LATENT,
            "index_topk": 12,
            "index_n_heads": 8,
            "index_head_dim": 16,
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
HOOKED = [name for name in OPTIONS if name != "glm_moe_dsa"]
CACHED = [name for name in HOOKED if name != "deepseek_v3"]


def tiny_lm(
    family: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, **more: Any
) -> Any:
    """A tiny model of a family, weights from a fixed seed, in evaluation mode. Experts are looped
    over on the host, unless `experts_implementation` says otherwise."""
    kind, options = OPTIONS[family]
    make_config: Callable[..., Any] = getattr(transformers, CONFIGS.get(kind, f"{kind}Config"))
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = model_class(
            make_config(**{**SMALL, "experts_implementation": "eager", **options, **more})
        ).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):  # left uninitialised by their class
                parameter.data.normal_()
    return model.to(device=device, dtype=dtype)


def prompts_of(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Random prompts of these lengths, without special tokens."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=draw).tolist() for n in lengths]


def own_hidden(model: Any, prompt: list[int]) -> torch.Tensor:
    """`[tokens, hidden]` from the model's own forward."""
    ids = torch.tensor([prompt], device=model.device)
    decoder = model.get_decoder()
    decoder = model.model if decoder is model and hasattr(model, "model") else decoder
    with torch.no_grad():
        hidden: torch.Tensor = decoder(input_ids=ids, use_cache=False).last_hidden_state
    return hidden[0]


def own_logits(model: Any, prompt: list[int]) -> torch.Tensor:
    """`[tokens, vocab]` from the model's own forward."""
    ids = torch.tensor([prompt], device=model.device)
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits[0]
