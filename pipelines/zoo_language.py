"""Causal LMs at their published sizes with random weights: prefill benchmarks without downloads.

Knows names, configurations and published parameter counts, and which part of a model that is too
large for one GPU is built instead: some of its layers, each of them whole. Weights mean nothing;
the work a GPU does on them is that of the real model, but for experts, which random routers use
about evenly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from accel.pipelines.names import instead
from accel.pipelines.random_weights import build as build_random
from accel.pipelines.random_weights import count_unbuilt
from accel.pipelines.zoo_configs import QWEN3_4B
from accel.pipelines.zoo_published import Published


@dataclass(frozen=True)
class Language:
    """A causal LM: its transformers classes, `KINDConfig` and `KINDForCausalLM`, its configuration,
    its published size, and how many layers of it are built by default (None: all)."""

    kind: str
    config: Mapping[str, Any]
    published: Published
    layers: int | None = None

    def make(self, layers: int | None = None) -> nn.Module:
        """The model as its class builds it, with that many layers; None: all."""
        import transformers

        config = dict(self.config)
        if layers is not None:
            config["num_hidden_layers"] = layers
        made: nn.Module = getattr(transformers, f"{self.kind}ForCausalLM")(
            getattr(transformers, f"{self.kind}Config")(**config)
        )
        return made


# The yarn scaling that both sizes of gpt-oss are published with.
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

LANGUAGES: dict[str, Language] = {
    # config.json of Qwen/Qwen3-4B; the zoo's Z-Image has the same as its text encoder.
    "qwen3-4b": Language(
        "Qwen3", QWEN3_4B.config, Published(4.02e9, "checkpoint: 8.04 GB in bf16; model card: 4.0B")
    ),
    # config.json of Qwen/Qwen3-30B-A3B. head_dim is no 2048 / 32 there.
    "qwen3-30b-a3b": Language(
        "Qwen3Moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        Published(30.5e9, "model card: 30.5B in total, 3.3B active"),
    ),
    # config.json of openai/gpt-oss-20b: transformers' defaults but for layers and experts. Weights
    # are bf16 here, as transformers unpacks the published four-bit ones where it has no kernel.
    "gpt-oss-20b": Language(
        "GptOss",
        {"num_hidden_layers": 24, "num_local_experts": 32, "rope_parameters": _GPT_OSS_ROPE},
        Published(20.91e9, "model card: 20.91B in total, 3.61B active"),
    ),
    # config.json of openai/gpt-oss-120b: transformers' defaults. Half of its layers are 118 GB.
    "gpt-oss-120b": Language(
        "GptOss",
        {"num_hidden_layers": 36, "num_local_experts": 128, "rope_parameters": _GPT_OSS_ROPE},
        Published(116.83e9, "model card: 116.83B in total, 5.13B active"),
        layers=18,
    ),
    # GLM-5: the defaults of transformers' GlmMoeDsaConfig, which its authors wrote from it. The
    # first three layers are dense: eight are five mixtures, 105 GB.
    "glm-5": Language(
        "GlmMoeDsa",
        {"num_hidden_layers": 78},
        Published(744e9, "model card: 744B in total, 40B active"),
        layers=8,
    ),
}


def names() -> tuple[str, ...]:
    """Every name that `build` takes."""
    return tuple(LANGUAGES)


def build(
    name: str,
    device: str | torch.device = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    layers: int | None = None,
) -> Any:
    """The causal LM `name` on `device`, random finite weights, no downloads, in evaluation mode.

    Parameters are drawn on the device, in seconds; buffers are what the model computes. `layers`
    is how many layers it has; None is all of them or, for what no GPU holds, `default_layers`.
    Raises ValueError for a name that does not exist.
    """
    language = _language(name)
    wanted = default_layers(name) if layers is None else layers

    def make() -> nn.Module:
        with _UninitialisedOnMeta():
            return language.make(wanted)

    return build_random(make, device, dtype, seed)


class _UninitialisedOnMeta(TorchFunctionMode):
    """While open, `torch.empty` takes no memory. What a model leaves uninitialised are weights; a
    layer's experts are one tensor, of 26 GB in float32 for GLM-5, which machines refuse."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "meta"} if func is torch.empty else kwargs))


def default_layers(name: str) -> int:
    """How many layers `build` makes."""
    language = _language(name)
    return language.layers or int(language.config["num_hidden_layers"])


def setting(name: str, layers: int | None = None) -> str:
    """The model in words: `gpt-oss-120b, 18 of 36 layers`.

    >>> setting("gpt-oss-120b"), setting("qwen3-4b")
    ('gpt-oss-120b, 18 of 36 layers', 'qwen3-4b')
    """
    built, whole = layers or default_layers(name), int(_language(name).config["num_hidden_layers"])
    return name if built == whole else f"{name}, {built} of {whole} layers"


def parameter_count(name: str, layers: int | None = None) -> int:
    """Parameters of the whole model, or of that many layers of it: counted on the meta device."""
    return count_unbuilt(lambda: _language(name).make(layers))


def _language(name: str) -> Language:
    if name not in LANGUAGES:
        meant = instead(name, names(), f"name may be {', '.join(names())}")
        raise ValueError(f"the zoo has no language model {name!r}; {meant}")
    return LANGUAGES[name]
