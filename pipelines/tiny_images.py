"""Tiny text-to-image transformers, with the arguments their pipelines pass.

Knows each family's smallest sensible configuration and call. It does not know pipelines (see
`tiny_recipes`), and nothing here is about speed.
"""

from __future__ import annotations

from typing import Any

import torch

from accel.pipelines.tiny_family import Draw, Family, grid_ids, mask

SIZES = ((8, 8), (8, 12))  # latent rows and columns of variants 0 and 1
LENGTHS = (7, 9)  # prompt tokens of variants 0 and 1


def flux(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(1, rows * columns, 4),
        "timestep": draw.times(1, 1.0),
        "guidance": torch.full([1], 3.5),
        "pooled_projections": draw.normal(1, 32),
        "encoder_hidden_states": draw.normal(1, length, 32),
        "txt_ids": torch.zeros(length, 3),
        "img_ids": grid_ids(rows, columns),
        "joint_attention_kwargs": {},
    }


def _flux2(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    text = torch.zeros(1, length, 4, dtype=torch.int64)
    text[..., 3] = torch.arange(length)
    return {
        "hidden_states": draw.normal(1, rows * columns, 4),
        "timestep": draw.times(1, 1.0),
        "guidance": torch.full([1], 4.0),
        "encoder_hidden_states": draw.normal(1, length, 32),
        "txt_ids": text,
        "img_ids": grid_ids(rows, columns, axes=4).long()[None],
        "joint_attention_kwargs": None,
    }


def qwen_image(draw: Draw, variant: int, real: int | None = None) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(1, rows * columns, 16),
        "timestep": draw.times(1, 1.0),
        "guidance": None,
        "encoder_hidden_states_mask": None if real is None else mask(1, length, real),
        "encoder_hidden_states": draw.normal(1, length, 32),
        "img_shapes": [[(1, rows, columns)]],
        "attention_kwargs": {},
    }


def _qwen_image_masked(draw: Draw, variant: int) -> dict[str, Any]:
    return qwen_image(draw, variant, real=LENGTHS[variant] - 2)


