"""Kernels that torch has no single op for, or a slower one, written in Triton: rotary embeddings,
gated units, RMS norms.

Knows addresses, strides and arithmetic, all in float32 and rounded once; of tensors without memory,
shapes. Importing it needs Triton; whether that is there, and works, kernels.py finds out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from accel.patches.launches import launch

WIDTH = 1024
"""Elements of a row that one program of `gate` computes."""
MOST_HEADS = 8
"""Heads that one program of `turn` turns at most."""
HELD = 2048
"""Elements that one program of `norm` holds of several narrow rows; wide ones have a warp for every
512."""


def turn(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`q` and `k`, `[1, heads, tokens, dim]`, turned by `[1, tokens, dim]` (as rotary.turned), in
    one launch. Last dimensions are contiguous."""
    heads, block = (q.shape[1], k.shape[1]), MOST_HEADS
    while heads[0] % block or heads[1] % block:
        block //= 2
    outs = torch.empty_like(q), torch.empty_like(k)
    if q.is_meta:
        return outs
    half = q.shape[-1] // 2
    steps = (step for x in (q, k, *outs) for step in (x.stride(2), x.stride(1)))
    shape = {"HALF": half, "PADDED": triton.next_power_of_2(half), "HEADS": block}
    numbers = heads[0] // block, *steps, cos.stride(1), sin.stride(1)
    launch(_turn, (q.shape[2], sum(heads) // block), (q, k, cos, sin, *outs, *numbers), shape)
    return outs


def gate(
    gated: torch.Tensor, by: torch.Tensor, tanh: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`activation(gated) * by` of `[..., width]`, contiguous: SiLU, or GELU in its form with a
    hyperbolic tangent. In `out`, if given, which may be `gated`."""
    out = torch.empty_like(gated) if out is None else out
    if out.is_meta:
        return out
    count = out.numel()
    shape = {"TANH": tanh, "WIDTH": WIDTH}
    launch(_gate, (triton.cdiv(count, WIDTH), 1), (gated, by, out, count), shape)
    return out


def norm(
    rows: torch.Tensor, weight: torch.Tensor, epsilon: float, zero_centred: bool
) -> torch.Tensor:
    """`rows`, `[..., size]`, contiguous, over the root of their mean square plus `epsilon`, times
    `weight`, `[size]`, or times one more than that."""
    out = torch.empty_like(rows)
    if out.is_meta or not out.numel():
        return out
    size = len(weight)
    padded = triton.next_power_of_2(size)
    together = max(HELD // padded, 1)
    shape = {"ZERO_CENTRED": zero_centred, "SIZE": size, "PADDED": padded, "ROWS": together}
    count = out.numel() // size
    grid = triton.cdiv(count, together), 1
    launch(_norm, grid, (rows, weight, out, count, epsilon), shape, max(padded // 512, 4))
    return out


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _turn(  # type: ignore[no-untyped-def]
    q,
    k,
    cos,
    sin,
    out_q,
    out_k,
    q_blocks,
    q_token,
    q_head,
    k_token,
    k_head,
    out_q_token,
    out_q_head,
    out_k_token,
    out_k_head,
    cos_token,
    sin_token,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One token, some heads of either tensor."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    cos += token * cos_token
    sin += token * sin_token
    if block < q_blocks:
        x = q + token * q_token + block * HEADS * q_head
        y = out_q + token * out_q_token + block * HEADS * out_q_head
        _turn_heads(x, y, cos, sin, q_head, out_q_head, HALF, PADDED, HEADS)
    else:
        first = (block - q_blocks) * HEADS
        x = k + token * k_token + first * k_head
        y = out_k + token * out_k_token + first * out_k_head
        _turn_heads(x, y, cos, sin, k_head, out_k_head, HALF, PADDED, HEADS)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _turn_heads(  # type: ignore[no-untyped-def]
    x,
    y,
    cos,
    sin,
    x_head,
    y_head,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
):
    head, place = tl.arange(0, HEADS)[:, None], tl.arange(0, PADDED)[None, :]
    there = place < HALF
    x += head * x_head + place
    y += head * y_head + place
    low = tl.load(x, mask=there, other=0).to(tl.float32)
    high = tl.load(x + HALF, mask=there, other=0).to(tl.float32)
    cos_low = tl.load(cos + place, mask=there, other=0).to(tl.float32)
    cos_high = tl.load(cos + HALF + place, mask=there, other=0).to(tl.float32)
    sin_low = tl.load(sin + place, mask=there, other=0).to(tl.float32)
    sin_high = tl.load(sin + HALF + place, mask=there, other=0).to(tl.float32)
    tl.store(y, low * cos_low - high * sin_low, mask=there)
    tl.store(y + HALF, high * cos_high + low * sin_high, mask=there)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _gate(  # type: ignore[no-untyped-def]
    gated, by, out, count, TANH: tl.constexpr, WIDTH: tl.constexpr
):
    """Both activations are x times a sigmoid: (1 + tanh z) / 2 is the sigmoid of 2 z."""
    place = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    there = place < count
    x = tl.load(gated + place, mask=there, other=0).to(tl.float32)
    factor = tl.load(by + place, mask=there, other=0).to(tl.float32)
    z = x
    if TANH:
        z = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 sqrt(2 / pi)
    tl.store(out + place, x / (1 + tl.exp(-z)) * factor, mask=there)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _norm(  # type: ignore[no-untyped-def]
    rows,
    weight,
    out,
    count,
    epsilon,
    ZERO_CENTRED: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A few whole rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    there = (row < count) & (column < SIZE)
    x = tl.load(rows + row * SIZE + column, mask=there, other=0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < SIZE, other=0).to(tl.float32)
    if ZERO_CENTRED:
        scale += 1
    mean = tl.sum(x * x, axis=1)[:, None] / SIZE
    tl.store(out + row * SIZE + column, x * tl.rsqrt(mean + epsilon) * scale, mask=there)
