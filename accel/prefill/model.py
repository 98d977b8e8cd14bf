"""What PrefillRunner knows of a model.

`patches/llm.py` puts a transformers causal LM behind this protocol; tests bring a plain module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from accel.prefill.attention import AttentionGroup

Attend = Callable[
    [AttentionGroup, "torch.Tensor | None", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]
"""Called once per layer, in the body's order, with (group, sinks, q, k, v), shaped as
`Attention.run` has them; returns `[rows, heads, value_dim]`."""


class PrefillModel(Protocol):
    """A decoder and its head. Methods are called by one thread at a time, without gradients."""

    name: str
    device: torch.device
    dtype: torch.dtype
    hidden_size: int
    position_limit: int | None
    """The longest prompt, prefix included, whose packing is right; None if any is."""
    ranks: int
    """Processes that hold a part of the model each, and make the same calls."""
    depth: int
    """Layers, one after the other: what rounding errors add up over."""
    horizon: int
    """The longest stretch of tokens after which attention may look different (a window, a chunk):
    the self-test goes beyond it. 0 if there is none."""
    stages: Sequence[nn.Module]
    """Modules that the hidden states `[..., tokens, hidden]` of all tokens go through one after the
    other, as their first tensor: the self-test looks between them. None are needed."""
    routes: bool
    """Whether tokens choose among experts: a rounding error can send one elsewhere."""
    module: nn.Module
    """Whose weights and structure graphs depend on."""

    @property
    def vocab_size(self) -> int:
        """How many token ids there are, now: embeddings can be resized."""

    def objection(self) -> str | None:
        """Why prompts must not be packed, known without trying; None if nothing is known."""

    def body(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states `[rows, hidden]`, as the head wants them, of packed `ids` and `positions`,
        both `[1, rows]` int64. Every layer's attention is done by `attend`."""

    def masked_body(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """The same for a model whose attention cannot be taken over: `mask`, `[1, 1, rows, rows]`
        boolean, says which keys a query sees. Raises `Unsupported` if it takes no such mask."""

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[n, vocab]` of hidden states `[n, hidden]`."""

    def own(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states `[n, hidden]` of one prompt, `[n]` int64, as the model itself, unpatched,
        computes them: what the self-test compares with, and what a declined model runs."""

    def capturing(self) -> AbstractContextManager[Any]:
        """Around every capture: modules that cannot be recorded are breaks meanwhile."""

    def state(self) -> object:
        """What, besides weights, captured work depends on. Graphs of another state are dropped."""

    def agree(self, fine: bool) -> bool:
        """Whether every rank that holds a part of the model says `fine`: a barrier, on the host
        alone. On one device: `fine`."""

    def generate_kwargs(
        self,
        prompts: Sequence[Sequence[int]],
        first_tokens: Sequence[int],
        keys_values: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]],
    ) -> dict[str, Any]:
        """What `model.generate` takes to go on behind `prompts` + `first_tokens`. `keys_values`
        are, prompt by prompt and layer by layer, keys and values `[tokens, kv_heads, dim]`."""
