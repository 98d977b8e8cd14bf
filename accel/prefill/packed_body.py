"""The model's body over packed batches, eagerly: attention taken over, padding cleared.

Knows one forward pass: what happens to each layer's q, k and v. Graphs of it are captured in
captured.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from accel.prefill.attention import (
    Attention,
    AttentionBackend,
    AttentionGroup,
    AttentionLayer,
    Room,
    Unsupported,
)
from accel.prefill.batch import Batch, Request, pack
from accel.prefill.kv_cache import KVCache
from accel.prefill.model import PrefillModel
from accel.prefill.reference_attention import visible

Run = Callable[
    [int, "torch.Tensor | None", torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None
]
"""Attends for one layer: (index, sinks, q, k, v, out)."""


class Attending:
    """What a body calls once per layer: counts the layers and hands their tensors on."""

    def __init__(self, groups: Sequence[AttentionGroup], run: Run) -> None:
        self._groups, self._run = groups, run
        self.layers = 0

    def __call__(
        self,
        group: AttentionGroup,
        sinks: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        index, self.layers = self.layers, self.layers + 1
        if index >= len(self._groups) or self._groups[index] != group:
            raise Unsupported(
                f"layer {index} attends otherwise than when this runner was made: make another"
            )
        out = q.new_empty(q.shape[0], group.heads, group.value_dim)
        self._run(index, sinks, q, k, v, out)
        return out


class PackedBody:
    """Runs batches through a model's body with an attention backend of our choice.

    `groups` are the layers' attention groups in order; without any, the body takes a mask instead
    (`masked_body`). `live` is the batch that attention belongs to now; None while nothing is
    computed that could be attended to, or reach the cache.
    """

    def __init__(
        self,
        model: PrefillModel,
        groups: Sequence[AttentionGroup],
        backend: AttentionBackend,
        *,
        rows: int,
        slots: int,
        cache: KVCache | None = None,
        kv_bound: int = 0,
    ) -> None:
        self.model, self.groups, self.backend = model, tuple(groups), backend
        self.rows, self.slots, self.cache, self.kv_bound = rows, slots, cache, kv_bound
        self.live: Batch | None = None
        self.attention = backend.attention(self.room(rows)) if groups else None

    def room(self, rows: int, *, static: bool = False, paged: bool = False) -> Room:
        """What an `Attention` of this body has to serve."""
        kinds = tuple(dict.fromkeys(self.groups))
        device, bound = self.model.device, self.kv_bound if self.cache else rows
        return Room(device, kinds, rows, self.slots, bound, static, paged, self.cache)

    def pack(self, requests: Sequence[Request], rows: int) -> Batch:
        """A batch with device tensors of its own."""
        bound = self.kv_bound
        return pack(requests, rows, self.model.device, cache=self.cache, kv_bound=bound)

    def eager(self, batch: Batch) -> torch.Tensor:
        """Hidden states `[bucket, hidden]` of a batch, on the current stream."""
        if self.attention is None:
            return self.model.masked_body(batch.ids, batch.positions, packed_mask(batch))[0]
        self.plan(batch)
        attending = Attending(self.groups, self.attend)
        return self.model.body(batch.ids, batch.positions, attending)[0]

    def plan(self, batch: Batch) -> None:
        """Makes `batch` the one that `attend` belongs to."""
        assert self.attention is not None
        self.live = batch
        self.attention.plan(batch)

    def attend(
        self,
        index: int,
        sinks: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """One layer's attention for the live batch: what breaks and eager passes run."""
        batch, attention = self.live, self.attention
        if batch is None:
            return
        assert attention is not None
        real = batch.tokens
        if self.cache is not None:
            self.cache.write(index, k[:real], v[:real], batch.writes[:real])
        attention.run(AttentionLayer(index, self.groups[index], sinks), q, k, v, out)
        out[real:].zero_()

    def attend_in_graph(self, batch: Batch, attention: Attention, fewest: int) -> Run:
        """The same for a full graph: `batch` has sentinels, and every shape is the bucket's. Every
        batch that it runs has `fewest` tokens or more.

        Kernels leave rows behind the last token unwritten; what lay there may be NaN, so they are
        overwritten and not multiplied by zero. Only rows that may be such: over all of a large
        bucket that takes 2 % of a pass.
        """
        row = torch.arange(fewest, batch.bucket, device=self.model.device)
        padding = (row >= batch.device.q_indptr[-1])[:, None, None]

        def attend(
            index: int,
            sinks: torch.Tensor | None,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            out: torch.Tensor,
        ) -> None:
            if self.cache is not None:
                self.cache.write(index, k, v, batch.writes)
            attention.run(AttentionLayer(index, self.groups[index], sinks), q, k, v, out)
            out[fewest:].masked_fill_(padding, 0)

        return attend


def packed_mask(batch: Batch) -> torch.Tensor:
    """`[1, 1, bucket, bucket]` boolean: what each row sees, in a batch without prefixes. A row of
    padding sees itself: a softmax over nothing would be NaN.

    >>> packed_mask(pack([Request((1, 2))], 3, device))[0, 0].long().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    seen = visible(batch, batch.bucket, None)
    row = torch.arange(batch.bucket, device=seen.device)
    return (seen | (row[:, None] == row[None, :]))[None, None]
