"""Slots and packed batches: sentinels, positions, where keys are written."""

from __future__ import annotations

import pytest
import torch

from accel.prefill.batch import Buffers, Request, pack
from accel.prefill.kv_cache import CacheFull, KVCache
from accel.prefill.slots import Slots, fill_slots


def new_cache(device: torch.device, tokens: int = 64) -> KVCache:
    return KVCache([(2, 4, 4), (1, 4, 4)], tokens, torch.float32, device)


def on_host(
    lengths: list[int], prefixes: list[int], pages: list[tuple[int, ...]], slots: int
) -> Slots:
    numbers = fill_slots(lengths, prefixes, pages, slots=slots, page_size=16)
    return Slots(torch.tensor(numbers, dtype=torch.int32), slots)


def test_a_sentinel_is_a_request_of_length_zero() -> None:
    host = on_host([3], [0], [()], slots=3)
    assert host.q_indptr.tolist() == host.kv_indptr.tolist() == [0, 3, 3, 3]
    assert host.page_indptr.tolist() == [0, 0, 0, 0]
    assert host.last_page_len.tolist() == [0, 0, 0]


@pytest.mark.parametrize("keys, last", [(16, 16), (17, 1), (1, 1), (31, 15)])
def test_the_last_page_is_never_counted_empty(keys: int, last: int) -> None:
    pages = tuple(range(-(-keys // 16)))
    host = on_host([1], [keys - 1], [pages], slots=1)
    assert host.last_page_len.tolist() == [last]


def test_more_requests_than_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="2 requests do not fit 1 slots"):
        fill_slots([1, 1], [0, 0], [(), ()], slots=1, page_size=16)


def test_padding_is_written_to_the_dummy_row(device: torch.device) -> None:
    cache = new_cache(device)
    pages = cache.take(2)
    batch = pack([Request((7, 8, 9), 15, pages)], 5, device, cache=cache, kv_bound=20)
    first, second = pages[0] * 16, pages[1] * 16
    assert batch.writes.tolist() == [first + 15, second, second + 1] + [cache.dummy_row] * 2
    assert batch.positions.tolist() == [[15, 16, 17, 0, 0]]
    keys = [*range(first, first + 16), second, second + 1]
    assert batch.kv_rows.tolist() == keys + [cache.dummy_row] * 2


def test_every_request_is_written_to_its_own_pages(device: torch.device) -> None:
    cache = new_cache(device)
    cache.take(1)
    first, second = cache.take(2), cache.take(1)
    requests = Request((7, 8), 16, first), Request((9,)), Request((1, 2), 3, second)
    batch = pack(requests, 6, device, slots=4, cache=cache, kv_bound=30)
    assert batch.ids.tolist() == [[7, 8, 9, 1, 2, 0]]
    assert batch.positions.tolist() == [[16, 17, 0, 3, 4, 0]]
    rows = [cache.places(pages, n).tolist() for pages, n in ((first, 18), (second, 5))]
    written = [*rows[0][16:], cache.dummy_row, *rows[1][3:], cache.dummy_row]
    assert batch.writes.tolist() == written
    assert batch.kv_rows.tolist() == [*rows[0], *rows[1]] + [cache.dummy_row] * 7
    assert batch.device.page_indices.tolist() == [*first, *second]
    assert batch.device.flat.tolist() == batch.host.flat.tolist()


def test_positions_of_long_prompts(device: torch.device) -> None:
    for prefix in (0, 5000, 40):
        batch = pack([Request((1, 2, 3), prefix)], 3, device)
        assert batch.positions.tolist() == [[prefix, prefix + 1, prefix + 2]]


@pytest.mark.parametrize("requests", [[Request((1, 2, 3))], [Request((1, 2)), Request((3,))]])
def test_more_tokens_than_rows_are_refused(requests: list[Request], device: torch.device) -> None:
    with pytest.raises(ValueError, match="3 tokens do not fit 2 rows"):
        pack(requests, 2, device)


def test_keys_that_a_graph_has_no_room_for_are_refused(device: torch.device) -> None:
    cache = new_cache(device)
    buffers = Buffers.new(6, device, slots=1, pages=2, kv_bound=20)
    request = Request((1, 2), 20, cache.take(2))
    with pytest.raises(ValueError, match="22 keys' rows for a graph that takes 20"):
        pack([request], 6, device, slots=1, cache=cache, kv_bound=20, into=buffers)


def test_buffers_keep_their_addresses_and_lose_old_rows(device: torch.device) -> None:
    buffers = Buffers.new(6, device, slots=2)
    long = pack([Request((1, 2, 3)), Request((4, 5))], 6, device, slots=2, into=buffers)
    address = long.ids.data_ptr(), long.device.q_indptr.data_ptr()
    short = pack([Request((9,))], 6, device, slots=2, into=buffers)
    assert (short.ids.data_ptr(), short.device.q_indptr.data_ptr()) == address
    assert short.ids.tolist() == [[9, 0, 0, 0, 0, 0]]
    assert short.device.q_indptr.tolist() == [0, 1, 1]


def test_buffers_can_lie_within_others(device: torch.device) -> None:
    large = Buffers.new(6, device, slots=2)
    small = Buffers.new(3, device, slots=2, within=large.flat)
    assert small.nbytes == 0 and small.flat.data_ptr() == large.flat.data_ptr()
    pack([Request((1, 2, 3, 4, 5, 6))], 6, device, slots=2, into=large)
    batch = pack([Request((9,))], 3, device, slots=2, into=small)
    assert batch.ids.tolist() == [[9, 0, 0]] and batch.device.q_indptr.tolist() == [0, 1, 1]
    larger = Buffers.new(7, device, slots=2, within=large.flat)
    assert larger.nbytes > large.nbytes and larger.flat.data_ptr() != large.flat.data_ptr()


def test_pages_are_counted(device: torch.device) -> None:
    cache = new_cache(device)
    pages = cache.take(3)
    cache.share(pages[:1])
    cache.release(pages)
    assert cache.free_tokens == 48
    cache.release(pages[:1])
    assert cache.free_tokens == 64


def test_a_full_cache_says_how_full(device: torch.device) -> None:
    cache = new_cache(device)
    cache.take(3)
    with pytest.raises(CacheFull, match=r"48 of 64 tokens and 32 more.*cache_tokens="):
        cache.take(2)
    assert cache.free_tokens == 16


def test_a_page_is_copied_in_every_layer(device: torch.device) -> None:
    cache = new_cache(device)
    cache.keys(1)[0].fill_(3)
    cache.values(0)[0].fill_(4)
    cache.copy_page(0, 2)
    assert cache.keys(1)[2].eq(3).all().item() and cache.values(0)[2].eq(4).all().item()
