"""Published configurations of the zoo's models, and their published parameter counts.

Knows numbers only: what each model's authors put into its `config.json` files, and how many
parameters they report. Values that equal the library class's defaults are left out, except where
the number says what the model is.
"""

from __future__ import annotations

from functools import partial

from accel.pipelines.recipe import Part, Recipe
from accel.pipelines.tokenization import (
    clip_tokenizer,
    gemma_tokenizer,
    qwen_tokenizer,
    t5_tokenizer,
)

CLIP_L_CONFIG = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "projection_dim": 768,
    "hidden_act": "quick_gelu",
    "bos_token_id": 0,
    "eos_token_id": 2,  # as published; encoders then take the highest id as the prompt's end
    "pad_token_id": 1,
}
CLIP_L = Part("CLIPTextModel", CLIP_L_CONFIG)
CLIP_L_PROJECTED = Part("CLIPTextModelWithProjection", CLIP_L_CONFIG)
CLIP_BIG_G = Part(
    "CLIPTextModelWithProjection",
    {
        **CLIP_L_CONFIG,
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 20,
        "projection_dim": 1280,
        "hidden_act": "gelu",
    },
)
T5_XXL_CONFIG = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "dense_act_fn": "gelu_new",
    "is_gated_act": True,
    "tie_word_embeddings": False,
}
T5_XXL = Part("T5EncoderModel", T5_XXL_CONFIG)
UMT5_XXL = Part("UMT5EncoderModel", {**T5_XXL_CONFIG, "vocab_size": 256384})
QWEN3_4B = Part(
    "Qwen3Model",
    {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": True,
    },
)
QWEN25_VL_7B = Part(
    "Qwen2_5_VLForConditionalGeneration",
    {
        "text_config": {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [16, 24, 24],
                "rope_theta": 1e6,
            },
        },
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
        },
        "tie_word_embeddings": False,
    },
)
GEMMA2_2B = Part(
    "Gemma2Model",
    {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "max_position_embeddings": 8192,
    },
)

_VAE_BLOCKS = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
}
VAE_SD15 = Part(
    "AutoencoderKL",
    {**_VAE_BLOCKS, "latent_channels": 4, "sample_size": 512, "scaling_factor": 0.18215},
)
VAE_SDXL = Part(
    "AutoencoderKL",
    {**_VAE_BLOCKS, "latent_channels": 4, "sample_size": 1024, "scaling_factor": 0.13025},
)
_VAE_16 = {
    **_VAE_BLOCKS,
    "latent_channels": 16,
    "sample_size": 1024,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
VAE_FLUX = Part("AutoencoderKL", {**_VAE_16, "scaling_factor": 0.3611, "shift_factor": 0.1159})
VAE_SD3 = Part("AutoencoderKL", {**_VAE_16, "scaling_factor": 1.5305, "shift_factor": 0.0609})
VAE_QWEN = Part("AutoencoderKLQwenImage", {"base_dim": 96, "z_dim": 16})
VAE_WAN = Part("AutoencoderKLWan", {"base_dim": 96, "z_dim": 16})
_DC_AE_BLOCKS = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
VAE_SANA = Part(
    "AutoencoderDC",
    {
        "latent_channels": 32,
        "encoder_block_types": _DC_AE_BLOCKS,
        "decoder_block_types": _DC_AE_BLOCKS,
        "downsample_block_type": "conv",
        "upsample_block_type": "interpolate",
        "scaling_factor": 0.41407,
    },
)

STABLE_DIFFUSION_NOISE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
}
PNDM = Part(
    "PNDMScheduler",
    {**STABLE_DIFFUSION_NOISE, "skip_prk_steps": True, "set_alpha_to_one": False},
)
EULER = Part("EulerDiscreteScheduler", {**STABLE_DIFFUSION_NOISE, "timestep_spacing": "leading"})
FLOW_SHIFT_3 = Part("FlowMatchEulerDiscreteScheduler", {"shift": 3.0})
FLOW_FLUX = Part(
    "FlowMatchEulerDiscreteScheduler",
    {
        "shift": 3.0,
        "use_dynamic_shifting": True,
        "base_shift": 0.5,
        "max_shift": 1.15,
        "base_image_seq_len": 256,
        "max_image_seq_len": 4096,
    },
)
FLOW_QWEN = Part(
    "FlowMatchEulerDiscreteScheduler",
    {
        "shift": 1.0,
        "shift_terminal": 0.02,
        "use_dynamic_shifting": True,
        "base_shift": 0.5,
        "max_shift": 0.9,
        "base_image_seq_len": 256,
        "max_image_seq_len": 8192,
    },
)
FLOW_DPM = Part(
    "DPMSolverMultistepScheduler",
    {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0},
)
DPM_LINEAR = Part(
    "DPMSolverMultistepScheduler",
    {"beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear"},
)
FLOW_UNIPC = Part(
    "UniPCMultistepScheduler",
    {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0},
)

