"""Tiny text encoders, each as a diffusers pipeline makes, calls and reads it.

Knows the arguments that a kind of pipeline passes, which hidden states it goes on with, and how
often transformers' mask code asks the device before the first layer. Random weights; what is done
to an encoder, and what must hold, is in test_text_encoders.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

import accel
from accel.pipelines.random_weights import build
from accel.pipelines.recipe import Part
from accel.reporting import PartReport
from accel.signature import leaves, map_tree
from tests.accel.same import assert_same

VOCABULARY = 64
IMAGE, VIDEO, VISION_START, VISION_END = 60, 61, 62, 63
"""Ids that no prompt of words contains."""

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Encoder:
    """A class, its configuration, how a pipeline calls it with ids and mask, (batch, tokens) each,
    and what it takes from the output. `reads`: how many host reads a recording has at most, without
    a mask, with one of ones, with padding; None where pipelines never call it so."""

    kind: str
    config: dict[str, Any]
    call: Callable[[Tensor, Any], Call]
    take: Callable[[Any], Any]
    reads: tuple[int | None, int | None, int | None]

    def make(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model on the CPU, always with the same weights."""
        return build(Part(self.kind, self.config).make, "cpu", dtype, 0)


def _layers(indices: tuple[int, ...]) -> Callable[[Any], Any]:
    return lambda output: [output.hidden_states[i] for i in indices]


def _named(ids: Tensor, mask: Any) -> Call:
    return (), {"input_ids": ids, "attention_mask": mask, "output_hidden_states": True}


def _named_without_cache(ids: Tensor, mask: Any) -> Call:
    return (), {**_named(ids, mask)[1], "use_cache": False}


def _with_bools(ids: Tensor, mask: Any) -> Call:
    return _named(ids, None if mask is None else mask.bool())


def _with_floats(ids: Tensor, mask: Any) -> Call:
    return (), {"input_ids": ids, "attention_mask": mask.float()}


def _with_positions(ids: Tensor, mask: Any) -> Call:
    positions = (mask.cumsum(dim=-1) - 1).clamp(min=0).unsqueeze(0).expand(3, -1, -1)
    return (), {**_with_bools(ids, mask)[1], "position_ids": positions}


def _hidden_of(ids: Tensor, mask: Any) -> Call:
    return (ids,), {"attention_mask": mask, "output_hidden_states": True}


def _with_attentions(ids: Tensor, mask: Any) -> Call:
    return (ids,), {**_hidden_of(ids, mask)[1], "output_attentions": True}