def _qwen_image_edit(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    call = qwen_image(draw, variant)
    call["hidden_states"] = draw.normal(1, rows * columns + 16, 16)
    call["img_shapes"] = [[(1, rows, columns), (1, 4, 4)]]
    return call


def z_image(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "x": [draw.normal(4, 1, rows, columns), draw.normal(4, 1, rows, columns)],
        "t": draw.times(2, 1.0),
        "cap_feats": [draw.normal(length, 32), draw.normal(length + 2, 32)],
        "joint_attention_kwargs": None,
    }


def sd3(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(2, 4, rows, columns),
        "timestep": draw.times(2),
        "encoder_hidden_states": draw.normal(2, length, 32),
        "pooled_projections": draw.normal(2, 32),
        "joint_attention_kwargs": None,
    }


def sana(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(2, 4, rows, columns),
        "encoder_hidden_states": draw.normal(2, length, 32),
        "encoder_attention_mask": mask(2, length, length - 2),
        "timestep": draw.times(2),
        "attention_kwargs": None,
    }


def _pixart(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(2, 4, rows, columns),
        "encoder_hidden_states": draw.normal(2, length, 32),
        "encoder_attention_mask": mask(2, length, length - 2),
        "timestep": draw.times(2),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def _auraflow(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(2, 4, rows, columns),
        "encoder_hidden_states": draw.normal(2, length, 32),
        "timestep": draw.times(2, 1.0),
        "attention_kwargs": None,
    }


def _lumina2(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(1, 4, rows, columns),
        "timestep": draw.times(1, 1.0),
        "encoder_hidden_states": draw.normal(1, length, 32),
        "encoder_attention_mask": mask(1, length, length - 2),
        "attention_kwargs": None,
    }


def _chroma(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    image = torch.ones(1, rows * columns)
    return {
        "hidden_states": draw.normal(1, rows * columns, 4),
        "timestep": draw.times(1, 1.0),
        "encoder_hidden_states": draw.normal(1, length, 32),
        "txt_ids": torch.zeros(length, 3),
        "img_ids": grid_ids(rows, columns),
        "attention_mask": torch.cat([mask(1, length, length - 2, torch.float32), image], dim=1),
        "joint_attention_kwargs": {},
    }


def _cogview4(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    size = torch.tensor([[8.0 * rows, 8.0 * columns]])
    return {
        "hidden_states": draw.normal(1, 4, rows, columns),
        "encoder_hidden_states": draw.normal(1, 16 * (variant + 1), 32),
        "timestep": draw.times(1),
        "original_size": size,
        "target_size": size.clone(),
        "crop_coords": torch.zeros(1, 2),
        "attention_kwargs": None,
    }


def _bria(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(2, rows * columns, 4),
        "timestep": draw.times(2),
        "encoder_hidden_states": draw.normal(2, length, 32),
        "txt_ids": torch.zeros(length, 3),
        "img_ids": grid_ids(rows, columns),
        "attention_kwargs": None,
    }


def _hunyuan_image(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(1, 4, rows, columns),
        "timestep": draw.times(1),
        "timestep_r": None,
        "guidance": None,
        "attention_kwargs": None,
        "encoder_hidden_states": draw.normal(1, length, 32),
        "encoder_attention_mask": mask(1, length, length - 2),
        "encoder_hidden_states_2": draw.normal(1, length + 1, 16),
        "encoder_attention_mask_2": mask(1, length + 1, 4),
    }


def _cogview3(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    size = torch.tensor([[8.0 * rows, 8.0 * columns]]).repeat(2, 1)
    return {
        "hidden_states": draw.normal(2, 4, rows, columns),
        "encoder_hidden_states": draw.normal(2, length, 32),
        "timestep": draw.times(2),
        "original_size": size,
        "target_size": size.clone(),
        "crop_coords": torch.zeros(2, 2),
    }


FLUX = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}
QWEN_IMAGE = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}
Z_IMAGE = {
    "in_channels": 4,
    "dim": 32,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 32,
    "axes_dims": (4, 6, 6),
    "axes_lens": (256, 32, 32),
}
SD3 = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 32,
    "pos_embed_max_size": 16,
    "dual_attention_layers": (0,),
    "qk_norm": "rms_norm",
}
SANA = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": 32,
    "caption_channels": 32,
    "sample_size": 8,
}
PIXART = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "cross_attention_dim": 32,
    "sample_size": 16,
    "caption_channels": 32,
    "use_additional_conditions": False,
}
AURAFLOW = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "num_mmdit_layers": 1,
    "num_single_dit_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "caption_projection_dim": 32,
    "pos_embed_max_size": 256,
}
LUMINA2 = {
    "sample_size": 8,
    "in_channels": 4,
    "hidden_size": 48,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 2,
    "num_kv_heads": 1,
    "multiple_of": 8,
    "axes_dim_rope": (8, 8, 8),
    "axes_lens": (64, 32, 32),
    "cap_feat_dim": 32,
}
CHROMA = {
    **FLUX,
    "approximator_num_channels": 16,
    "approximator_hidden_dim": 32,
    "approximator_layers": 1,
}
HUNYUAN_IMAGE = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "text_embed_dim": 32,
    "text_embed_2_dim": 16,
    "rope_axes_dim": (8, 8),
}
COGVIEW3 = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "text_embed_dim": 32,
    "time_embed_dim": 32,
    "condition_dim": 8,
    "pos_embed_max_size": 16,
    "sample_size": 8,
}
COGVIEW4 = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "text_embed_dim": 32,
    "time_embed_dim": 32,
    "condition_dim": 8,
    "pos_embed_max_size": 16,
    "sample_size": 8,
    "rope_axes_dim": (16, 16),
}
GUIDED_FLUX = {**FLUX, "pooled_projection_dim": 32, "guidance_embeds": True}
FLUX2 = {**FLUX, "timestep_guidance_channels": 32, "axes_dims_rope": (4, 4, 4, 4)}
BRIA = {**FLUX, "in_channels": 4, "axes_dims_rope": (4, 4, 8)}

IMAGE_FAMILIES: dict[str, Family] = {
    "flux": Family("FluxTransformer2DModel", GUIDED_FLUX, flux),
    "flux2": Family("Flux2Transformer2DModel", FLUX2, _flux2),
    "qwenimage": Family("QwenImageTransformer2DModel", QWEN_IMAGE, qwen_image),
    "qwenimage_masked": Family("QwenImageTransformer2DModel", QWEN_IMAGE, _qwen_image_masked),
    "qwenimage_edit": Family(
        "QwenImageTransformer2DModel", {**QWEN_IMAGE, "zero_cond_t": True}, _qwen_image_edit
    ),
    "zimage": Family("ZImageTransformer2DModel", Z_IMAGE, z_image, time="t"),
    "sd3": Family("SD3Transformer2DModel", SD3, sd3),
    "sana": Family("SanaTransformer2DModel", SANA, sana),
    "pixart": Family("PixArtTransformer2DModel", PIXART, _pixart),
    "auraflow": Family("AuraFlowTransformer2DModel", AURAFLOW, _auraflow),
    "lumina2": Family("Lumina2Transformer2DModel", LUMINA2, _lumina2),
    "chroma": Family("ChromaTransformer2DModel", CHROMA, _chroma),
    "cogview4": Family("CogView4Transformer2DModel", COGVIEW4, _cogview4),
    "hunyuan_image": Family("HunyuanImageTransformer2DModel", HUNYUAN_IMAGE, _hunyuan_image),
    "cogview3": Family("CogView3PlusTransformer2DModel", COGVIEW3, _cogview3),
    "bria": Family("BriaTransformer2DModel", BRIA, _bria),
}
