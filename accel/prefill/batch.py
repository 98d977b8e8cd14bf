"""A packed batch: prompts one behind the other, and the numbers that attention needs of them.

Knows rows, requests and pages as integers, on the host and on the device. Does not know where the
pages come from (kv_cache.py) nor which bucket is right (buckets.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from accel.prefill.kv_cache import KVCache
from accel.prefill.slots import HOST, Slots, fill_slots, slot_numbers

ROW, NUMBER = 8, 4
"""Bytes of a token's number in a row, int64, and of a request's, int32."""


@dataclass(frozen=True)
class Request:
    """One prompt's share of a batch: its new token ids, and what is cached in front of them.

    `ids` are quickest to pack as an `array("q")`. `prefix` counts cached tokens; `pages` holds, if
    there is a cache, the pages of prefix and new tokens in order.

    >>> Request((5, 6, 7)).length
    3
    """

    ids: Sequence[int]
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


class Parts(NamedTuple):
    """Where a batch's numbers lie in one stretch of memory, so that one copy brings them to the
    device: the rows, then the keys' rows, then the slots."""

    bucket: int
    keys: int

    @property
    def rows_end(self) -> int:
        """Bytes of the rows."""
        return 3 * ROW * self.bucket

    def of(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows `[3, bucket]`, `kv_rows` and slots as views of `flat`, uint8.

        >>> rows, keys, slots = Parts(2, 1).of(torch.zeros(64, dtype=torch.uint8, device=device))
        >>> rows.shape, keys.shape, slots.shape
        (torch.Size([3, 2]), torch.Size([1]), torch.Size([2]))
        """
        rows = flat[: self.rows_end].view(torch.int64).view(3, self.bucket)
        return rows, *self.behind_rows(flat[self.rows_end :])

    def behind_rows(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`kv_rows` and slots, where `flat` begins behind the rows."""
        end = ROW * self.keys
        return flat[:end].view(torch.int64), flat[end:].view(torch.int32)


@dataclass(frozen=True)
class Buffers:
    """Device tensors that a batch is copied into, for graphs that captured their addresses: views
    of `flat`, as `Parts` has them.

    A breakable graph reads `rows` only; a full one all of them.

    >>> buffers = Buffers.new(8, device, slots=2, pages=4, kv_bound=64)
    >>> buffers.rows.shape, buffers.slots.numel(), buffers.kv_rows.numel()
    (torch.Size([3, 8]), 15, 64)
    """

    flat: torch.Tensor
    rows: torch.Tensor
    kv_rows: torch.Tensor
    slots: torch.Tensor
    nbytes: int
    """Device memory that was taken for them, in bytes: none if they lie within others'."""

    @classmethod
    def new(
        cls,
        bucket: int,
        device: torch.device,
        slots: int = 0,
        pages: int = 0,
        kv_bound: int = 0,
        within: torch.Tensor | None = None,
    ) -> Buffers:
        """Buffers for `bucket` rows, and for a full graph also for `slots` requests: in memory that
        others have too, `within`, if there is enough of it, else zeros of their own."""
        parts = Parts(bucket, kv_bound if slots else 0)
        numbers = slot_numbers(slots, pages) if slots else 0
        nbytes = parts.rows_end + ROW * parts.keys + NUMBER * numbers
        if within is not None and within.nbytes >= nbytes:
            return cls(within[:nbytes], *parts.of(within[:nbytes]), nbytes=0)
        flat = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        return cls(flat, *parts.of(flat), nbytes=nbytes)


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
    slots = len(requests) if slots is None else slots
    prefixes = [request.prefix for request in requests]
    paged = paged or any(prefixes)
    numbers = fill_slots(
        [request.length for request in requests],
        prefixes,
        [request.pages for request in requests],
        slots=slots,
        page_size=cache.page_size if cache else 1,
    )
    places = _places(cache, requests) if cache else [memoryview(b"")] * len(requests)
    keys = _key_rows(places, cache, kv_bound) if paged and cache else b""
    parts = Parts(bucket, len(keys) // ROW)
    host = torch.frombuffer(
        bytearray().join((*_rows(requests, bucket, cache, places), keys, numbers)),
        dtype=torch.uint8,
    )
    if device.type != "cpu":  # torch keeps pinned memory until the copies from it are done
        host = host.pin_memory()
    rows, kv_rows, table = _upload(host, parts, device, into)
    ours = Slots(parts.of(host)[2], slots)
    return Batch(bucket, tuple(requests), ours, Slots(table, slots), rows, kv_rows, paged)


def _rows(
    requests: Sequence[Request],
    bucket: int,
    cache: KVCache | None,
    places: Sequence[memoryview],
) -> Iterator[bytes | array[int] | memoryview]:
    """The three rows, piece by piece: ids, positions, writes."""
    padding = bucket - sum(request.length for request in requests)
    if padding < 0:
        raise ValueError(f"{bucket - padding} tokens do not fit {bucket} rows")
    idle = bytes(ROW * padding)
    yield from (x if isinstance(x, array) else array("q", x) for x in (r.ids for r in requests))
    yield idle
    yield from (_counted(r.prefix, r.prefix + r.length) for r in requests)
    yield idle
    if cache is None:
        yield bytes(ROW * bucket)
        return
    dummy = array("q", [cache.dummy_row])
    for request, mine in zip(requests, places, strict=True):
        end = request.prefix + request.length
        yield mine[ROW * request.prefix : ROW * end] if request.pages else dummy * request.length
    yield dummy * padding


_numbers = array("q")
"""0, 1, 2, … as far as they were asked for: made once, since Python counts slowly."""


def _counted(start: int, stop: int) -> memoryview:
    """The numbers from `start` on, below `stop`."""
    global _numbers
    known = _numbers
    if stop > len(known):
        _numbers = known = array("q", range(max(stop, 2 * len(known), 1024)))
    return memoryview(known)[start:stop]


def _places(cache: KVCache, requests: Sequence[Request]) -> list[memoryview]:
    """Each request's rows in the cache, prefix and new tokens in order, as bytes."""
    pages = array("q", [page for request in requests for page in request.pages])
    if not pages:
        return [memoryview(b"")] * len(requests)
    size = cache.page_size
    first = torch.frombuffer(pages, dtype=torch.int64)[:, None] * size
    rows = bytearray(ROW * size * len(pages))
    into = torch.frombuffer(rows, dtype=torch.int64).view(-1, size)
    torch.add(first, torch.arange(size, device=HOST), out=into)
    found, begin = [], 0
    for request in requests:
        keys = request.prefix + request.length if request.pages else 0
        found.append(memoryview(rows)[begin : begin + ROW * keys])
        begin += ROW * size * len(request.pages)
    return found


def _key_rows(places: Sequence[memoryview], cache: KVCache, kv_bound: int) -> bytes:
    live = b"".join(places)
    return live + (array("q", [cache.dummy_row]) * (kv_bound - len(live) // ROW)).tobytes()


def _upload(
    host: torch.Tensor, parts: Parts, device: torch.device, into: Buffers | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, `kv_rows` and slots on the device, copied without waiting for it."""
    if into is None:
        return parts.of(host.to(device, non_blocking=True))
    if not into.slots.numel():
        into.flat.copy_(host[: parts.rows_end], non_blocking=True)
        return into.rows, *parts.behind_rows(host[parts.rows_end :].to(device, non_blocking=True))
    if parts.keys != into.kv_rows.numel():
        raise ValueError(f"{parts.keys} keys' rows for a graph that takes {into.kv_rows.numel()}")
    into.flat[: host.numel()].copy_(host, non_blocking=True)
    return into.rows, into.kv_rows, into.slots
