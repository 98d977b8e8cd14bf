"""Tiny image transformers of two streams of text, of edited pictures and of discrete tokens.

Knows each family's smallest sensible configuration and call, like `tiny_images`, whose sizes and
prompt lengths it shares.
"""

from __future__ import annotations

from typing import Any

import torch

from accel.pipelines.recipe import Part
from accel.pipelines.tiny_family import Draw, Family, mask, several
from accel.pipelines.tiny_images import LENGTHS, SIZES

SKIPS = 1  # a tiny HunyuanDiT of four layers has one skip connection


def _hunyuan_dit(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    angles = torch.arange(rows // 2 * columns // 2, dtype=torch.float32)[:, None] * torch.linspace(
        1, 0.01, 16
    )
    size = torch.tensor([[8.0 * rows, 8.0 * columns, 8.0 * rows, 8.0 * columns, 0.0, 0.0]])
    return {
        "hidden_states": draw.normal(2, 4, rows, columns),
        "timestep": draw.time().repeat(2),
        "encoder_hidden_states": draw.normal(2, 7, 32),
        "text_embedding_mask": mask(2, 7, 5),
        "encoder_hidden_states_t5": draw.normal(2, 9, 16),
        "text_embedding_mask_t5": mask(2, 9, 6),
        "image_meta_size": size.repeat(2, 1),
        "style": torch.zeros(2, dtype=torch.int64),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


def _hunyuan_dit_controlled(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    tokens = rows // 2 * columns // 2
    residuals = [draw.normal(2, tokens, 32) for _ in range(SKIPS)]
    return {**_hunyuan_dit(draw, variant), "controlnet_block_samples": residuals}


def _hunyuan_dit_controlnet(draw: Draw, variant: int) -> dict[str, Any]:
    call = _hunyuan_dit(draw, variant)
    image = draw.normal(*call["hidden_states"].shape)
    return {**call, "controlnet_cond": image, "conditioning_scale": 0.7}


def _hunyuan_dit_two_controlnets(draw: Draw, variant: int) -> dict[str, Any]:
    call = _hunyuan_dit_controlnet(draw, variant)
    image = call["controlnet_cond"]
    images = [image, draw.normal(*image.shape)]
    return {**call, "controlnet_cond": images, "conditioning_scale": [0.7, 1.0]}


def _lumina(draw: Draw, variant: int) -> dict[str, Any]:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(2, 4, rows, columns),
        "timestep": draw.times(2, 1.0),
        "encoder_hidden_states": draw.normal(2, length, 32),
        "encoder_mask": mask(2, length, length - 2),
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(16, 16, 16),
        "cross_attention_kwargs": {},
    }


def _joyimage(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(1, 2, 4, 1, rows, columns),  # the given picture, then the new
        "timestep": draw.time().repeat(1),
        "encoder_hidden_states": draw.normal(1, length, 32),
    }


def _joyimage_plus(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    shapes = [(1, rows // 2, columns // 2), (1, 2, 2)]
    patches = sum(rows * columns for _, rows, columns in shapes)
    return {
        "hidden_states": draw.normal(2, patches, 4, 1, 2, 2),
        "timestep": draw.time().repeat(2),
        "encoder_hidden_states": draw.normal(2, length, 32),
        "encoder_hidden_states_mask": mask(2, length, length - 2),
        "shape_list": [shapes, shapes],
    }


def _vq_diffusion(draw: Draw, variant: int) -> dict[str, Any]:
    return {
        "hidden_states": draw.integers(31, 1 + variant, 64),
        "encoder_hidden_states": draw.normal(1 + variant, 7, 32),
        "timestep": draw.step(100),
        "return_dict": True,
    }


HUNYUAN_DIT = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "patch_size": 2,
    "sample_size": 8,
    "hidden_size": 32,
    "num_layers": 4,
    "mlp_ratio": 2.0,
    "cross_attention_dim": 32,
    "cross_attention_dim_t5": 16,
    "pooled_projection_dim": 16,
    "text_len": 7,
    "text_len_t5": 9,
}
HUNYUAN_DIT_CONTROLNET = {
    **{key: value for key, value in HUNYUAN_DIT.items() if key != "num_layers"},
    "transformer_num_layers": 4,
}
LUMINA = {
    "sample_size": 8,
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 2,
    "num_kv_heads": 1,
    "multiple_of": 16,
    "cross_attention_dim": 32,
}
JOYIMAGE = {
    "in_channels": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "text_dim": 32,
    "mlp_width_ratio": 2.0,
    "num_layers": 2,
    "rope_dim_list": [4, 6, 6],
}
VQ_DIFFUSION = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "cross_attention_dim": 32,
    "attention_bias": True,
    "sample_size": 8,
    "num_vector_embeds": 32,
    "activation_fn": "geglu-approximate",
    "num_embeds_ada_norm": 100,
}

OLDER_IMAGE_FAMILIES: dict[str, Family] = {
    "hunyuan_dit": Family("HunyuanDiT2DModel", HUNYUAN_DIT, _hunyuan_dit),
    "hunyuan_dit_controlled": Family("HunyuanDiT2DModel", HUNYUAN_DIT, _hunyuan_dit_controlled),
    "controlnet_hunyuan_dit": Family(
        "HunyuanDiT2DControlNetModel", HUNYUAN_DIT_CONTROLNET, _hunyuan_dit_controlnet
    ),
    "controlnet_hunyuan_dit_multi": several(
        "HunyuanDiT2DMultiControlNetModel",
        Part("HunyuanDiT2DControlNetModel", HUNYUAN_DIT_CONTROLNET),
        _hunyuan_dit_two_controlnets,
    ),
    "lumina": Family("LuminaNextDiT2DModel", LUMINA, _lumina),
    "joyimage": Family("JoyImageEditTransformer3DModel", JOYIMAGE, _joyimage),
    "joyimage_plus": Family("JoyImageEditPlusTransformer3DModel", JOYIMAGE, _joyimage_plus),
    "vq_diffusion": Family("Transformer2DModel", VQ_DIFFUSION, _vq_diffusion),
}
