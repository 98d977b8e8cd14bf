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


def batches_for(model: PrefillModel, max_tokens: int) -> list[list[list[int]]]:
    """Random prompts: short ones around one that goes beyond the model's horizon. If that does not
    fit, as long a one as there will ever be, alone, is a second batch."""
    limit = min(max_tokens, model.position_limit or max_tokens)
    wanted = max(LONG, model.horizon + TAIL)
    long = max(1, min(limit - sum(SHORT), wanted))
    lengths = [SHORT[0], long, *SHORT[1:]]
    if limit <= sum(SHORT):
        lengths = [max(1, limit - 1), 1][:limit]
    draw = torch.Generator(HOST).manual_seed(17)
    return [
        [part.tolist() for part in _ids(model.vocab_size, sum(some), draw).split(some)]
        for some in ([lengths] if long == wanted else [lengths, [limit]])
    ]


def _ids(vocabulary: int, count: int, draw: torch.Generator) -> torch.Tensor:
    return torch.randint(0, vocabulary, (count,), generator=draw, device=HOST)


def tolerance(model: PrefillModel) -> float:
    """The largest relative error that rounding explains: four units in the last place
    a layer, added up as independent errors are, but never what another prompt's tokens would do.
    (Two are too few: a two-layer mixture of experts in bf16 was seen at 2.0.)"""
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
    differ by more than rounding does, or None. Medians over tokens are judged: with experts,
    rounding alone sends some tokens elsewhere."""
    ids = [torch.tensor(prompt, device=model.device) for prompt in prompts]
    for i, ours in enumerate(packed(prompts)):
        own, allowed = model.own(ids[i]), tolerance(model)
        error = _typical(ours, own)
        if not error <= allowed:  # NaN is a mismatch, too
            return (
                f"self-test: {what}, a prompt of {len(own)} tokens differs from the model's own "
                f"attention by {error:.1e} (at most {allowed:.1e} is rounding)"
            )
    return None


def _typical(ours: torch.Tensor, own: torch.Tensor) -> float:
    """The relative error of hidden states, median over tokens: of all of them, or of the last third
    (`TAIL` at most) if that is more."""
    errors = _errors(ours, own)
    tail = errors[-min(TAIL, -(-len(errors) // 3)) :]
    return max(errors.median().item(), tail.median().item())


def _errors(ours: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Relative error of each token's hidden state, on the host."""
    difference: torch.Tensor = (ours.float() - own.float()).norm(dim=-1)
    # A prompt of padding tokens alone can be all zeros.
    relative: torch.Tensor = difference / own.float().norm(dim=-1).clamp(min=1e-30)
    return relative.cpu()
