"""More tiny text-to-image denoisers: those whose calls carry lists, dicts, packed rows or experts.

Knows each family's smallest sensible configuration and call, like `tiny_images`, whose sizes and
prompt lengths it shares.
"""

from __future__ import annotations

from typing import Any

import torch

from accel.pipelines.tiny_family import Draw, Family, grid_ids, mask
from accel.pipelines.tiny_images import FLUX, LENGTHS, SIZES


def _bria_fibo(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(2, rows * columns, 4),
        "timestep": draw.times(2),
        "encoder_hidden_states": draw.normal(2, length, 32),
        "text_encoder_layers": [draw.normal(2, length, 16) for _ in range(4)],
        "joint_attention_kwargs": {},
        "txt_ids": torch.zeros(length, 3),
        "img_ids": grid_ids(rows, columns),
    }


def _bria_fibo2(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(1, 4, rows, columns),
        "timestep": draw.times(1, 1.0),
        "encoder_hidden_states": draw.normal(1, 2, length, 32),
        "encoder_attention_mask": mask(1, length, length, torch.bool),
        "context_latents": None,
    }


def _glm_image(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    prior = draw.integers(64, 1, rows // 2 * columns // 2)
    return {
        "hidden_states": draw.normal(1, 4, rows, columns),
        "encoder_hidden_states": draw.normal(1, 6 + 2 * variant, 32),
        "prior_token_id": prior,
        "prior_token_drop": torch.full_like(prior, variant == 1, dtype=torch.bool),
        "timestep": draw.times(1),
        "target_size": torch.tensor([[8.0 * rows, 8.0 * columns]]),
        "crop_coords": torch.zeros(1, 2),
        "attention_kwargs": None,
    }


def _glm_image_cached(draw: Draw, variant: int) -> dict[str, Any]:
    from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache

    return {**_glm_image(draw, variant), "kv_caches": GlmImageKVCache(num_layers=2)}


def _longcat(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    text = torch.arange(length, dtype=torch.float32)[:, None] * torch.tensor([0.0, 1.0, 1.0])
    image = grid_ids(rows, columns) + torch.tensor([1.0, length, length])
    return {
        "hidden_states": draw.normal(1, rows * columns, 4),
        "timestep": draw.times(1, 1.0),
        "guidance": None,
        "encoder_hidden_states": draw.normal(1, length, 32),
        "txt_ids": text,
        "img_ids": image,
    }


def _ovis(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    text = torch.zeros(length, 3)
    text[:, 1:] = torch.arange(length)[:, None]
    return {
        "hidden_states": draw.normal(1, rows * columns, 4),
        "timestep": draw.times(1, 1.0),
        "encoder_hidden_states": draw.normal(1, length, 32),
        "txt_ids": text,
        "img_ids": grid_ids(rows, columns),
        "joint_attention_kwargs": None,
    }


def _hidream(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(1, 4, rows, columns),
        "timesteps": draw.times(1),
        "encoder_hidden_states_t5": draw.normal(1, length, 32),
        "encoder_hidden_states_llama3": draw.normal(2, 1, length, 32),
        "pooled_embeds": draw.normal(1, 32),
        "attention_kwargs": None,
    }


def _omnigen(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    image = rows // 2 * columns // 2
    total = length + 1 + image  # prompt, one token of time, picture
    causal = torch.tril(torch.ones(1, total, total))
    causal[:, length + 1 :] = 1.0  # the picture's tokens see everything
    return {
        "hidden_states": draw.normal(1, 4, rows, columns),
        "timestep": draw.times(1, 1.0),
        "input_ids": draw.integers(64, 1, length),
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": causal,
        "position_ids": torch.arange(total)[None],
    }


def _ideogram4(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    padding, text, image = 2, length - 2, rows * columns
    positions = torch.zeros(1, length + image, 3, dtype=torch.int64)
    positions[:, padding:length] = torch.arange(text)[:, None]
    positions[:, length:] = grid_ids(rows, columns).long() + 65536  # far from the text's
    roles = torch.tensor([0] * padding + [3] * text + [2] * image)[None]
    return {
        "hidden_states": torch.cat([torch.zeros(1, length, 4), draw.normal(1, image, 4)], dim=1),
        "timestep": draw.times(1, 1.0),
        "encoder_hidden_states": draw.normal(1, length + image, 32),
        "position_ids": positions,
        "segment_ids": torch.where(roles > 0, 1, -1),
        "indicator": roles,
        "attention_kwargs": None,
    }


def _ernie(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(2, 4, rows, columns),
        "timestep": draw.times(2).clone(),  # its pipeline fills a new tensor
        "text_bth": draw.normal(2, length, 32),
        "text_lens": torch.tensor([length - 3, length]),
    }


def _krea2(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(1, rows * columns, 4),
        "encoder_hidden_states": draw.normal(1, length, 2, 32),
        "timestep": draw.times(1, 1.0),
        "position_ids": torch.cat([torch.zeros(length, 3), grid_ids(rows, columns)]),
        "encoder_attention_mask": mask(1, length, length - 2, torch.bool),
        "attention_kwargs": None,
    }


def _prx(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(2, 4, rows, columns),
        "timestep": draw.time(1.0).repeat(2),
        "encoder_hidden_states": draw.normal(2, length, 32),
        "attention_mask": mask(2, length, length - 2, torch.bool),
    }


def _qwen_image21(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    image_slots = rows * columns // 4
    slots = torch.cat([torch.zeros(1, length), torch.ones(1, image_slots)], dim=1).bool()
    return {
        "hidden_states": draw.normal(1, rows * columns, 4),
        "timestep": draw.times(1, 1.0),
        "encoder_hidden_states": draw.normal(1, length, 32),
        "encoder_hidden_states_mask": mask(1, length, length, torch.bool),
        "img_shapes": [[(1, rows, columns)]],
        "img_mask": slots,
        "attention_kwargs": {},
        "kv_cache": None,
        "kv_cache_mode": None,
    }


def _kandinsky5(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(1, 1, rows, columns, 4),
        "encoder_hidden_states": draw.normal(1, length, 32),
        "pooled_projections": draw.normal(1, 32),
        "timestep": draw.time().unsqueeze(0),
        "visual_rope_pos": [torch.arange(size) for size in (1, rows // 2, columns // 2)],
        "text_rope_pos": torch.arange(length),
        "scale_factor": [1.0, 1.0, 1.0],
        "sparse_params": None,
        "return_dict": True,
    }


def _nucleus(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(1, rows * columns, 16),
        "timestep": draw.times(1, 1.0),
        "encoder_hidden_states_mask": mask(1, length, length),
        "encoder_hidden_states": draw.normal(1, length, 32),
        "img_shapes": [(1, rows, columns)],
        "attention_kwargs": {},
    }


def _flux3(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    text = torch.zeros(length, 4)
    text[:, 3] = torch.arange(length)
    return {
        "hidden_states": draw.normal(1, rows * columns, 4),
        "encoder_hidden_states": draw.normal(1, length, 32),
        "timestep": draw.times(1, 1.0),
        "img_ids": grid_ids(rows, columns, axes=4),
        "txt_ids": text,
        "attention_kwargs": None,
    }


BRIA_FIBO = {**FLUX, "text_encoder_dim": 16}
BRIA_FIBO2 = {
    "in_channels": 4,
    "dim": 32,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "cap_feat_dim": 32,
    "injection_layer_ids": (1,),
    "perceiver_num_layers": 1,
    "min_num_gist_tokens": 2,
    "max_num_gist_tokens": 8,
    "gist_step": 2,
    "gist_min_text_len": 2,
    "gist_max_text_len": 16,
    "axes_dims": (4, 6, 6),
    "axes_lens": (64, 32, 32),
}
GLM_IMAGE = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "text_embed_dim": 32,
    "time_embed_dim": 32,
    "condition_dim": 8,
    "prior_vq_quantizer_codebook_size": 64,
}
LONGCAT = {**FLUX, "pooled_projection_dim": 32}
HIDREAM = {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "caption_channels": [32, 32],
    "text_emb_dim": 32,
    "axes_dims_rope": (8, 4, 4),
    "max_resolution": (16, 16),
    "llama_layers": [0, 1],
}
OMNIGEN = {
    "in_channels": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "num_layers": 2,
    "pad_token_id": 0,
    "vocab_size": 64,
    "time_step_dim": 32,
    "pos_embed_max_size": 16,
    "rope_scaling": {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8},
}
IDEOGRAM4 = {
    "in_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "adaln_dim": 32,
    "llm_features_dim": 32,
    "mrope_section": (4, 2, 2),
}
ERNIE = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_layers": 2,
    "ffn_hidden_size": 64,
    "in_channels": 4,
    "out_channels": 4,
    "text_in_dim": 32,
    "rope_axes_dim": (8, 4, 4),
}
KREA2 = {
    "in_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "timestep_embed_dim": 32,
    "text_hidden_dim": 32,
    "num_text_layers": 2,
    "text_num_attention_heads": 2,
    "text_num_key_value_heads": 2,
    "text_intermediate_size": 64,
    "num_layerwise_text_blocks": 1,
    "num_refiner_text_blocks": 1,
    "axes_dims_rope": (8, 4, 4),
}
PRX = {
    "in_channels": 4,
    "context_in_dim": 32,
    "hidden_size": 32,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 2,
    "axes_dim": [8, 8],
}
QWEN_IMAGE21 = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "context_in_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}
KANDINSKY5 = {
    "in_visual_dim": 4,
    "out_visual_dim": 4,
    "in_text_dim": 32,
    "in_text_dim2": 32,
    "time_dim": 32,
    "model_dim": 32,
    "ff_dim": 64,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (8, 4, 4),
}
NUCLEUS = {
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 6, 6),
    "dense_moe_strategy": "none",
    "num_experts": 4,
    "moe_intermediate_dim": 32,
    "capacity_factors": 2.0,
}

FLUX3 = {
    "in_channels": 4,
    "cond_in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "timestep_channels": 32,
    "axes_dims_rope": (4, 4, 4, 4),
}

MORE_IMAGE_FAMILIES: dict[str, Family] = {
    "bria_fibo": Family("BriaFiboTransformer2DModel", BRIA_FIBO, _bria_fibo),
    "bria_fibo2": Family("BriaFibo2Transformer2DModel", BRIA_FIBO2, _bria_fibo2),
    "glm_image": Family("GlmImageTransformer2DModel", GLM_IMAGE, _glm_image),
    # the stock pipeline always hands over a cache object, empty unless pictures are edited
    "glm_image_cached": Family("GlmImageTransformer2DModel", GLM_IMAGE, _glm_image_cached),
    "flux3": Family("Flux3Transformer2DModel", FLUX3, _flux3),
    "longcat": Family("LongCatImageTransformer2DModel", LONGCAT, _longcat),
    "ovis": Family("OvisImageTransformer2DModel", {**FLUX, "out_channels": 4}, _ovis),
    "hidream": Family("HiDreamImageTransformer2DModel", HIDREAM, _hidream, time="timesteps"),
    "omnigen": Family("OmniGenTransformer2DModel", OMNIGEN, _omnigen),
    "ideogram4": Family("Ideogram4Transformer2DModel", IDEOGRAM4, _ideogram4),
    "ernie": Family("ErnieImageTransformer2DModel", ERNIE, _ernie),
    "krea2": Family("Krea2Transformer2DModel", KREA2, _krea2),
    "prx": Family("PRXTransformer2DModel", PRX, _prx),
    "qwenimage21": Family("QwenImage21Transformer2DModel", QWEN_IMAGE21, _qwen_image21),
    "kandinsky5": Family("Kandinsky5Transformer3DModel", KANDINSKY5, _kandinsky5),
    "nucleus": Family("NucleusMoEImageTransformer2DModel", NUCLEUS, _nucleus),
}