_CLIP = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "projection_dim": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 37,
    "num_layers": 3,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
}
_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6}
_QWEN_EYE = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 32,
}
_QWEN_VL = {
    "text_config": {**_DECODER, "rope_parameters": _ROPE},
    "vision_config": {**_QWEN_EYE, "fullatt_block_indexes": [0]},
    "tie_word_embeddings": False,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
_QWEN3_VL = {**_QWEN_VL, "vision_config": {**_QWEN_EYE, "deepstack_visual_indexes": [0]}}
_EYE = {
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_MISTRAL3 = {
    "text_config": {"model_type": "mistral", **_DECODER},
    "vision_config": {"model_type": "pixtral", "head_dim": 16, **_EYE},
    "image_token_index": IMAGE,
}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]


def _gemma(window: int) -> dict[str, Any]:
    own = {"sliding_window": window, "layer_types": _SLIDING, "query_pre_attn_scalar": 8}
    return {**_DECODER, **own}


def _gemma3(window: int) -> dict[str, Any]:
    return {
        "text_config": _gemma(window),
        "vision_config": _EYE,
        "image_token_index": IMAGE,
        "boi_token_index": VISION_START,
        "eoi_token_index": VISION_END,
        "mm_tokens_per_image": 4,
    }


ENCODERS: dict[str, Encoder] = {
    # Stable Diffusion and Flux; a mask where the configuration asks for one.
    "clip": Encoder(
        "CLIPTextModel",
        _CLIP,
        lambda ids, mask: ((ids,), {"attention_mask": mask, "output_hidden_states": False}),
        lambda output: (output[0], output.pooler_output),
        (0, 1, 2),
    ),
    # Its end-of-text token is looked for in another way; Kandinsky 5 hands on all of the tokenizer.
    "clip_by_end_token": Encoder(
        "CLIPTextModel",
        {**_CLIP, "eos_token_id": 58},
        lambda ids, mask: ((), {"input_ids": ids, "attention_mask": mask}),
        lambda output: output["pooler_output"],
        (None, 1, 2),
    ),
    # Stable Diffusion XL and 3.
    "clip_with_projection": Encoder(
        "CLIPTextModelWithProjection",
        _CLIP,
        lambda ids, mask: ((ids,), {"output_hidden_states": True}),
        lambda output: (output[0], output.hidden_states[-2]),
        (0, None, None),
    ),
    # Flux without a mask, Chroma with one.
    "t5": Encoder(
        "T5EncoderModel",
        _T5,
        lambda ids, mask: ((ids,), {"attention_mask": mask, "output_hidden_states": False}),
        lambda output: output[0],
        (0, 1, 1),
    ),
    # Mochi and LTX-Video.
    "t5_bool": Encoder(
        "T5EncoderModel",
        _T5,
        lambda ids, mask: ((ids,), {"attention_mask": mask.bool()}),
        lambda output: output[0],
        (None, 1, 1),
    ),
    # The glyphs of HunyuanImage.
    "t5_float": Encoder("T5EncoderModel", _T5, _with_floats, lambda out: out[0], (None, 1, 1)),
    # Wan.
    "umt5": Encoder(
        "UMT5EncoderModel",
        _T5,
        lambda ids, mask: ((ids, mask), {}),
        lambda output: output.last_hidden_state,
        (None, 1, 1),
    ),
    # Qwen-Image; Kandinsky 5 and Cosmos 2.5 without a mask.
    "qwen25_vl": Encoder(
        "Qwen2_5_VLForConditionalGeneration", _QWEN_VL, _named, _layers((-1,)), (0, 1, 2)
    ),
    # Z-Image.
    "qwen3": Encoder("Qwen3Model", _DECODER, _with_bools, _layers((-2,)), (1, 1, 2)),
    # FLUX.2 klein.
    "qwen3_for_words": Encoder(
        "Qwen3ForCausalLM", _DECODER, _named_without_cache, _layers((1, 2, 3)), (1, 1, 2)
    ),
    # Krea 2.
    "qwen3_vl": Encoder("Qwen3VLModel", _QWEN3_VL, _with_positions, _layers((1, 2)), (None, 1, 2)),
    # FLUX.2.
    "mistral3": Encoder(
        "Mistral3ForConditionalGeneration",
        _MISTRAL3,
        _named_without_cache,
        _layers((1, 2, 3)),
        (1, 1, 2),
    ),
    # Sana, Lumina 2: prompts longer than the window, and shorter, as windows of 4,096 are.
    "gemma2": Encoder("Gemma2Model", _gemma(5), _hidden_of, _layers((-1, -2)), (2, 1, 2)),
    "gemma2_in_window": Encoder(
        "Gemma2Model", _gemma(4096), _hidden_of, _layers((-1, -2)), (2, 2, 4)
    ),
    # LTX 2.
    "gemma3": Encoder(
        "Gemma3ForConditionalGeneration", _gemma3(5), _named, _layers((0, 1, 2, 3)), (0, 1, 2)
    ),
    "gemma3_in_window": Encoder(
        "Gemma3ForConditionalGeneration", _gemma3(1024), _named, _layers((0, 1, 2, 3)), (0, 2, 4)
    ),
    # HunyuanVideo.
    "llama": Encoder("LlamaModel", _DECODER, _named, _layers((-3,)), (1, 1, 2)),
    # HiDream.
    "llama_for_words": Encoder(
        "LlamaForCausalLM", _DECODER, _with_attentions, _layers((1, 2, 3)), (1, 1, 2)
    ),
}


class Pipeline(diffusers.DiffusionPipeline):  # type: ignore[misc]
    """A pipeline with nothing but a text encoder."""

    def __init__(self, text_encoder: nn.Module) -> None:
        super().__init__()
        self.register_modules(text_encoder=text_encoder)


def ids_of(seed: int, batch: int = 2, tokens: int = 11) -> Tensor:
    """Prompts of words, (batch, tokens)."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, 59, (batch, tokens), generator=draw)


class BothEncoders:
    """An encoder twice, of equal weights, one of them in a patched pipeline. On the simulated
    device the plain one stays on the CPU, whose bits the device's are."""

    def __init__(
        self, encoder: Encoder, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        self.encoder, self.device = encoder, device
        self.eager_on = torch.device("cpu") if device.type == "sim" else device
        self.plain = encoder.make(dtype).to(self.eager_on)
        self.pipe = accel.patch(Pipeline(encoder.make(dtype).to(device)), capture="always")

    @property
    def patched(self) -> nn.Module:
        """The encoder of the patched pipeline."""
        model: nn.Module = self.pipe.text_encoder
        return model

    @property
    def report(self) -> PartReport:
        """What was done to it."""
        return accel.report(self.pipe)["text_encoder"]

    def counts(self) -> tuple[int, int, int]:
        """Captures, replays and eager calls."""
        return self.report.captures, self.report.replays, self.report.eager_calls

    def __call__(self, ids: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """The tensors of both's output but a cache; fails where one differs in one bit, or what the
        pipeline takes does."""
        return self.called(*self.encoder.call(ids, mask))

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The same, with any arguments."""
        expected = self.output(self.plain, self.eager_on, args, kwargs)
        result = self.output(self.patched, self.device, args, kwargs)
        assert type(result) is type(expected)
        assert_same(_on_host(_states(result)), _on_host(_states(expected)))
        taken = tensors(self.encoder.take(expected))
        assert_same(_on_host(tensors(self.encoder.take(result))), _on_host(taken))
        assert taken and all(x.isfinite().all() for x in taken)
        return tensors(_states(expected))

    def output(self, model: nn.Module, device: torch.device, args: Any, kwargs: Any) -> Any:
        """What a model returns for arguments given on the host."""
        args, kwargs = map_tree(
            lambda x: x.to(device) if isinstance(x, Tensor) else x, (args, kwargs)
        )
        with torch.no_grad():
            return model(*args, **kwargs)


def tensors(tree: Any) -> list[Tensor]:
    """The tensors in a tree of arguments or results."""
    return [x for x in leaves(tree) if isinstance(x, Tensor)]


def _states(output: Any) -> dict[str, Any]:
    return {name: x for name, x in output.items() if isinstance(x, (Tensor, tuple))}


def _on_host(tree: Any) -> Any:
    return map_tree(lambda x: x.cpu() if isinstance(x, Tensor) else x, tree)
