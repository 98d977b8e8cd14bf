"""Random prompts. Knows token ids only: kernels run faster on zeros than on anything real."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Prompts = list[list[int]]


def random_prompts(lengths: Sequence[int], vocabulary: int, seed: int) -> Prompts:
    """One prompt for each length; the same seed gives the same ones."""
    draw = torch.Generator("cpu").manual_seed(seed)
    ids = torch.randint(0, vocabulary, (sum(lengths),), generator=draw, device="cpu")
    return [part.tolist() for part in ids.split(list(lengths))]
