"""The attention interface: what a layer's attention depends on, and what a backend has to do.

Knows shapes and numbers only. A backend is one file beside this one (`reference_attention.py`,
`torch_attention.py`, `flashinfer_attention.py`); `choice.py` decides between them.

The order of calls. Once per runner: `backend.objection(group, ...)` for every attention group, then
`backend.attention(room)`: one object for everything that runs eagerly or in breaks, and one more
for each full graph (`room.static`). Once per batch, outside of any graph: `attention.plan(batch)`,
on the stream that the batch runs on. Once per layer: `attention.run(layer, q, k, v, out)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from accel.prefill.batch import Batch
from accel.prefill.kv_cache import KVCache


@dataclass(frozen=True)
class AttentionGroup:
    """What a layer's attention depends on. Layers that agree in it share one plan per batch.

    All attention is causal. `window` is the number of tokens that a query sees, itself included
    (FlashInfer's and flash-attention's `window_left` is one less); `softcap` c turns a score s
    into c·tanh(s / c); `sinks` says that the softmax has one more term per head in its denominator,
    exp(sink), whose value is the layer's.

    >>> AttentionGroup(heads=4, kv_heads=2, head_dim=8, value_dim=8, scale=8**-0.5).window is None
    True
    """

    heads: int
    kv_heads: int
    head_dim: int
    """Of queries and keys."""
    value_dim: int
    """Of values and of the output; differs from `head_dim` in latent attention."""
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's attention: its place in the body, its group and its sinks `[heads]`, if any.

    >>> group = AttentionGroup(heads=4, kv_heads=2, head_dim=8, value_dim=8, scale=1.0)
    >>> AttentionLayer(0, group).sinks is None
    True
    """

    index: int
    group: AttentionGroup
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class Room:
    """What one `Attention` is going to serve.

    `static` is for a full graph: `run` is captured once and replayed, so every device tensor that
    it reads keeps its address, and every host number that it hands to a kernel holds for all later
    batches: `rows` for the longest query, `kv_bound` for the longest key sequence and for the sum
    of them. The first plan is the largest (`batch.tokens == rows`; paged: all keys of `kv_bound`
    lie in the cache's dummy page). Later ones have the same `rows` and `slots`.

    Not static: every batch brings its own number of rows and slots.
    """

    device: torch.device
    groups: tuple[AttentionGroup, ...]
    rows: int
    """The largest bucket; of a static one the only bucket."""
    slots: int
    """Entries of per-request tensors in a static room; elsewhere a hint."""
    kv_bound: int
    """Rows of keys over all requests that a paged batch may have at most."""
    static: bool = False
    paged: bool = False
    """Static only: whether keys and values come from the cache's pages (then in every batch), or
    from `k` and `v` (then no batch has a prefix). Elsewhere `batch.paged` tells, batch by batch."""
    cache: KVCache | None = None


class Attention(Protocol):
    """Plans batches and attends. Used by one thread at a time, on one stream after the other."""

    def plan(self, batch: Batch) -> None:
        """Prepares the groups' kernels for `batch`: called once per batch, outside of any graph,
        before the batch's first `run`. May be called again before the device is done with the batch
        before: whoever fills a pinned buffer waits for its event first."""

    def run(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Writes the attention of the planned batch to `out`, `[rows, heads, value_dim]`.

        `q` is `[rows, heads, head_dim]`, `k` `[rows, kv_heads, head_dim]`, `v` `[rows, kv_heads,
        value_dim]`: always `batch.bucket` rows, the last `bucket - tokens` of them padding; the
        last dimension has stride 1, the others any. A kernel that wants exactly as many rows as
        there are tokens slices where the room is not static. In a paged batch the keys of this
        batch are in the cache already (`room.cache.keys(layer.index)`, `.values(...)`), and `k`
        and `v` are to be ignored. Rows of `out` behind the last token may be left as they are,
        even NaN: the runner clears them."""

    @property
    def workspace_bytes(self) -> int:
        """Device memory that this object holds, in bytes."""


class AttentionBackend(Protocol):
    """Makes `Attention` objects, and says what it cannot do."""

    name: str

    def objection(self, group: AttentionGroup, *, static: bool, paged: bool) -> str | None:
        """Why this backend cannot attend for `group`, in words ("no soft-cap"), or None. `static`
        and `paged` as in `Room`; a reason may hold for these only."""

    def preparation(self, group: AttentionGroup) -> str | None:
        """What has to happen before the first `run`, in words ("compiles a kernel, about 90 s"), or
        None if nothing does. "auto" passes over a backend that needs preparing."""

    def attention(self, room: Room) -> Attention:
        """A new object for `room`. Raises `Unsupported` where `objection` would speak."""


class Unsupported(ValueError):
    """A backend cannot do what was asked, for the reason given.

    >>> raise Unsupported("torch: no soft-cap")
    Traceback (most recent call last):
    accel.prefill.attention.Unsupported: torch: no soft-cap
    """
