"""Tiny complete pipelines: every stage a real one has, small enough to draw a picture in a test.

Knows the smallest configurations of text encoders and VAEs that the stock pipeline classes accept
and that decode to pictures whose pixels vary. Denoisers: see `tiny_images` and its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from accel.pipelines import tiny_images as images
from accel.pipelines import tiny_unets as unets
from accel.pipelines import tiny_videos as videos
from accel.pipelines.recipe import Part, Recipe
from accel.pipelines.tokenization import (
    clip_tokenizer,
    gemma_tokenizer,
    qwen_tokenizer,
    t5_tokenizer,
    vocabulary_size,
)

FLOW = Part("FlowMatchEulerDiscreteScheduler", {"shift": 3.0})
DYNAMIC_FLOW = Part(
    "FlowMatchEulerDiscreteScheduler",
    {
        "use_dynamic_shifting": True,
        "base_image_seq_len": 256,
        "max_image_seq_len": 4096,
        "base_shift": 0.5,
        "max_shift": 1.15,
    },
)
STABLE_DIFFUSION_NOISE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
}


def _clip(kind: str = "CLIPTextModel") -> Part:
    size = vocabulary_size("clip")
    config = {
        "vocab_size": size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "projection_dim": 32,
        "bos_token_id": size - 2,
        "eos_token_id": size - 1,
        "pad_token_id": size - 1,
    }
    return Part(kind, config)


def _t5(kind: str = "T5EncoderModel") -> Part:
    config = {
        "vocab_size": vocabulary_size("t5"),
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
    }
    return Part(kind, config)


def _decoder(tokenizer: str) -> dict[str, Any]:
    """The configuration of a two-layer causal language model, as a text encoder."""
    return {
        "vocab_size": vocabulary_size(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _qwen_vl() -> Part:
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [0],
    }
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    text = {**_decoder("qwen"), "rope_parameters": rope}
    config = {"text_config": text, "vision_config": vision, "tie_word_embeddings": False}
    return Part("Qwen2_5_VLForConditionalGeneration", config)


def _vae(scaling: float, shift: float | None = None) -> Part:
    """A two-level AutoencoderKL: 2x2 pixels a latent, four channels."""
    config = {
        "block_out_channels": (16, 32),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "latent_channels": 4,
        "norm_num_groups": 8,
        "sample_size": 64,
        "scaling_factor": scaling,
        "shift_factor": shift,
    }
    return Part("AutoencoderKL", config)


def _video_vae(kind: str, **more: Any) -> Part:
    """The causal 3-D VAE of Wan and Qwen-Image: 4x4 pixels and two frames a latent."""
    config = {
        "base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 2, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True],
        "latents_mean": [0.0] * 4,
        "latents_std": [1.0] * 4,
    }
    return Part(kind, {**config, **more})


def _sana_vae() -> Part:
    config = {
        "latent_channels": 4,
        "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
        "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
        "encoder_block_out_channels": (16, 32),
        "decoder_block_out_channels": (16, 32),
        "encoder_layers_per_block": (1, 1),
        "decoder_layers_per_block": (1, 1),
        "encoder_qkv_multiscales": ((), (5,)),
        "decoder_qkv_multiscales": ((), (5,)),
        "attention_head_dim": 8,
        "upsample_block_type": "interpolate",
        "downsample_block_type": "stride_conv",
        "decoder_norm_types": "rms_norm",
        "decoder_act_fns": "silu",
        "scaling_factor": 0.41407,
    }
    return Part("AutoencoderDC", config)


def _sd15() -> Recipe:
    return Recipe(
        "StableDiffusionPipeline",
        {
            "text_encoder": _clip(),
            "unet": Part("UNet2DConditionModel", unets.SD15),
            "vae": _vae(0.18215),
        },
        Part("DDIMScheduler", {**STABLE_DIFFUSION_NOISE, "clip_sample": False}),
        {"tokenizer": clip_tokenizer},
        {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False},
    )


def _sdxl() -> Recipe:
    unet = {
        **unets.SDXL,
        "cross_attention_dim": 64,
        "projection_class_embeddings_input_dim": 6 * 8 + 32,
    }
    return Recipe(
        "StableDiffusionXLPipeline",
        {
            "text_encoder": _clip(),
            "text_encoder_2": _clip("CLIPTextModelWithProjection"),
            "unet": Part("UNet2DConditionModel", unet),
            "vae": _vae(0.13025),
        },
        Part("EulerDiscreteScheduler", STABLE_DIFFUSION_NOISE),
        {"tokenizer": clip_tokenizer, "tokenizer_2": partial(clip_tokenizer, pad_token="!")},
        {"add_watermarker": False},
    )


def _sd3() -> Recipe:
    transformer = {**images.SD3, "joint_attention_dim": 64, "pooled_projection_dim": 64}
    encoders = {
        "text_encoder": _clip("CLIPTextModelWithProjection"),
        "text_encoder_2": _clip("CLIPTextModelWithProjection"),
        "text_encoder_3": Part("T5EncoderModel", {**_t5().config, "d_model": 64}),
    }
    transformer["pos_embed_max_size"] = 32
    parts = {"transformer": Part("SD3Transformer2DModel", transformer), "vae": _vae(1.5305, 0.06)}
    tools: dict[str, Callable[[], Any]] = {
        "tokenizer": clip_tokenizer,
        "tokenizer_2": partial(clip_tokenizer, pad_token="!"),
        "tokenizer_3": t5_tokenizer,
    }
    return Recipe("StableDiffusion3Pipeline", {**encoders, **parts}, FLOW, tools)


def _flux() -> Recipe:
    transformer = {**images.GUIDED_FLUX, "in_channels": 16, "axes_dims_rope": (4, 4, 8)}
    return Recipe(
        "FluxPipeline",
        {
            "text_encoder": _clip(),
            "text_encoder_2": _t5(),
            "transformer": Part("FluxTransformer2DModel", transformer),
            "vae": _vae(0.3611, 0.1159),
        },
        DYNAMIC_FLOW,
        {"tokenizer": clip_tokenizer, "tokenizer_2": t5_tokenizer},
    )


def _zimage() -> Recipe:
    return Recipe(
        "ZImagePipeline",
        {
            "text_encoder": Part("Qwen3Model", _decoder("qwen")),
            "transformer": Part(
                "ZImageTransformer2DModel", {**images.Z_IMAGE, "axes_lens": (1024, 64, 64)}
            ),
            "vae": _vae(0.3611, 0.1159),
        },
        FLOW,
        {"tokenizer": qwen_tokenizer},
    )


def _qwenimage() -> Recipe:
    return Recipe(
        "QwenImagePipeline",
        {
            "text_encoder": _qwen_vl(),
            "transformer": Part("QwenImageTransformer2DModel", images.QWEN_IMAGE),
            "vae": _video_vae("AutoencoderKLQwenImage"),
        },
        DYNAMIC_FLOW,
        {"tokenizer": qwen_tokenizer},
    )


def _sana() -> Recipe:
    return Recipe(
        "SanaPipeline",
        {
            "text_encoder": Part("Gemma2Model", {**_decoder("gemma"), "query_pre_attn_scalar": 16}),
            "transformer": Part("SanaTransformer2DModel", images.SANA),
            "vae": _sana_vae(),
        },
        FLOW,
        {"tokenizer": gemma_tokenizer},
    )


def _pixart() -> Recipe:
    return Recipe(
        "PixArtSigmaPipeline",
        {
            "text_encoder": _t5(),
            "transformer": Part("PixArtTransformer2DModel", images.PIXART),
            "vae": _vae(0.13025),
        },
        Part("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++"}),
        {"tokenizer": t5_tokenizer},
    )


def _wan() -> Recipe:
    return Recipe(
        "WanPipeline",
        {
            "text_encoder": _t5("UMT5EncoderModel"),
            "transformer": Part("WanTransformer3DModel", {**videos.WAN, "rope_max_seq_len": 64}),
            "vae": _video_vae("AutoencoderKLWan", scale_factor_spatial=4, scale_factor_temporal=2),
        },
        Part(
            "UniPCMultistepScheduler",
            {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0},
        ),
        {"tokenizer": t5_tokenizer},
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "sd15": _sd15,
    "sdxl": _sdxl,
    "sd3": _sd3,
    "flux": _flux,
    "zimage": _zimage,
    "qwenimage": _qwenimage,
    "sana": _sana,
    "pixart": _pixart,
    "wan": _wan,
}
