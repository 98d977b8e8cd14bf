"""More tiny UNets, and the priors beside them, with the arguments their pipelines pass.

Knows each family's smallest sensible configuration and call, like `tiny_unets`, whose remark on
norm groups holds here, too.
"""

from __future__ import annotations

from typing import Any

import torch

from accel.pipelines.tiny_family import Draw, Family, mask
from accel.pipelines.tiny_images import LENGTHS, SIZES
from accel.pipelines.tiny_unets import FRAMES, SD15, unet


def _dreamlite(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    size = torch.tensor([[8.0 * rows, 8.0 * columns, 0.0, 0.0, 8.0 * rows, 8.0 * columns]])
    return {
        "sample": draw.normal(2, 4, rows, 2 * columns),  # the picture, and beside it the given one
        "timestep": draw.times(2),
        "encoder_hidden_states": draw.normal(2, length, 32),
        "encoder_attention_mask": mask(2, length, length - 2),
        "added_cond_kwargs": {"time_ids": size.repeat(2, 1)},
    }


def _i2vgen(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    return {
        "sample": draw.normal(2, 4, FRAMES, rows, columns),
        "timestep": draw.step(),
        "fps": torch.tensor([16, 16]),
        "image_latents": draw.normal(2, 4, FRAMES, rows, columns),
        "image_embeddings": draw.normal(2, 32),
        "encoder_hidden_states": draw.normal(2, 7, 32),
        "cross_attention_kwargs": None,
    }


def _kandinsky3(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "sample": draw.normal(2, 4, 2 * rows, 2 * columns),  # it is halved three times
        "timestep": draw.step(),
        "encoder_hidden_states": draw.normal(2, length, 32),
        "encoder_attention_mask": mask(2, length, length - 2),
    }


def _cascade_prior(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    return {
        "sample": draw.normal(2, 4, rows, columns),
        "timestep_ratio": draw.times(2, 1.0).clone(),  # its pipeline joins two halves
        "clip_text_pooled": draw.normal(2, 1, 16),
        "clip_text": draw.normal(2, length, 16),
        "clip_img": draw.normal(2, 1, 16),
    }


def _cascade_decoder(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    return {
        "sample": draw.normal(2, 4, 2 * rows, 2 * columns),
        "timestep_ratio": draw.times(2, 1.0).clone(),
        "clip_text_pooled": draw.normal(2, 1, 16),
        "effnet": draw.normal(2, 4, rows, columns),
    }


def _amused(draw: Draw, variant: int) -> dict[str, Any]:
    (rows, columns), length = SIZES[variant], LENGTHS[variant]
    tokens = draw.integers(30, 2, rows, columns)
    hidden = draw.normal(2, rows, columns) < draw.time(1.0)
    return {
        "input_ids": tokens.where(~hidden, 31),  # the fewer are masked, the further a picture is
        "encoder_hidden_states": draw.normal(2, length, 16),
        "pooled_text_emb": draw.normal(2, 16),
        "micro_conds": torch.tensor([[8.0 * columns, 8.0 * rows, 0.0, 0.0, 6.0]]).repeat(2, 1),
        "cross_attention_kwargs": None,
    }


def _controlnet_xs(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    call = unet(draw, variant)
    return {
        "sample": call["sample"],
        "timestep": call["timestep"],
        "encoder_hidden_states": call["encoder_hidden_states"],
        "controlnet_cond": draw.normal(2, 3, 8 * rows, 8 * columns),
        "conditioning_scale": 0.7,
        "cross_attention_kwargs": None,
        "apply_control": True,
        "return_dict": True,
    }


def _unidiffuser(draw: Draw, variant: int) -> dict[str, Any]:
    batch, time = 1 + variant, draw.step()
    return {
        "latent_image_embeds": draw.normal(batch, 4, 8, 8),
        "image_embeds": draw.normal(batch, 1, 16),
        "prompt_embeds": draw.normal(batch, 7, 16),
        "timestep_img": time,
        "timestep_text": time,
        "data_type": 1,
    }


def _prior(draw: Draw, variant: int) -> dict[str, Any]:
    batch = 2 + 2 * variant  # one or two pictures, each with and without the prompt
    return {
        "hidden_states": draw.normal(batch, 16),
        "timestep": draw.step(),
        "proj_embedding": draw.normal(batch, 16),
        "encoder_hidden_states": draw.normal(batch, 7, 16),
        "attention_mask": mask(batch, 7, 5).bool(),
        "return_dict": True,
    }


def _classes(draw: Draw, variant: int) -> dict[str, Any]:
    batch = 2 + 2 * variant
    return {
        "hidden_states": draw.normal(batch, 4, 8, 8),
        "timestep": draw.step().expand(batch),
        "class_labels": draw.integers(10, batch),
        "return_dict": True,
    }


DREAMLITE = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "down_block_types": (
        "DreamLiteCrossAttnNoSelfAttnDownBlock2D",
        "DreamLiteCrossAttnDownBlock2D",
    ),
    "up_block_types": ("DreamLiteCrossAttnUpBlock2D", "DreamLiteUpBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": (2, 4),
    "norm_num_groups": 8,
    "addition_embed_type": "time",
    "addition_time_embed_dim": 8,
    "use_linear_projection": True,
    "projection_class_embeddings_input_dim": 48,
    "ff_mult": 2,
}
I2VGEN = {
    **{key: value for key, value in SD15.items() if key != "attention_head_dim"},
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    "attention_head_dim": 8,
}
KANDINSKY3 = {
    "time_embedding_dim": 32,
    "groups": 4,
    "attention_head_dim": 8,
    "layers_per_block": 2,
    "block_out_channels": (16, 16, 32, 32),
    "cross_attention_dim": 16,
    "encoder_hid_dim": 32,
}
CASCADE_PRIOR = {
    "in_channels": 4,
    "out_channels": 4,
    "timestep_ratio_embedding_dim": 16,
    "conditioning_dim": 32,
    "block_out_channels": (32, 32),
    "num_attention_heads": (2, 2),
    "down_num_layers_per_block": (1, 1),
    "up_num_layers_per_block": (1, 1),
    "clip_text_in_channels": 16,
    "clip_text_pooled_in_channels": 16,
    "clip_image_in_channels": 16,
    "clip_seq": 2,
    "switch_level": (False,),
}
CASCADE_DECODER = {
    "in_channels": 4,
    "out_channels": 4,
    "timestep_ratio_embedding_dim": 16,
    "patch_size": 2,
    "conditioning_dim": 32,
    "block_out_channels": (16, 32),
    "num_attention_heads": (1, 2),
    "down_num_layers_per_block": (1, 1),
    "up_num_layers_per_block": (1, 1),
    "down_blocks_repeat_mappers": (1, 1),
    "up_blocks_repeat_mappers": (2, 2),
    "block_types_per_layer": (
        ("SDCascadeResBlock", "SDCascadeTimestepBlock"),
        ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
    ),
    "clip_text_pooled_in_channels": 16,
    "clip_seq": 2,
    "effnet_in_channels": 4,
    "pixel_mapper_in_channels": 3,
    "timestep_conditioning_type": ("sca",),
}
AMUSED = {
    "hidden_size": 32,
    "cond_embed_dim": 16,
    "micro_cond_encode_dim": 8,
    "micro_cond_embed_dim": 40,
    "encoder_hidden_size": 16,
    "vocab_size": 32,
    "codebook_size": 30,
    "in_channels": 16,
    "block_out_channels": 16,
    "num_res_blocks": 1,
    "block_num_heads": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
CONTROLNET_XS = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 32,
    "num_attention_heads": 4,
    "norm_num_groups": 8,
    "ctrl_conditioning_embedding_out_channels": (8, 8, 16, 16),
    "ctrl_block_out_channels": (8, 16),
    "ctrl_num_attention_heads": 2,
    "ctrl_max_norm_num_groups": 4,
}
UNIDIFFUSER = {
    "text_dim": 16,
    "clip_img_dim": 16,
    "num_text_tokens": 7,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "norm_num_groups": 8,
    "sample_size": 8,
    "patch_size": 2,
    "activation_fn": "gelu",
    "num_embeds_ada_norm": 1000,
    "use_timestep_embedding": True,
    "use_data_type_embedding": True,
}
PRIOR = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "embedding_dim": 16,
    "num_embeddings": 7,
}
DIT = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "norm_num_groups": 8,
    "sample_size": 8,
}

MORE_UNET_FAMILIES: dict[str, Family] = {
    "dreamlite": Family("DreamLiteUNetModel", DREAMLITE, _dreamlite),
    "i2vgen": Family("I2VGenXLUNet", I2VGEN, _i2vgen),
    "kandinsky3": Family("Kandinsky3UNet", KANDINSKY3, _kandinsky3),
    "cascade_prior": Family(
        "StableCascadeUNet", CASCADE_PRIOR, _cascade_prior, time="timestep_ratio"
    ),
    "cascade_decoder": Family(
        "StableCascadeUNet", CASCADE_DECODER, _cascade_decoder, time="timestep_ratio"
    ),
    "amused": Family("UVit2DModel", AMUSED, _amused, time="input_ids", takes_return_dict=False),
    "controlnet_xs": Family("UNetControlNetXSModel", CONTROLNET_XS, _controlnet_xs),
    "unidiffuser": Family(
        "UniDiffuserModel", UNIDIFFUSER, _unidiffuser, time="timestep_img", takes_return_dict=False
    ),
    "prior": Family("PriorTransformer", PRIOR, _prior),
    "dit": Family("DiTTransformer2DModel", DIT, _classes),
}
