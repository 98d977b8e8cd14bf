"""Tiny video denoisers, with the arguments their pipelines pass.

Knows each family's smallest sensible configuration and call. It does not know pipelines, and
nothing here is about speed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from accel.pipelines.random_weights import on_meta
from accel.pipelines.recipe import Part
from accel.pipelines.tiny_family import Draw, Family, mask
from accel.pipelines.tiny_images import LENGTHS, SIZES

FRAMES = 2  # latent frames


def _wan(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    return {
        "hidden_states": draw.normal(1, 4, FRAMES, rows, columns),
        "timestep": draw.times(1),
        "encoder_hidden_states": draw.normal(1, 12, 32),
        "attention_kwargs": None,
    }


def _wan_ti2v(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    tokens = FRAMES * rows // 2 * columns // 2
    return {**_wan(draw, variant), "timestep": draw.time().repeat(tokens)[None].expand(1, -1)}


def _wan_i2v(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    return {
        **_wan(draw, variant),
        "hidden_states": draw.normal(1, 12, FRAMES, rows, columns),
        # a prompt of exactly 512: the model splits there between image and text
        "encoder_hidden_states": draw.normal(1, 512, 32),
        "encoder_hidden_states_image": draw.normal(1, 5, 32),
    }


def _wan_vace(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    return {
        **_wan(draw, variant),
        "control_hidden_states": draw.normal(1, 8, FRAMES, rows, columns),
        "control_hidden_states_scale": torch.ones(1),
    }


def _ltx(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(2, FRAMES * rows * columns, 4),
        "encoder_hidden_states": draw.normal(2, length, 32),
        "timestep": draw.times(2),
        "encoder_attention_mask": mask(2, length, length - 2),
        "num_frames": FRAMES,
        "height": rows,
        "width": columns,
        "rope_interpolation_scale": (8 / 25, 32, 32),
        "attention_kwargs": None,
    }


@cache
def _ltx2_model() -> Any:
    return on_meta(Part("LTX2VideoTransformer3DModel", LTX2).make)  # for its tables of positions


def _ltx2(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length, sounds = SIZES[variant], LENGTHS[variant], 5 + variant
    model, time = _ltx2_model(), draw.times(2)
    text = mask(2, length, length)
    cpu = torch.device("cpu")
    video_at = model.rope.prepare_video_coords(2, FRAMES, rows, columns, cpu, fps=24.0)
    return {
        "hidden_states": draw.normal(2, FRAMES * rows * columns, 4),
        "audio_hidden_states": draw.normal(2, sounds, 4),
        "encoder_hidden_states": draw.normal(2, length, 32),
        "audio_encoder_hidden_states": draw.normal(2, length, 32),
        "timestep": time,
        "sigma": time,
        "encoder_attention_mask": text,
        "audio_encoder_attention_mask": text,
        "num_frames": FRAMES,
        "height": rows,
        "width": columns,
        "fps": 24.0,
        "audio_num_frames": sounds,
        "video_coords": video_at,
        "audio_coords": model.audio_rope.prepare_audio_coords(2, sounds, cpu),
        "isolate_modalities": False,
        "spatio_temporal_guidance_blocks": None,
        "perturbation_mask": None,
        "use_cross_timestep": True,
        "attention_kwargs": None,
    }


def _hunyuan_video(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(1, 4, FRAMES, rows, columns),
        "timestep": draw.times(1),
        "encoder_hidden_states": draw.normal(1, length, 32),
        "encoder_attention_mask": mask(1, length, length - 2),
        "pooled_projections": draw.normal(1, 32),
        "guidance": torch.tensor([6000.0]),
        "attention_kwargs": None,
    }


def _hunyuan_video15(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(1, 9, FRAMES, rows, columns),
        "image_embeds": torch.zeros(1, 3, 16),  # what a text-to-video call passes
        "timestep": draw.times(1),
        "attention_kwargs": None,
        "encoder_hidden_states": draw.normal(1, length, 32),
        "encoder_attention_mask": mask(1, length, length - 2),
        "encoder_hidden_states_2": draw.normal(1, length + 1, 16),
        "encoder_attention_mask_2": mask(1, length + 1, 4),
    }


def cogvideox(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    positions = FRAMES * rows // 2 * columns // 2
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * torch.linspace(1, 0.01, 16)
    return {
        "hidden_states": draw.normal(2, FRAMES, 4, rows, columns),
        "encoder_hidden_states": draw.normal(2, 8, 32),
        "timestep": draw.times(2),
        "image_rotary_emb": (angles.cos(), angles.sin()),
        "attention_kwargs": None,
    }


def _mochi(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(2, 4, FRAMES, rows, columns),
        "encoder_hidden_states": draw.normal(2, length, 32),
        "timestep": draw.times(2),
        "encoder_attention_mask": mask(2, length, length - 2, torch.bool),
        "attention_kwargs": None,
    }


def _latte(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(2, 4, FRAMES, rows, columns),
        "encoder_hidden_states": draw.normal(2, length, 32),
        "timestep": draw.times(2),
        "enable_temporal_attentions": True,
    }


def cosmos(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(1, 4, FRAMES, rows, columns),
        "timestep": draw.times(1),
        "encoder_hidden_states": draw.normal(1, length, 32),
        "fps": 30,
        "padding_mask": torch.zeros(1, 1, 8 * rows, 8 * columns),
    }


def _easyanimate(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(2, 4, FRAMES, rows, columns),
        "timestep": draw.times(2),
        "encoder_hidden_states": draw.normal(2, length, 32),
    }


def _sana_video(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(2, 4, FRAMES, rows, columns),
        "encoder_hidden_states": draw.normal(2, length, 32),
        "encoder_attention_mask": mask(2, length, length - 2),
        "timestep": draw.times(2),
        "attention_kwargs": None,
    }


def _motif(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "hidden_states": draw.normal(1, 9, FRAMES, rows, columns),
        "timestep": draw.times(1),
        "attention_kwargs": None,
        "encoder_hidden_states": draw.normal(1, length, 32),
        "encoder_attention_mask": mask(1, length, length - 2),
        "image_embeds": None,
    }


def _allegro(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    sizes = (FRAMES, rows // 2, columns // 2)
    at = torch.cartesian_prod(*(torch.arange(size) for size in sizes)).T.reshape(3, 1, -1)
    tables = []
    speeds = torch.tensor([1.0, 0.1, 0.01, 0.001])
    for size in sizes:
        half = torch.arange(size, dtype=torch.float32)[:, None] * speeds
        angles = torch.cat([half, half], dim=-1)
        tables.append((angles.cos(), angles.sin()))
    return {
        "hidden_states": draw.normal(2, 4, FRAMES, rows, columns),
        "encoder_hidden_states": draw.normal(2, length, 32),
        "encoder_attention_mask": mask(2, length, length - 2),
        "timestep": draw.times(2),
        "image_rotary_emb": (tuple(tables), tuple(at.contiguous())),
    }


SMALL = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
}
WAN = {
    **SMALL,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
WAN_I2V = {**WAN, "in_channels": 12, "image_dim": 32, "added_kv_proj_dim": 32}
WAN_VACE = {**WAN, "vace_layers": [0], "vace_in_channels": 8}
LTX = {
    **SMALL,
    "cross_attention_dim": 32,
    "num_layers": 2,
    "caption_channels": 32,
}
LTX2 = {
    **LTX,
    "audio_in_channels": 4,
    "audio_out_channels": 4,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 16,
    "audio_cross_attention_dim": 32,
}
HUNYUAN_VIDEO = {
    **SMALL,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "text_embed_dim": 32,
    "pooled_projection_dim": 32,
    "rope_axes_dim": (4, 6, 6),
}
HUNYUAN_VIDEO15 = {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 32,
    "text_embed_2_dim": 16,
    "image_embed_dim": 16,
    "rope_axes_dim": (4, 6, 6),
    "task_type": "t2v",
}
COGVIDEOX = {
    **SMALL,
    "time_embed_dim": 32,
    "text_embed_dim": 32,
    "num_layers": 2,
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 5,
    "max_text_seq_length": 8,
    "use_rotary_positional_embeddings": True,
}
MOCHI = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "pooled_projection_dim": 32,
    "in_channels": 4,
    "text_embed_dim": 32,
    "time_embed_dim": 32,
    "max_sequence_length": 16,
}
LATTE = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "cross_attention_dim": 32,
    "attention_bias": True,
    "sample_size": 8,
    "patch_size": 2,
    "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000,
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "caption_channels": 32,
    "video_length": FRAMES,
}
COSMOS = {
    **SMALL,
    "num_layers": 2,
    "text_embed_dim": 32,
    "adaln_lora_dim": 8,
    "max_size": (4, 16, 16),
    "concat_padding_mask": False,  # resizing it would need torchvision, which we do not
}
EASYANIMATE = {
    **SMALL,
    "patch_size": 2,
    "num_layers": 2,
    "mmdit_layers": 1,
    "time_embed_dim": 32,
    "text_embed_dim": 32,
}
SANA_VIDEO = {
    **SMALL,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": 32,
    "caption_channels": 32,
    "rope_max_seq_len": 32,
}
MOTIF = {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "text_embed_dim": 32,
    "rope_axes_dim": (4, 6, 6),
}
ALLEGRO = {
    "num_attention_heads": 2,
    "attention_head_dim": 24,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "cross_attention_dim": 48,
    "sample_height": 8,
    "sample_width": 8,
    "sample_frames": FRAMES,
    "caption_channels": 32,
}
VIDEO_FAMILIES: dict[str, Family] = {
    "wan": Family("WanTransformer3DModel", WAN, _wan),
    "wan_ti2v": Family("WanTransformer3DModel", WAN, _wan_ti2v),  # a timestep for every token
    "wan_i2v": Family("WanTransformer3DModel", WAN_I2V, _wan_i2v),
    "wan_vace": Family("WanVACETransformer3DModel", WAN_VACE, _wan_vace),
    "skyreels": Family("SkyReelsV2Transformer3DModel", WAN, _wan),
    "chronoedit": Family("ChronoEditTransformer3DModel", WAN_I2V, _wan_i2v),
    "ltx": Family("LTXVideoTransformer3DModel", LTX, _ltx),
    "ltx2": Family("LTX2VideoTransformer3DModel", LTX2, _ltx2),
    "hunyuan_video": Family("HunyuanVideoTransformer3DModel", HUNYUAN_VIDEO, _hunyuan_video),
    "hunyuan_video15": Family(
        "HunyuanVideo15Transformer3DModel", HUNYUAN_VIDEO15, _hunyuan_video15
    ),
    "cogvideox": Family("CogVideoXTransformer3DModel", COGVIDEOX, cogvideox),
    "mochi": Family("MochiTransformer3DModel", MOCHI, _mochi),
    "latte": Family("LatteTransformer3DModel", LATTE, _latte),
    "cosmos": Family("CosmosTransformer3DModel", COSMOS, cosmos),
    "easyanimate": Family("EasyAnimateTransformer3DModel", EASYANIMATE, _easyanimate),
    "sana_video": Family("SanaVideoTransformer3DModel", SANA_VIDEO, _sana_video),
    "motif": Family("MotifVideoTransformer3DModel", MOTIF, _motif),
    "allegro": Family("AllegroTransformer3DModel", ALLEGRO, _allegro),
}
