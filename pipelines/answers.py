"""What a reading says about a text, as plain data: likely next tokens, or the text's own score.

This module knows tensors and tokens. Logarithms are natural; a perplexity is exp(-mean).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from accel.pipelines.language_loading import Speaker
    from accel.pipelines.texts import Text


def next_tokens(speaker: Speaker, text: Text, logits: Tensor, top: int) -> dict[str, Any]:
    """The `top` most likely tokens behind `text`, from the `logits` `[vocabulary]` of its last."""
    best = logits.float().log_softmax(-1).topk(min(top, len(logits)))
    return {
        "prompt": text.prompt,
        "tokens": len(text.ids),
        "next": [
            {"id": token, "token": _piece(speaker, [*text.ids, token]), "log_probability": value}
            for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ],
    }


def score(speaker: Speaker, text: Text, log_probabilities: Tensor) -> dict[str, Any]:
    """The log-probability of every token, which the first has none of, with their sum and mean;
    `log_probabilities` are `[tokens - 1]`. The mean of no token is None."""
    values: list[float] = log_probabilities.float().tolist()
    total = math.fsum(values)
    mean = total / len(values) if values else None
    pieces = zip(text.ids, speaker.pieces(text.ids), [None, *values], strict=True)
    return {
        "prompt": text.prompt,
        "tokens": len(text.ids),
        "scores": [{"id": i, "token": t, "log_probability": value} for i, t, value in pieces],
        "sum": total,
        "mean": mean,
        "perplexity": None if mean is None else math.exp(-mean),
    }


def difference(ours: Sequence[Tensor], own: Sequence[Tensor], *, scores: bool) -> dict[str, Any]:
    """How far two readings of the same texts are apart: the largest difference of a
    log-probability, and, of next tokens, how many texts have the same most likely one."""
    if scores:
        rows = zip(ours, own, strict=True)
        gaps = [(a - b.to(a.device)).abs().max().item() for a, b in rows if len(a)]
        return {"largest_log_probability": max(gaps, default=0.0)}
    one, other = ([row.float().log_softmax(-1) for row in rows] for rows in (ours, own))
    pairs = list(zip(one, other, strict=True))
    return {
        "largest_log_probability": max((a - b).abs().max().item() for a, b in pairs),
        "same_next_token": sum(bool(a.argmax() == b.argmax()) for a, b in pairs),
    }


def _piece(speaker: Speaker, ids: list[int]) -> str:
    return speaker.pieces(ids, start=len(ids) - 1)[0]
