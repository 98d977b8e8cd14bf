"""Tiny ControlNets, and denoisers called with what these give them.

Knows each class's smallest sensible configuration and call. A ControlNet of a class gets the
arguments of that class's tiny denoiser, a control image, and a scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accel.pipelines.recipe import Part, stock_class
from accel.pipelines.tiny_family import Draw, Family, several
from accel.pipelines.tiny_images import (
    GUIDED_FLUX,
    QWEN_IMAGE,
    SANA,
    SD3,
    SIZES,
    Z_IMAGE,
    flux,
    qwen_image,
    sana,
    sd3,
    z_image,
)
from accel.pipelines.tiny_unets import ANIMATEDIFF, FRAMES, SD15, SDXL, animatediff, sdxl, unet
from accel.pipelines.tiny_videos import COSMOS, cosmos

SCALE = 0.7


def _image(draw: Draw, variant: int, batch: int = 2) -> torch.Tensor:
    rows, columns = SIZES[variant]
    return draw.normal(batch, 3, 8 * rows, 8 * columns)


def _controlnet(draw: Draw, variant: int) -> dict[str, Any]:
    call = unet(draw, variant)
    for not_taken in ("cross_attention_kwargs", "timestep_cond"):
        del call[not_taken]
    image = _image(draw, variant)
    return {**call, "controlnet_cond": image, "conditioning_scale": SCALE, "guess_mode": False}


def _controlnet_guess(draw: Draw, variant: int) -> dict[str, Any]:
    return {**_controlnet(draw, variant), "guess_mode": True}


def _controlnet_sdxl(draw: Draw, variant: int) -> dict[str, Any]:
    added = sdxl(draw, variant)["added_cond_kwargs"]
    return {**_controlnet(draw, variant), "added_cond_kwargs": added}


def _two_controlnets(draw: Draw, variant: int) -> dict[str, Any]:
    call = _controlnet(draw, variant)
    call["controlnet_cond"] = [call["controlnet_cond"], _image(draw, variant)]
    return {**call, "conditioning_scale": [SCALE, 1.0]}


def _union(draw: Draw, variant: int) -> dict[str, Any]:
    call = _controlnet_sdxl(draw, variant)
    control_type = torch.zeros(2, 6)
    control_type[:, 1] = 1
    return {
        **call,
        "controlnet_cond": [call["controlnet_cond"]],
        "control_type": control_type,
        "control_type_idx": [1],
        "conditioning_scale": [SCALE],
    }


def _sparse(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    shown = torch.zeros(2, 1, FRAMES, rows, columns)
    shown[:, :, 0] = 1  # the picture of the first frame is given
    return {
        "sample": draw.normal(2, 4, FRAMES, rows, columns),
        "timestep": draw.step(),
        "encoder_hidden_states": draw.normal(2, 7, 32).repeat_interleave(FRAMES, dim=0),
        "controlnet_cond": draw.normal(2, 4, FRAMES, rows, columns) * shown,
        "conditioning_mask": shown,
        "conditioning_scale": SCALE,
        "guess_mode": False,
    }


def _controlnet_flux(draw: Draw, variant: int) -> dict[str, Any]:
    call = flux(draw, variant)
    image = draw.normal(*call["hidden_states"].shape)
    return {
        **call,
        "controlnet_cond": image,
        "controlnet_mode": torch.tensor([[1]]),
        "conditioning_scale": SCALE,
    }


def _two_controlnets_flux(draw: Draw, variant: int) -> dict[str, Any]:
    call = _controlnet_flux(draw, variant)
    image = call["controlnet_cond"]
    return {
        **call,
        "controlnet_cond": [image, draw.normal(*image.shape)],
        "controlnet_mode": [torch.tensor([1]), torch.tensor([0])],
        "conditioning_scale": [SCALE, 1.0],
    }


def _controlnet_sd3(draw: Draw, variant: int) -> dict[str, Any]:
    call = sd3(draw, variant)
    image = draw.normal(*call["hidden_states"].shape)
    return {**call, "controlnet_cond": image, "conditioning_scale": SCALE}


def _two_controlnets_sd3(draw: Draw, variant: int) -> dict[str, Any]:
    call = _controlnet_sd3(draw, variant)
    image = call["controlnet_cond"]
    images = [image, draw.normal(*image.shape)]
    return {**call, "controlnet_cond": images, "conditioning_scale": [SCALE, 1.0]}


def _controlnet_sana(draw: Draw, variant: int) -> dict[str, Any]:
    call = sana(draw, variant)
    image = draw.normal(*call["hidden_states"].shape)
    return {**call, "controlnet_cond": image, "conditioning_scale": SCALE}


def _controlnet_qwen(draw: Draw, variant: int) -> dict[str, Any]:
    call = qwen_image(draw, variant)
    del call["guidance"], call["attention_kwargs"]
    image = draw.normal(*call["hidden_states"].shape)
    return {**call, "controlnet_cond": image, "conditioning_scale": SCALE}


def _two_images_qwen(draw: Draw, variant: int) -> dict[str, Any]:
    call = _controlnet_qwen(draw, variant)
    image = call["controlnet_cond"]
    images = [image, draw.normal(*image.shape)]
    return {**call, "controlnet_cond": images, "conditioning_scale": [SCALE, 1.0]}


def _controlnet_z(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    call = z_image(draw, variant)
    del call["joint_attention_kwargs"]
    image = draw.normal(2, 6, 1, rows, columns)
    return {**call, "control_context": image, "conditioning_scale": SCALE}


def _unet_with_residuals(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    top, bottom = (rows, columns), (rows // 2, columns // 2)
    shapes = [(16, *top), (16, *top), (16, *bottom), (32, *bottom)]
    return {
        **unet(draw, variant),
        "down_block_additional_residuals": [draw.normal(2, *shape) for shape in shapes],
        "mid_block_additional_residual": draw.normal(2, 32, *bottom),
    }


def _motion_with_residuals(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    top, bottom = (rows, columns), (rows // 2, columns // 2)
    shapes = [(16, *top), (16, *top), (16, *bottom), (32, *bottom)]
    return {
        **animatediff(draw, variant),
        "down_block_additional_residuals": [draw.normal(2 * FRAMES, *shape) for shape in shapes],
        "mid_block_additional_residual": draw.normal(2 * FRAMES, 32, *bottom),
    }


def _cosmos_with_residuals(draw: Draw, variant: int) -> dict[str, Any]:
    call = cosmos(draw, variant)
    _, _, frames, rows, columns = call["hidden_states"].shape
    residual = draw.normal(1, frames * rows // 2 * columns // 2, 32)
    return {**call, "block_controlnet_hidden_states": [residual]}


def _flux_with_residuals(draw: Draw, variant: int) -> dict[str, Any]:
    call = flux(draw, variant)
    shape = (1, call["hidden_states"].shape[1], 32)
    return {
        **call,
        "controlnet_block_samples": [draw.normal(*shape)],
        "controlnet_single_block_samples": [draw.normal(*shape)],
        "controlnet_blocks_repeat": False,
    }


def _sd3_with_residuals(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    residual = draw.normal(2, rows // 2 * columns // 2, 32)
    return {**sd3(draw, variant), "block_controlnet_hidden_states": [residual]}


def _sana_with_residuals(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    residual = draw.normal(2, rows * columns, 32)
    return {**sana(draw, variant), "controlnet_block_samples": (residual,)}


def _qwen_with_residuals(draw: Draw, variant: int) -> dict[str, Any]:
    call = qwen_image(draw, variant)
    residual = draw.normal(1, call["hidden_states"].shape[1], 32)
    return {**call, "controlnet_block_samples": [residual]}


def _z_with_residuals(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    tokens = 32 * -(-(rows // 2 * columns // 2) // 32) + 32  # picture and prompt, each padded
    return {**z_image(draw, variant), "controlnet_block_samples": {0: draw.normal(2, tokens, 32)}}


def _z_controlnet() -> nn.Module:
    """It shares embeddings and refiners with a denoiser."""
    denoiser = Part("ZImageTransformer2DModel", Z_IMAGE).make()
    made = Part("ZImageControlNetModel", CONTROLNET_Z).make()
    shared: nn.Module = stock_class("ZImageControlNetModel").from_transformer(made, denoiser)
    return shared


CONTROLNET = {
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 4,
    "norm_num_groups": 8,
    "conditioning_embedding_out_channels": (8, 8, 16, 16),
}
_OF_A_UNET = {"sample_size", "up_block_types"}
CONTROLNET_SDXL = {
    **{key: value for key, value in SDXL.items() if key not in _OF_A_UNET},
    "conditioning_embedding_out_channels": (8, 8, 16, 16),
}
UNION = {**CONTROLNET_SDXL, "num_trans_channel": 16, "num_trans_head": 2, "num_proj_channel": 16}
SPARSE = {
    **{key: value for key, value in ANIMATEDIFF.items() if key not in _OF_A_UNET},
    "conditioning_channels": 4,
}
CONTROLNET_FLUX = {**GUIDED_FLUX, "num_layers": 1, "num_single_layers": 1, "num_mode": 2}
CONTROLNET_SD3 = {**SD3, "num_layers": 1}
CONTROLNET_SANA = {**SANA, "num_layers": 1}
CONTROLNET_QWEN = {**QWEN_IMAGE, "num_layers": 1}
CONTROLNET_Z = {
    "control_layers_places": [0],
    "control_refiner_layers_places": [0],
    "control_in_dim": 6,
    "add_control_noise_refiner": "control_noise_refiner",
    "dim": 32,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
}

CONTROLNET_FAMILIES: dict[str, Family] = {
    "controlnet": Family("ControlNetModel", CONTROLNET, _controlnet),
    "controlnet_guess": Family("ControlNetModel", CONTROLNET, _controlnet_guess),
    "controlnet_sdxl": Family("ControlNetModel", CONTROLNET_SDXL, _controlnet_sdxl),
    "controlnet_multi": several(
        "MultiControlNetModel", Part("ControlNetModel", CONTROLNET), _two_controlnets
    ),
    "controlnet_union": Family("ControlNetUnionModel", UNION, _union),
    "controlnet_sparse": Family("SparseControlNetModel", SPARSE, _sparse),
    "controlnet_flux": Family("FluxControlNetModel", CONTROLNET_FLUX, _controlnet_flux),
    "controlnet_flux_multi": several(
        "FluxMultiControlNetModel",
        Part("FluxControlNetModel", CONTROLNET_FLUX),
        _two_controlnets_flux,
    ),
    "controlnet_sd3": Family("SD3ControlNetModel", CONTROLNET_SD3, _controlnet_sd3),
    "controlnet_sd3_multi": several(
        "SD3MultiControlNetModel", Part("SD3ControlNetModel", CONTROLNET_SD3), _two_controlnets_sd3
    ),
    "controlnet_sana": Family("SanaControlNetModel", CONTROLNET_SANA, _controlnet_sana),
    "controlnet_qwenimage": Family("QwenImageControlNetModel", CONTROLNET_QWEN, _controlnet_qwen),
    "controlnet_qwenimage_multi": several(
        "QwenImageMultiControlNetModel",
        Part("QwenImageControlNetModel", CONTROLNET_QWEN),
        _two_images_qwen,
        count=1,
    ),
    "controlnet_zimage": Family(
        "ZImageControlNetModel",
        CONTROLNET_Z,
        _controlnet_z,
        time="t",
        build=_z_controlnet,
        takes_return_dict=False,
    ),
    "sd15_controlled": Family("UNet2DConditionModel", SD15, _unet_with_residuals),
    "animatediff_controlled": Family("UNetMotionModel", ANIMATEDIFF, _motion_with_residuals),
    "cosmos_controlled": Family(
        "CosmosTransformer3DModel",
        {**COSMOS, "controlnet_block_every_n": 2},
        _cosmos_with_residuals,
    ),
    "flux_controlled": Family("FluxTransformer2DModel", GUIDED_FLUX, _flux_with_residuals),
    "sd3_controlled": Family("SD3Transformer2DModel", SD3, _sd3_with_residuals),
    "sana_controlled": Family("SanaTransformer2DModel", SANA, _sana_with_residuals),
    "qwenimage_controlled": Family("QwenImageTransformer2DModel", QWEN_IMAGE, _qwen_with_residuals),
    "zimage_controlled": Family("ZImageTransformer2DModel", Z_IMAGE, _z_with_residuals, time="t"),
}
