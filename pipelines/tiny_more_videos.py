"""More tiny video denoisers: with histories, references, faces, cameras, sound and caches.

Knows each family's smallest sensible configuration and call, like `tiny_videos`, whose sizes and
number of frames it shares.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from accel.pipelines.random_weights import on_meta
from accel.pipelines.recipe import Part
from accel.pipelines.tiny_family import Draw, Family, grid_ids, mask
from accel.pipelines.tiny_images import LENGTHS, SIZES
from accel.pipelines.tiny_videos import (
    COGVIDEOX,
    FRAMES,
    HUNYUAN_VIDEO,
    LTX2,
    SMALL,
    WAN,
    cogvideox,
)


def anyflow(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    time = draw.time().expand(2).unsqueeze(-1).repeat(1, FRAMES)
    return {
        "hidden_states": draw.normal(2, FRAMES, 4, rows, columns),
        "timestep": time,
        "r_timestep": time - 40,
        "encoder_hidden_states": draw.normal(2, length, 32),
        "attention_kwargs": None,
    }


def _consisid(draw: Draw, variant: int) -> dict[str, Any]:
    return {
        **cogvideox(draw, variant),
        "id_cond": draw.normal(2, 16),
        "id_vit_hidden": [draw.normal(2, 5, 32)],
    }


def _helios(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    frames = torch.arange(4 + 2 + 2 + FRAMES)[None]
    long, middle, short, now = frames.split([4, 2, 2, FRAMES], dim=1)
    return {
        "hidden_states": draw.normal(1, 4, FRAMES, rows, columns),
        "timestep": draw.times(1),
        "encoder_hidden_states": draw.normal(1, length, 32),
        "indices_hidden_states": now,
        "indices_latents_history_short": short,
        "indices_latents_history_mid": middle,
        "indices_latents_history_long": long,
        "latents_history_short": draw.normal(1, 4, 2, rows, columns),
        "latents_history_mid": draw.normal(1, 4, 2, rows, columns),
        "latents_history_long": draw.normal(1, 4, 4, rows, columns),
        "attention_kwargs": None,
    }


def _framepack(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    sizes = [1, FRAMES, 1, 2, 4]
    first, now, before, twice, far = torch.arange(sum(sizes)).split(sizes)
    return {
        "hidden_states": draw.normal(1, 4, FRAMES, rows, columns),
        "timestep": draw.times(1),
        "encoder_hidden_states": draw.normal(1, length, 32),
        "encoder_attention_mask": mask(1, length, length - 2),
        "pooled_projections": draw.normal(1, 32),
        "image_embeds": draw.normal(1, 3, 16),
        "indices_latents": now,
        "guidance": torch.tensor([6000.0]),
        "latents_clean": draw.normal(1, 4, 2, rows, columns),
        "indices_latents_clean": torch.cat([first, before]),
        "latents_history_2x": draw.normal(1, 4, 2, rows, columns),
        "indices_latents_history_2x": twice,
        "latents_history_4x": draw.normal(1, 4, 4, rows, columns),
        "indices_latents_history_4x": far,
        "attention_kwargs": None,
    }


def _kandinsky6(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(1, FRAMES, rows, columns, 9),
        "audio_hidden_states": draw.normal(1, 5 + variant, 4),
        "encoder_hidden_states": draw.normal(1, length, 32),
        "pooled_projections": draw.normal(1, 32),
        "timestep": draw.times(1),
        "visual_rope_pos": tuple(torch.arange(n) for n in (FRAMES, rows // 2, columns // 2)),
        "encoder_attention_mask": mask(1, length, length - 2).bool(),
        "visual_token_type_ids": None,
    }


def _minimax(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    video, sounds = rows // 2 * columns // 2, 5
    order = torch.arange(length + video + sounds)
    text_at, video_at, audio_at = order.split([length, video, sounds])
    ids = torch.zeros(len(order), 3, dtype=torch.int64)
    ids[text_at, 0] = text_at
    ids[video_at] = grid_ids(rows // 2, columns // 2).long() + length
    ids[audio_at, 0] = torch.arange(sounds) + length
    times = torch.stack([torch.tensor(0.0), draw.time(1.0)])
    return {
        "hidden_states": draw.normal(1, video, 16),
        "audio_hidden_states": draw.normal(1, sounds, 4),
        "encoder_hidden_states": draw.normal(1, length, 32),
        "timestep": times,
        "timestep_indices": (order >= length).long(),
        "token_tags": (order >= length).long() + (order >= length + video),
        "position_ids": ids,
        "video_indices": video_at,
        "audio_indices": audio_at,
        "text_indices": text_at,
        "attention_kwargs": None,
    }


def _cosmos3(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    across, down = columns // 2, rows // 2
    tokens = FRAMES * down * across
    video_at = torch.arange(tokens) + length
    ids = torch.arange(length).repeat(3, 1)
    places = torch.cartesian_prod(*(torch.arange(n) for n in (FRAMES, down, across))).T
    noisy = down * across  # tokens of a frame: the first is given
    return {
        "input_ids": draw.integers(64, length),
        "text_indexes": torch.arange(length),
        "position_ids": torch.cat([ids, places + length], dim=1),
        "und_len": length,
        "sequence_length": length + tokens,
        "vision_tokens": [draw.normal(1, 4, FRAMES, rows, columns)],
        "vision_token_shapes": [(FRAMES, down, across)],
        "vision_sequence_indexes": video_at,
        "vision_mse_loss_indexes": video_at[noisy:],
        "vision_timesteps": draw.time().repeat(tokens - noisy),
        "vision_noisy_frame_indexes": [torch.arange(1, FRAMES)],
    }


def _sana_wm(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    times = draw.time().expand(2, 1, FRAMES) * torch.tensor([0.0, 1.0])  # the first frame is given
    poses = torch.eye(4).repeat(2, FRAMES, 1, 1)
    poses[:, 1:, :3, 3] = 0.1
    lens = torch.tensor([1.0 * columns, 1.0 * columns, columns / 2, rows / 2]).repeat(2, FRAMES, 1)
    return {
        "hidden_states": draw.normal(2, 4, FRAMES, rows, columns),
        "timestep": times,
        "encoder_hidden_states": draw.normal(2, 1, length, 32),
        "data_info": {"img_hw": torch.tensor([[8.0 * rows, 8.0 * columns]])},
        "mask": mask(2, length, length - 2),
        "camera_conditions": torch.cat([poses.flatten(2), lens], dim=-1),
        "chunk_plucker": draw.normal(2, 6, FRAMES, rows, columns),
    }


@cache
def _refiner() -> Any:
    return on_meta(Part("SanaWMLTX2RefinerTransformer3DModel", LTX2).make)


def _sana_wm_refiner(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    tokens = FRAMES * rows * columns
    tables = _refiner().build_rotary_emb_for_absolute_positions(
        batch_size=1,
        frame_positions=list(range(FRAMES)),
        height=rows,
        width=columns,
        device=torch.device("cpu"),
        fps=24.0,
    )
    return {
        "hidden_states": draw.normal(1, tokens, 4),
        "encoder_hidden_states": draw.normal(1, length, 32),
        "timestep": draw.time().repeat(1, tokens),
        "video_rotary_emb": tables,
        "encoder_attention_mask": mask(1, length, length - 2),
        "kv_cache": None,
        "kv_cache_mode": None,
    }


def _sana_wm_refiner_cached(draw: Draw, variant: int) -> dict[str, Any]:
    from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache

    cached = {"kv_cache": SanaWMRefinerKVCache(2), "kv_cache_mode": "inject"}
    return {**_sana_wm_refiner(draw, variant), **cached}


def _wan_animate(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    return {
        "hidden_states": draw.normal(1, 12, 1 + FRAMES, rows, columns),
        "timestep": draw.times(1),
        "encoder_hidden_states": draw.normal(1, 512, 32),
        "encoder_hidden_states_image": draw.normal(1, 5, 32),
        "pose_hidden_states": draw.normal(1, 4, FRAMES, rows, columns),
        "face_pixel_values": draw.normal(1, 3, 4 * FRAMES, 16, 16),
        "motion_encode_batch_size": None,
        "attention_kwargs": None,
    }


def _wan_animate2(draw: Draw, variant: int) -> dict[str, Any]:
    """The pass that fills the cache from the driving video."""
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    rows, columns = SIZES[variant]
    grid = torch.tensor([[FRAMES, rows // 2, columns // 2]])
    return {
        "hidden_states": [draw.normal(4, FRAMES, rows, columns)],
        "timestep": draw.times(1),
        "encoder_hidden_states": [draw.normal(7, 32)],
        "encoder_hidden_states_image": draw.normal(1, 5, 1280),
        "condition_latents": [draw.normal(8, FRAMES, rows, columns)],
        "kv_cache": WanAnimate2KVCache(2),
        "kv_cache_mode": "extract",
        "seq_len": int(grid.prod()),
        "offset_grid_sizes": grid,
    }


CONSISID = {
    **COGVIDEOX,
    "num_attention_heads": 3,  # the face's width is two thirds of the whole
    "is_train_face": True,
    "cross_attn_dim_head": 16,
    "cross_attn_num_heads": 2,
    "LFE_id_dim": 16,
    "LFE_vit_dim": 32,
    "LFE_depth": 1,
    "LFE_dim_head": 16,
    "LFE_num_heads": 2,
    "LFE_num_id_token": 2,
    "LFE_num_querie": 3,
    "LFE_output_dim": 32,
    "LFE_ff_mult": 2,
    "LFE_num_scale": 1,
}
HELIOS = {
    **SMALL,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 2,
    "rope_dim": (4, 6, 6),
}
FRAMEPACK = {
    **HUNYUAN_VIDEO,
    "has_image_proj": True,
    "image_proj_dim": 16,
    "has_clean_x_embedder": True,
}
KANDINSKY6 = {
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
    "in_audio_dim": 4,
    "out_audio_dim": 4,
}
MINIMAX = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "hidden_size": 32,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "ffn_dim": 64,
    "in_channels": 4,
    "audio_in_channels": 4,
    "text_dim": 32,
    "freq_dim": 32,
    "time_embed_hidden_dim": 32,
    "time_embed_dim": 32,
    "rope_freq_dim": 2,
}
COSMOS3 = {
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "latent_channel": 4,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "patch_latent_dim": 16,
    "vocab_size": 64,
    "rope_axes_dim": (4, 2, 2),
}
SANA_WM = {
    "in_channels": 4,
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "softmax_every_n": 2,
    "linear_head_dim": 16,
    "chunk_plucker_channels": 6,
    "caption_channels": 32,
}
WAN_ANIMATE = {
    **WAN,
    "in_channels": 12,
    "latent_channels": 4,
    "image_dim": 32,
    "added_kv_proj_dim": 32,
    "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
    "motion_encoder_size": 16,
    "motion_style_dim": 8,
    "motion_dim": 4,
    "motion_encoder_dim": 16,
    "face_encoder_hidden_dim": 16,
    "face_encoder_num_heads": 2,
    "inject_face_latents_blocks": 2,
}
WAN_ANIMATE2 = {
    "in_dim": 12,
    "dim": 32,
    "text_len": 16,
    "ffn_dim": 64,
    "freq_dim": 32,
    "text_dim": 32,
    "out_dim": 4,
    "num_heads": 2,
    "num_layers": 2,
}
MORE_VIDEO_FAMILIES: dict[str, Family] = {
    "anyflow": Family("AnyFlowTransformer3DModel", WAN, anyflow),
    "consisid": Family("ConsisIDTransformer3DModel", CONSISID, _consisid),
    "helios": Family("HeliosTransformer3DModel", HELIOS, _helios),
    "framepack": Family("HunyuanVideoFramepackTransformer3DModel", FRAMEPACK, _framepack),
    "kandinsky6": Family("Kandinsky6Transformer3DModel", KANDINSKY6, _kandinsky6),
    "minimax": Family("MiniMaxH3Transformer3DModel", MINIMAX, _minimax),
    "cosmos3": Family("Cosmos3OmniTransformer", COSMOS3, _cosmos3, time="vision_timesteps"),
    "sana_wm": Family("SanaWMTransformer3DModel", SANA_WM, _sana_wm),
    "sana_wm_refiner": Family("SanaWMLTX2RefinerTransformer3DModel", LTX2, _sana_wm_refiner),
    "sana_wm_refiner_cached": Family(
        "SanaWMLTX2RefinerTransformer3DModel", LTX2, _sana_wm_refiner_cached
    ),
    "wan_animate": Family("WanAnimateTransformer3DModel", WAN_ANIMATE, _wan_animate),
    "wan_animate2": Family(  # the pass that fills the cache knows no time
        "WanAnimate2Transformer3DModel", WAN_ANIMATE2, _wan_animate2, time="hidden_states"
    ),
}
