"""A packed batch: prompts one behind the other, and the numbers that attention needs of them.

Knows rows, requests and pages as integers, on the host and on the device. Does not know where the
pages come from (kv_cache.py) nor which bucket is right (buckets.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from accel.prefill.kv_cache import KVCache
from accel.prefill.slots import HOST, Slots, fill_slots, slot_numbers


@dataclass(frozen=True)
class Request:
    """One prompt's share of a batch: its new token ids, and what is cached in front of them.

    `prefix` counts cached tokens; `pages` holds, if there is a cache, the pages of prefix and new
    tokens in order, and no others.

    >>> Request((5, 6, 7)).length
    3
    """

    ids: tuple[int, ...]
    prefix: int = 0
    pages: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """New tokens."""
        return len(self.ids)


@dataclass(frozen=True)
class Batch:
    """One forward pass. Rows are packed tokens, `bucket` of them; the first `tokens` are real.

    `host` and `device` hold the same per-request numbers: request by request, then sentinels.

    >>> batch = pack([Request((5, 6, 7)), Request((8,))], 6, device)
    >>> batch.ids.tolist(), batch.positions.tolist()
    ([[5, 6, 7, 8, 0, 0]], [[0, 1, 2, 0, 0, 0]])
    >>> batch.tokens, batch.device.q_indptr.tolist()
    (4, [0, 3, 4])
    """

    bucket: int
    requests: tuple[Request, ...]
    host: Slots
    device: Slots
    rows: torch.Tensor
    """`[3, bucket]` int64: ids, positions, writes. Zero behind the last token, writes the dummy."""
    kv_rows: torch.Tensor
    """`[n]` int64: the cache's rows of all requests' keys, in order, then the dummy row up to
    `kv_bound`. Empty unless the batch is paged."""
    paged: bool
    """Whether attention reads keys and values from the cache: some request has a prefix, or a full
    graph was captured that way."""

    @property
    def tokens(self) -> int:
        """Real rows."""
        return sum(request.length for request in self.requests)

    @property
    def ids(self) -> torch.Tensor:
        """`[1, bucket]` int64."""
        return self.rows[:1]

    @property
    def positions(self) -> torch.Tensor:
        """`[1, bucket]` int64: each token's place in its own prompt, prefix included."""
        return self.rows[1:2]

    @property
    def writes(self) -> torch.Tensor:
        """`[bucket]` int64: the cache's row for each token's key and value."""
        return self.rows[2]

    @property
    def slots(self) -> int:
        """Entries of the per-request tensors: live requests and sentinels."""
        return self.host.slots


@dataclass(frozen=True)
class Buffers:
    """Device tensors that a batch is copied into, for graphs that captured their addresses.

    A breakable graph reads `rows` only; a full one all of them.

    >>> buffers = Buffers.new(8, device, slots=2, pages=4, kv_bound=64)
    >>> buffers.rows.shape, buffers.slots.numel(), buffers.kv_rows.numel()
    (torch.Size([3, 8]), 15, 64)
    """

    rows: torch.Tensor
    slots: torch.Tensor | None = None
    kv_rows: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Device memory, in bytes."""
        return sum(x.nbytes for x in self.tensors)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those that there are."""
        return [x for x in (self.rows, self.slots, self.kv_rows) if x is not None]

    @classmethod
    def new(
        cls, bucket: int, device: torch.device, slots: int = 0, pages: int = 0, kv_bound: int = 0
    ) -> Buffers:
        """Buffers of zeros: for `bucket` rows, and for a full graph also for `slots` requests."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        rows = zeros(3, bucket)
        if not slots:
            return cls(rows)
        return cls(rows, zeros(slot_numbers(slots, pages), dtype=torch.int32), zeros(kv_bound))


def pack(
    requests: Sequence[Request],
    bucket: int,
    device: torch.device,
    *,
    slots: int | None = None,
    cache: KVCache | None = None,
    paged: bool = False,
    kv_bound: int = 0,
    into: Buffers | None = None,
) -> Batch:
    """Packs `requests` (each of at least one token, `bucket` in all at most) into `bucket` rows.

    `slots` adds sentinels up to that number of requests. `paged` makes a batch without prefixes a
    paged one; it needs a cache and pages. Its `kv_rows` are padded to `kv_bound`. What `into` holds
    is overwritten on the current stream, and the batch's device tensors are views of it.
    """
    into = into or Buffers(torch.empty(3, bucket, dtype=torch.int64, device=device))
    prefixes = [request.prefix for request in requests]
    paged = paged or any(prefixes)
    host = fill_slots(
        [request.length for request in requests],
        prefixes,
        [request.pages for request in requests],
        slots=len(requests) if slots is None else slots,
        page_size=cache.page_size if cache else 1,
    )
    keys = _key_rows(requests, cache, kv_bound) if paged and cache else _none()
    return Batch(
        bucket,
        tuple(requests),
        host,
        Slots(_upload(host.flat, device, into.slots), host.slots),
        _upload(_rows(requests, bucket, cache), device, into.rows).view(3, bucket),
        _upload(keys, device, into.kv_rows),
        paged,
    )


def _none() -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64, device=HOST)


def _rows(requests: Sequence[Request], bucket: int, cache: KVCache | None) -> torch.Tensor:
    rows = torch.zeros(3, bucket, dtype=torch.int64, device=HOST)
    rows[2] = cache.dummy_row if cache else 0
    start = 0
    for request in requests:
        here = slice(start, start + request.length)
        rows[0, here] = torch.tensor(request.ids, dtype=torch.int64, device=HOST)
        rows[1, here] = torch.arange(request.length, device=HOST) + request.prefix
        if cache and request.pages:
            rows[2, here] = _places(cache, request)[request.prefix :]
        start = here.stop
    return rows.flatten()


def _key_rows(requests: Sequence[Request], cache: KVCache, kv_bound: int) -> torch.Tensor:
    live = torch.cat([_places(cache, request) for request in requests])
    dummies = max(0, kv_bound - live.numel())
    return torch.cat([live, torch.full((dummies,), cache.dummy_row, device=HOST)])


def _places(cache: KVCache, request: Request) -> torch.Tensor:
    return cache.places(request.pages, request.prefix + request.length)


def _upload(host: torch.Tensor, device: torch.device, buffer: torch.Tensor | None) -> torch.Tensor:
    """Copies to the device without waiting for it; torch keeps pinned memory until that is done."""
    if device.type != "cpu":
        host = host.pin_memory()
    if buffer is None:
        return host.to(device, non_blocking=True)
    buffer.view(-1)[: host.numel()].copy_(host, non_blocking=True)
    return buffer