UNET_SD15 = Part(
    "UNet2DConditionModel",
    {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8},
)
UNET_SDXL = Part(
    "UNet2DConditionModel",
    {
        "sample_size": 128,
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
)
TRANSFORMER_FLUX = Part(
    "FluxTransformer2DModel",
    {"num_layers": 19, "num_single_layers": 38, "guidance_embeds": True},
)
TRANSFORMER_SD35_MEDIUM = Part(
    "SD3Transformer2DModel",
    {
        "sample_size": 128,
        "num_layers": 24,
        "num_attention_heads": 24,
        "attention_head_dim": 64,
        "caption_projection_dim": 1536,
        "pos_embed_max_size": 384,
        "dual_attention_layers": tuple(range(13)),
        "qk_norm": "rms_norm",
    },
)
TRANSFORMER_PIXART = Part(
    "PixArtTransformer2DModel",
    {
        "num_layers": 28,
        "sample_size": 128,
        "caption_channels": 4096,
        "interpolation_scale": 2,
        "use_additional_conditions": False,
    },
)
TRANSFORMER_WAN = Part(
    "WanTransformer3DModel",
    {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960},
)
TRANSFORMER_ZIMAGE = Part(
    "ZImageTransformer2DModel",
    {"dim": 3840, "n_heads": 30, "n_kv_heads": 30, "n_layers": 30, "axes_lens": [1536, 512, 512]},
)
TRANSFORMER_QWEN = Part(
    "QwenImageTransformer2DModel", {"num_layers": 60, "num_attention_heads": 24}
)
TRANSFORMER_SANA = Part(
    "SanaTransformer2DModel", {"num_layers": 20, "num_attention_heads": 70, "sample_size": 32}
)

_CLIP = partial(clip_tokenizer, size=49408)
_CLIP_G = partial(clip_tokenizer, size=49408, pad_token="!")

RECIPES: dict[str, Recipe] = {
    "zimage": Recipe(
        "ZImagePipeline",
        {"transformer": TRANSFORMER_ZIMAGE, "text_encoder": QWEN3_4B, "vae": VAE_FLUX},
        FLOW_SHIFT_3,
        {"tokenizer": qwen_tokenizer},
    ),
    "qwenimage": Recipe(
        "QwenImagePipeline",
        {"transformer": TRANSFORMER_QWEN, "text_encoder": QWEN25_VL_7B, "vae": VAE_QWEN},
        FLOW_QWEN,
        {"tokenizer": qwen_tokenizer},
    ),
    "flux": Recipe(
        "FluxPipeline",
        {
            "transformer": TRANSFORMER_FLUX,
            "text_encoder": CLIP_L,
            "text_encoder_2": T5_XXL,
            "vae": VAE_FLUX,
        },
        FLOW_FLUX,
        {"tokenizer": _CLIP, "tokenizer_2": t5_tokenizer},
    ),
    "sdxl": Recipe(
        "StableDiffusionXLPipeline",
        {
            "unet": UNET_SDXL,
            "text_encoder": CLIP_L,
            "text_encoder_2": CLIP_BIG_G,
            "vae": VAE_SDXL,
        },
        EULER,
        {"tokenizer": _CLIP, "tokenizer_2": _CLIP_G},
        {"add_watermarker": False},
    ),
    "sd15": Recipe(
        "StableDiffusionPipeline",
        {"unet": UNET_SD15, "text_encoder": CLIP_L, "vae": VAE_SD15},
        PNDM,
        {"tokenizer": _CLIP},
        {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False},
    ),
    "sd35m": Recipe(
        "StableDiffusion3Pipeline",
        {
            "transformer": TRANSFORMER_SD35_MEDIUM,
            "text_encoder": CLIP_L_PROJECTED,
            "text_encoder_2": CLIP_BIG_G,
            "text_encoder_3": T5_XXL,
            "vae": VAE_SD3,
        },
        FLOW_SHIFT_3,
        {"tokenizer": _CLIP, "tokenizer_2": _CLIP_G, "tokenizer_3": t5_tokenizer},
    ),
    "sana": Recipe(
        "SanaPipeline",
        {"transformer": TRANSFORMER_SANA, "text_encoder": GEMMA2_2B, "vae": VAE_SANA},
        FLOW_DPM,
        {"tokenizer": gemma_tokenizer},
    ),
    "pixart": Recipe(
        "PixArtSigmaPipeline",
        {"transformer": TRANSFORMER_PIXART, "text_encoder": T5_XXL, "vae": VAE_SDXL},
        DPM_LINEAR,
        {"tokenizer": t5_tokenizer},
    ),
    "wan": Recipe(
        "WanPipeline",
        {"transformer": TRANSFORMER_WAN, "text_encoder": UMT5_XXL, "vae": VAE_WAN},
        FLOW_UNIPC,
        {"tokenizer": t5_tokenizer},
    ),
}
