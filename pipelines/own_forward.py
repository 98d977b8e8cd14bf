"""What the model's own forward says of a batch of texts: the other side of a comparison.

One forward for the whole batch, as transformers is usually called: padded on the left, so that
every text ends in the last column, with a mask where anything is padded. Logarithms are natural.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@torch.inference_mode()
def last_logits(model: Any, ids: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """The logits behind every text's last token, `[texts, vocabulary]`."""
    known = inspect.signature(model.forward).parameters
    options = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
    return _forward(model, ids, device, **options)[:, -1]


@torch.inference_mode()
def scores(model: Any, ids: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Of every text the log-probability of each token but the first, `[tokens - 1]` in float32."""
    logits = _forward(model, ids, device)
    return [
        _scored(row[len(row) - len(text) :], text) for row, text in zip(logits, ids, strict=True)
    ]


def _scored(logits: Tensor, text: Sequence[int]) -> Tensor:
    said = logits[:-1].float().log_softmax(-1)
    told = torch.tensor(text[1:], device=logits.device)
    return said.gather(-1, told[:, None])[:, 0]


def _forward(
    model: Any, ids: Sequence[Sequence[int]], device: torch.device, **options: Any
) -> Tensor:
    longest = max(map(len, ids))
    blank = [longest - len(text) for text in ids]
    rows = [[0] * pad + list(text) for pad, text in zip(blank, ids, strict=True)]
    given: dict[str, Any] = {"input_ids": torch.tensor(rows, device=device), **options}
    if any(blank):
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in blank], device=device)
        # Without positions of its own the padding would be counted in.
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        given["attention_mask"] = mask
    logits: Tensor = model(**given, use_cache=False).logits
    return logits
