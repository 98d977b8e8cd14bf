"""Scaled dot product attention as the CPU chooses it, so that its bits are the CPU's.

torch asks each device which fused kernel it wants, in C++; a device in Python has no answer there.
So the question is put to the CPU, and the operator that the CPU would run is called on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend

from tests.simulated.tensors import host_view, quiet

aten: Any = torch.ops.aten


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if isinstance(query, FakeTensor):  # torch.compile asks for shapes only
        return query.new_empty((*query.shape[:-1], value.shape[-1]))
    with quiet():
        mask = None if attn_mask is None else host_view(attn_mask)
        choice = torch._fused_sdp_choice(
            host_view(query),
            host_view(key),
            host_view(value),
            mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        shut = torch.full((), float("-inf"), dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, 0.0, shut)
    if choice == SDPBackend.FLASH_ATTENTION.value:
        out: Tensor = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
        return out
    result: tuple[Tensor, Tensor] = aten._scaled_dot_product_attention_math(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        None,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return result[0]
