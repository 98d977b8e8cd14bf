"""A two-layer decoder in plain torch behind the `PrefillModel` protocol, and its oddities."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from accel.graph import current_recording
from accel.prefill.attention import AttentionGroup, Unsupported
from accel.prefill.model import Attend

VOCAB, HIDDEN, HEADS, KV_HEADS, DIM = 61, 32, 4, 2, 8
POSITIONS = 512


class Layer(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.group = AttentionGroup(HEADS, KV_HEADS, DIM, DIM, DIM**-0.5, window)
        self.norm, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.o = nn.Linear(HIDDEN, HEADS * DIM), nn.Linear(HEADS * DIM, HIDDEN)
        self.k, self.v = (nn.Linear(HIDDEN, KV_HEADS * DIM) for _ in range(2))
        self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        """`x` is `[1, rows, hidden]`."""
        y = self.norm(x)[0]
        q, k, v = (proj(y).unflatten(-1, (-1, DIM)) for proj in (self.q, self.k, self.v))
        x = x + self.o(attend(self.group, None, q, k, v).flatten(1))[None]
        hidden: torch.Tensor = x + self.down(F.silu(self.up(self.norm2(x))))
        return hidden


class Decoder(nn.Module):
    """Token and position embeddings, layers, a head. Weights are drawn from a fixed seed."""

    def __init__(self, windows: Sequence[int | None]) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(POSITIONS, HIDDEN)
        self.layers = nn.ModuleList([Layer(window) for window in windows])
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states `[1, rows, hidden]`."""
        x = self.embed(ids) + self.place(positions)
        for layer in self.layers:
            x = layer(x, attend)
        hidden: torch.Tensor = self.norm(x)
        return hidden


class TinyModel:
    """`leak` adds to every token what the packed row before it holds; `chunk` cuts the model's own
    attention into chunks that no group tells of."""

    name = "tiny"
    dtype = torch.float32
    hidden_size, vocab_size = HIDDEN, VOCAB
    position_limit: int | None = POSITIONS
    ranks = 1
    routes = False

    def __init__(
        self,
        device: torch.device,
        windows: Sequence[int | None] = (None, 5),
        leak: bool = False,
        chunk: int | None = None,
    ) -> None:
        self.device, self.leak, self.chunk = device, leak, chunk
        self.depth = len(windows)
        self.horizon = max([chunk or 0, *(w or 0 for w in windows)])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.module = Decoder(windows).eval()
        self.module.to(device)
        self.stages = list(self.module.layers)
        self.bodies = 0
        self.fails_in_capture: type[Exception] | None = None
        self.setting = 0
        self.another_rank_fails = False
        self.verdicts: list[bool] = []

    def objection(self) -> str | None:
        return None

    def body(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        self.bodies += 1
        hidden: torch.Tensor = self.module(ids, positions, attend)
        if self.fails_in_capture is not None and current_recording() is not None:
            raise self.fails_in_capture("the capture was refused")
        return hidden + F.pad(hidden, (0, 0, 1, 0))[:, :-1] if self.leak else hidden

    def masked_body(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        raise Unsupported("takes no mask")

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.module.head(hidden)
        return logits

    def own(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(len(ids), device=ids.device)
        hidden: torch.Tensor = self.module(ids[None], positions[None], self._attend_alone)
        return hidden[0]

    def _attend_alone(
        self,
        group: AttentionGroup,
        sinks: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        place = torch.arange(len(q), device=q.device)
        behind = place[:, None] - place[None, :]
        seen = (behind >= 0) & (behind < (group.window or len(q)))
        if self.chunk is not None:
            seen &= (place // self.chunk)[:, None] == (place // self.chunk)[None, :]
        keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for x in (k, v))
        scores = q.transpose(0, 1) @ keys.transpose(1, 2) * group.scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return (weights @ values).transpose(0, 1)

    def capturing(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def state(self) -> object:
        return self.setting

    def agree(self, fine: bool) -> bool:
        self.verdicts.append(fine)
        return fine and not self.another_rank_fails

    def generate_kwargs(
        self,
        prompts: Sequence[Sequence[int]],
        first_tokens: Sequence[int],
        keys_values: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]],
    ) -> dict[str, Any]:
        return {"prompts": prompts, "first": first_tokens, "keys_values": keys_values}


def prompts_of(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Random prompts of these lengths."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=draw).tolist() for n in lengths]
