"""Random prompts. Knows token ids only: kernels run faster on zeros than on anything real."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from accel.prefill.buckets import Ladder

Prompts = list[list[int]]


def random_prompts(lengths: Sequence[int], vocabulary: int, seed: int) -> Prompts:
    """One prompt for each length; the same seed gives the same ones."""
    draw = torch.Generator("cpu").manual_seed(seed)
    ids = torch.randint(0, vocabulary, (sum(lengths),), generator=draw, device="cpu")
    return [part.tolist() for part in ids.split(list(lengths))]


def one_token_aside(prompts: Prompts, ladder: Ladder) -> Prompts:
    """Prompts of the same bucket, the longest of them with one token less, or, where that would be
    another bucket, one more."""
    tokens, longest = (
        sum(map(len, prompts)),
        max(range(len(prompts)), key=lambda i: len(prompts[i])),
    )
    shorter = tokens > 1 and ladder.bucket(tokens - 1) == ladder.bucket(tokens)
    changed = prompts[longest][:-1] if shorter else [*prompts[longest], 1]
    return [changed if i == longest else prompt for i, prompt in enumerate(prompts)]
