"""Whether the modes of a runner compute the same bits at the same bucket."""

from __future__ import annotations

from typing import Any

import torch

from prefill_measures.prompts import Prompts
from prefill_measures.ways import TRANSFORMERS, Ways, own_logits


def sameness(ways: Ways, model: Any, prompts: Prompts) -> dict[str, Any]:
    """What the modes computed for one batch, against the first of them; and, for scale, how far
    transformers' logits are, which are of other matrix shapes."""
    first, *others = ways.runners
    expected = ways.runners[first](prompts)
    figures: dict[str, Any] = {"finite": bool(expected.logits.isfinite().all())}
    for name in others:
        got = ways.runners[name](prompts)
        pairs = [(expected.hidden(i), got.hidden(i)) for i in range(len(prompts))]
        pairs.append((expected.logits, got.logits))
        figures[f"{name} = {first}"] = all(torch.equal(a, b) for a, b in pairs)
        worst = max(_relative(a, b) for a, b in pairs)
        if not figures[f"{name} = {first}"]:
            figures[f"{name} from {first}, relative"] = worst
    own = own_logits(model, prompts)
    figures[f"{first} from {TRANSFORMERS}, relative"] = _relative(expected.logits, own)
    return figures


def all_the_same(figures: dict[str, Any]) -> bool:
    """Whether every comparison of modes came out equal, and finite."""
    return bool(figures["finite"]) and all(x for key, x in figures.items() if " = " in key)


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    difference = (ours.float() - theirs.float()).norm()
    return float(difference / theirs.float().norm().clamp(min=1e-30))
