"""Tiny denoisers with an image prompt's adapter, or called with what a T2I-Adapter gives them.

Knows how loading an IP-Adapter leaves a denoiser, and the arguments that its pipeline passes then.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from accel.pipelines.recipe import stock_class
from accel.pipelines.tiny_family import Draw, Family
from accel.pipelines.tiny_images import GUIDED_FLUX, SIZES, flux
from accel.pipelines.tiny_unets import SD15, unet

IMAGE, TOKENS = 24, 4
"""Width of a picture's embedding, and the number of tokens that an adapter makes of it."""


def _unet_with_adapter(draw: Draw, variant: int) -> dict[str, Any]:
    rows, columns = SIZES[variant]
    states = [draw.normal(2, 16, rows, columns), draw.normal(2, 32, rows // 2, columns // 2)]
    return {**unet(draw, variant), "down_intrablock_additional_residuals": states}


def _unet_with_image_prompt(draw: Draw, variant: int) -> dict[str, Any]:
    images = [draw.normal(2, 1 + variant, IMAGE)]
    return {**unet(draw, variant), "added_cond_kwargs": {"image_embeds": images}}


def _flux_with_image_prompt(draw: Draw, variant: int) -> dict[str, Any]:
    images = [draw.normal(1, 1, IMAGE)]
    return {**flux(draw, variant), "joint_attention_kwargs": {"ip_adapter_image_embeds": images}}


def _projection(width: int) -> nn.Module:
    from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection

    one = ImageProjection(
        image_embed_dim=IMAGE, cross_attention_dim=width, num_image_text_embeds=TOKENS
    )
    made: nn.Module = MultiIPAdapterImageProjection([one])
    return made


def _unet_and_adapter() -> nn.Module:
    from diffusers.models.attention_processor import AttnProcessor2_0, IPAdapterAttnProcessor2_0

    made: Any = stock_class("UNet2DConditionModel")(**SD15)
    processors: dict[str, Any] = {}
    for name, attention in made.named_modules():
        if name.endswith("attn1"):
            processors[f"{name}.processor"] = AttnProcessor2_0()
        elif name.endswith("attn2"):
            width = attention.to_q.out_features
            processors[f"{name}.processor"] = IPAdapterAttnProcessor2_0(width, 32, (TOKENS,))
    made.set_attn_processor(processors)
    made.encoder_hid_proj = _projection(32)
    made.config.encoder_hid_dim_type = "ip_image_proj"
    adapted: nn.Module = made
    return adapted


def _flux_and_adapter() -> nn.Module:
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    made: Any = stock_class("FluxTransformer2DModel")(**GUIDED_FLUX)
    for block in made.transformer_blocks:
        block.attn.set_processor(FluxIPAdapterAttnProcessor(32, 32, (TOKENS,)))
    made.encoder_hid_proj = _projection(32)
    adapted: nn.Module = made
    return adapted


ADAPTER_FAMILIES: dict[str, Family] = {
    "sd15_t2i_adapter": Family("UNet2DConditionModel", SD15, _unet_with_adapter),
    "sd15_ip_adapter": Family(
        "UNet2DConditionModel", SD15, _unet_with_image_prompt, build=_unet_and_adapter
    ),
    "flux_ip_adapter": Family(
        "FluxTransformer2DModel", GUIDED_FLUX, _flux_with_image_prompt, build=_flux_and_adapter
    ),
}
