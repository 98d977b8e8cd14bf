"""What every attention backend is put through: ragged batches, prefixes, sentinels, all groups.

`Trial` packs random prompts, has a backend attend, and compares with one dense attention per
prompt, written out here in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from accel.prefill.attention import AttentionBackend, AttentionGroup, AttentionLayer, Room
from accel.prefill.batch import Batch, Request, pack
from accel.prefill.kv_cache import KVCache

PLAIN = AttentionGroup(heads=4, kv_heads=2, head_dim=16, value_dim=16, scale=0.25)
RAGGED = [
    [(5, 0)],
    [(1, 0), (17, 0), (3, 0)],
    [(30, 0), (1, 0), (1, 0), (32, 0)],
    [(64, 0)],
]
"""(new tokens, cached tokens), request by request; 64 rows in all at most."""
WITH_PREFIX = [
    [(3, 13)],
    [(5, 16), (1, 47), (20, 0)],
    [(31, 33), (33, 1)],
]
KV_BOUND = 160


@dataclass
class Trial:
    """One batch of random queries, keys and values, and a backend that attends."""

    backend: AttentionBackend
    group: AttentionGroup
    device: torch.device
    bucket: int = 64
    slots: int | None = None
    static: bool = False

    def run(self, requests: Sequence[tuple[int, int]], paged: bool = False) -> float:
        """The largest difference from attention prompt by prompt, over all real rows."""
        group, device = self.group, self.device
        draw = torch.Generator().manual_seed(sum(n + 3 * p for n, p in requests))
        sinks = torch.randn(group.heads, generator=draw) if group.sinks else None
        cache = self._cache()
        batch = self._pack(requests, cache, paged)
        q = self._random(draw, self.bucket, group.heads, group.head_dim)
        whole = [
            (
                self._random(draw, n + p, group.kv_heads, group.head_dim),
                self._random(draw, n + p, group.kv_heads, group.value_dim),
            )
            for n, p in requests
        ]
        k, v = (torch.zeros(self.bucket, *part.shape[1:], dtype=group.dtype) for part in whole[0])
        expected, start = [], 0
        for request, (keys, values) in zip(batch.requests, whole, strict=True):
            rows = slice(start, start + request.length)
            k[rows], v[rows] = keys[request.prefix :], values[request.prefix :]
            places = cache.places(request.pages, request.prefix + request.length)
            cache.write(0, keys.to(device), values.to(device), places.to(device))
            expected.append(one_prompt(group, q[rows], keys, values, sinks))
            start = rows.stop
        layer = AttentionLayer(0, group, None if sinks is None else sinks.to(device))
        got = self._attend(batch, cache, layer, *(x.to(device) for x in (q, k, v)))
        return float((got[:start].double() - torch.cat(expected)).abs().max())

    def _cache(self) -> KVCache:
        shape = self.group.kv_heads, self.group.head_dim, self.group.value_dim
        return KVCache([shape], KV_BOUND, self.group.dtype, self.device)

    def _random(self, draw: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(self.group.dtype)

    def _pack(self, requests: Sequence[tuple[int, int]], cache: KVCache, paged: bool) -> Batch:
        return pack(
            [Request((1,) * n, p, cache.take(-(-(n + p) // cache.page_size))) for n, p in requests],
            self.bucket,
            self.device,
            slots=self.slots,
            cache=cache,
            paged=paged,
            kv_bound=KV_BOUND,
        )

    def _attend(
        self,
        batch: Batch,
        cache: KVCache,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        room = Room(
            self.device,
            (self.group,),
            rows=self.bucket,
            slots=batch.slots,
            kv_bound=KV_BOUND,
            static=self.static,
            paged=batch.paged,
            cache=cache,
        )
        attention = self.backend.attention(room)
        attention.plan(batch)
        out = q.new_full((self.bucket, self.group.heads, self.group.value_dim), math.nan)
        attention.run(layer, q, k, v, out)
        return out.cpu()


def one_prompt(
    group: AttentionGroup,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`[n, heads, value_dim]`, float64: the last n of the prompt's tokens are the queries."""
    shared = group.heads // group.kv_heads
    keys, values = (x.double().repeat_interleave(shared, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * group.scale
    if group.softcap is not None:
        scores = torch.tanh(scores / group.softcap) * group.softcap
    behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))[None, :]
    hidden = (behind < 0) | (behind >= (group.window or len(k)))
    scores.masked_fill_(hidden, -math.inf)
    total = scores.exp().sum(-1)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None]
    return torch.einsum("hqk,hq,khd->qhd", scores.exp(), 1 / total, values)
