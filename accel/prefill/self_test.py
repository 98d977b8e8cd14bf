"""The self-test: packed prompts against the model's own attention, prompt by prompt.

Knows one question: may this model's prompts be packed? Attention that lives in a mask only (chunks)
or layers that leak from one prompt into the next answer it with another result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from accel.prefill.model import PrefillModel
from accel.prefill.slots import HOST

SHORT = (7, 1, 3)
LONG = 96
TAIL = 32
"""Tokens beyond the model's horizon, and the stretch that is judged by itself."""


def prompts_for(model: PrefillModel, max_tokens: int) -> list[list[int]]:
    """Random ids: short prompts around one that goes beyond the model's horizon, if that fits."""
    limit = min(max_tokens, model.position_limit or max_tokens)
    long = max(1, min(limit - sum(SHORT), max(LONG, model.horizon + TAIL)))
    draw = torch.Generator(HOST).manual_seed(17)
    lengths = [SHORT[0], long, *SHORT[1:]] if limit > sum(SHORT) else [1] * min(limit, 2)
    shape = (sum(lengths),)
    ids = torch.randint(0, model.vocab_size, shape, generator=draw, device=HOST)
    return [part.tolist() for part in ids.split(lengths)]


def tolerance(model: PrefillModel) -> float:
    """The largest relative error that rounding explains: four units in the last place a layer,
    added up as independent errors are, but never what another prompt's tokens would do. (Two are
    too few: a two-layer mixture of experts in bf16 was seen at 2.0.)"""
    unit = torch.finfo(model.dtype).eps
    if model.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        unit = 2**-10
    return min(max(4 * unit * math.sqrt(model.depth), 1e-4), 0.15)


def mismatch(
    model: PrefillModel,
    prompts: Sequence[Sequence[int]],
    packed: Callable[[Sequence[Sequence[int]]], Sequence[torch.Tensor]],
    what: str,
) -> str | None:
    """Runs `prompts` through `packed` and one by one through the model itself. Says where they
    differ, or None. The median over tokens is judged: with experts, rounding alone sends some
    tokens elsewhere."""
    allowed = tolerance(model)
    for prompt, ours in zip(prompts, packed(prompts), strict=True):
        own = model.own(torch.tensor(prompt, device=model.device))
        errors = _errors(ours, own)
        worst = max(errors.median().item(), errors[-TAIL:].median().item())
        if not worst <= allowed:  # NaN is a mismatch, too
            return (
                f"self-test: {what}, a prompt of {len(prompt)} tokens differs from the model's own "
                f"attention by {worst:.1e} (at most {allowed:.1e} is rounding)"
            )
    return None


def _errors(ours: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Relative error of each token's hidden state, on the host."""
    difference: torch.Tensor = (ours.float() - own.float()).norm(dim=-1)
    # A prompt of padding tokens alone can be all zeros.
    relative: torch.Tensor = difference / own.float().norm(dim=-1).clamp(min=1e-30)
    return relative.cpu()
