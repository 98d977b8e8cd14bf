"""Tiny UNets, for pictures, videos and classes, with the arguments their pipelines pass.

Knows each family's smallest sensible configuration and call. Norm groups are smaller than channels:
a group of one channel would cancel what the timestep adds to it.
"""

from __future__ import annotations

from typing import Any

import torch

from accel.pipelines.tiny_family import Draw, Family
from accel.pipelines.tiny_images import SIZES

FRAMES = 2  # latent frames of the video families


def unet(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    return {
        "sample": draw.normal(2, 4, rows, columns),
        "timestep": draw.step(),
        "encoder_hidden_states": draw.normal(2, 7, 32),
        "timestep_cond": None,
        "cross_attention_kwargs": None,
        "added_cond_kwargs": None,
    }


def sdxl(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    sizes = torch.tensor([[8.0 * rows, 8.0 * columns, 0.0, 0.0, 8.0 * rows, 8.0 * columns]])
    added = {"text_embeds": draw.normal(2, 32), "time_ids": sizes.repeat(2, 1)}
    return {**unet(draw, variant), "added_cond_kwargs": added}


def _svd(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    return {
        "sample": draw.normal(2, FRAMES, 8, rows, columns),
        "timestep": draw.time(),
        "encoder_hidden_states": draw.normal(2, 1, 32),
        "added_time_ids": torch.tensor([[6.0, 127.0, 0.02]]).repeat(2, 1),
    }


def animatediff(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    return {
        "sample": draw.normal(2, 4, FRAMES, rows, columns),
        "timestep": draw.step(),
        "encoder_hidden_states": draw.normal(2, 7, 32).repeat_interleave(FRAMES, dim=0),
        "cross_attention_kwargs": None,
        "added_cond_kwargs": None,
        "return_dict": True,
    }


def _text_to_video(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    return {
        "sample": draw.normal(2, 4, FRAMES, rows, columns),
        "timestep": draw.step(),
        "encoder_hidden_states": draw.normal(2, 7, 32),
        "cross_attention_kwargs": None,
    }


def _unconditional(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    return {"sample": draw.normal(1, 3, 2 * rows, 2 * columns), "timestep": draw.step()}


SD15 = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 4,
    "norm_num_groups": 8,
}
SDXL = {
    **SD15,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2),
    "attention_head_dim": (2, 4),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 80,
}
SVD = {
    "in_channels": 8,
    "out_channels": 4,
    "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
    "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
    "block_out_channels": (32, 64),  # its 32-group norms would hide the time in 32 channels
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 24,
    "layers_per_block": 1,
    "cross_attention_dim": 32,
    "num_attention_heads": (2, 4),
    "num_frames": FRAMES,
}
ANIMATEDIFF = {
    **{key: value for key, value in SD15.items() if key != "attention_head_dim"},
    "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
    "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
    "num_attention_heads": 2,
    "motion_num_attention_heads": 2,
    "motion_max_seq_length": 4,
}

TEXT_TO_VIDEO = {
    **{key: value for key, value in SD15.items() if key != "attention_head_dim"},
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    "attention_head_dim": 8,
}
UNCONDITIONAL = {
    "sample_size": 16,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "norm_num_groups": 8,
}
UNET_FAMILIES: dict[str, Family] = {
    "sd15": Family("UNet2DConditionModel", SD15, unet),
    "sdxl": Family("UNet2DConditionModel", SDXL, sdxl),
    "svd": Family("UNetSpatioTemporalConditionModel", SVD, _svd),
    "animatediff": Family("UNetMotionModel", ANIMATEDIFF, animatediff),
    "text_to_video": Family("UNet3DConditionModel", TEXT_TO_VIDEO, _text_to_video),
    "unconditional": Family("UNet2DModel", UNCONDITIONAL, _unconditional),
}
