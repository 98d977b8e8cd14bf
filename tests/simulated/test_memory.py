"""The arena, its pools, and the accidents that it makes visible."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.simulated import new_device
from tests.simulated.arena import SLAB

Record = Callable[..., tuple[Any, Any]]


def test_freed_memory_is_handed_out_again_at_once(sim: torch.device) -> None:
    x = torch.ones(1000, device=sim)
    address = x.data_ptr()
    view = x[10:]
    del x
    assert torch.empty(1000, device=sim).data_ptr() != address  # the view still owns it
    del view
    assert torch.empty(1000, device=sim).data_ptr() == address


def test_an_alias_reads_what_the_memory_holds_now(sim: torch.device, backend: Any) -> None:
    x = torch.ones(1000, device=sim)
    alias = backend.alias(x[10:20])
    assert alias.data_ptr() == x[10:].data_ptr()
    assert backend.storage(alias).nbytes() == backend.storage(x).nbytes()
    del x
    assert alias.tolist() == [1.0] * 10  # freed, not yet reused
    other = torch.full((1000,), 7.0, device=sim)
    assert alias.tolist() == [7.0] * 10
    del alias
    assert other.eq(7).all().item()
    assert torch.empty(1000, device=sim).data_ptr() != other.data_ptr()


def test_outside_memory_is_not_held_by_a_recording(sim: torch.device, record: Record) -> None:
    held = [torch.ones(1000, device=sim)]
    segment, y = record(lambda: held[0] + 1)
    held.clear()
    thief = torch.full((1000,), 5.0, device=sim)
    segment.replay()
    assert y.eq(6).all().item()
    assert thief.eq(5).all().item()


def test_what_dies_while_recording_makes_room_in_the_pool(
    sim: torch.device, backend: Any, pool: Any, record: Record
) -> None:
    x = torch.ones(1000, device=sim)

    def chain() -> Tensor:
        y = x + 1
        for _ in range(10):
            y = y + 1
        return y

    segment, y = record(chain)
    assert backend.live_blocks(pool) == {backend.block_of(y)}
    assert len({step.targets[0].data_ptr() for step in segment.steps}) == 2
    segment.replay()
    assert y.eq(12).all().item()


def test_later_segments_reuse_what_earlier_ones_freed(
    sim: torch.device, backend: Any, pool: Any, record: Record
) -> None:
    x = torch.ones(SLAB // 8, device=sim)
    segments = [record(lambda: (x + 1).sum())[0] for _ in range(8)]
    assert backend.pool_bytes(pool) <= 2 * SLAB
    del segments


def test_a_pools_memory_returns_when_its_segments_and_tensors_are_gone(
    sim: torch.device, backend: Any, pool: Any, stream: Any
) -> None:
    x = torch.ones(1000, device=sim)
    segment = backend.segment(pool)
    with backend.on_stream(stream):
        segment.begin()
        y = x + 1
        segment.end()
    backend.empty_cache()
    before = backend.reserved_bytes(sim)
    assert backend.pool_bytes(pool) == SLAB
    del y
    backend.empty_cache()
    assert backend.pool_bytes(pool) == SLAB  # the segment needs it
    del segment
    assert backend.pool_bytes(pool) == SLAB  # until someone asks
    backend.empty_cache()
    assert backend.pool_bytes(pool) == 0
    assert backend.reserved_bytes(sim) == before - SLAB


def test_a_live_tensor_keeps_its_pools_memory(
    sim: torch.device, backend: Any, pool: Any, stream: Any
) -> None:
    x = torch.ones(1000, device=sim)
    segment = backend.segment(pool)
    with backend.on_stream(stream):
        segment.begin()
        y = x + 1
        segment.end()
    segment.replay()
    del segment
    backend.empty_cache()
    assert y.eq(2).all().item()
    assert backend.live_blocks(pool) == {y.data_ptr()}


def test_a_pool_does_not_come_back_from_the_dead(
    sim: torch.device, backend: Any, pool: Any, stream: Any
) -> None:
    def record_once(pool_id: Any) -> None:
        segment = backend.segment(pool_id)
        with backend.on_stream(stream):
            segment.begin()
            segment.end()

    record_once(pool)
    gc.collect()
    with pytest.raises(RuntimeError, match="INTERNAL ASSERT"):
        record_once(pool)
    with pytest.raises(RuntimeError, match="broken"):
        record_once(backend.new_pool())
    new_device()
    record_once(backend.new_pool())


def test_an_anchor_segment_keeps_a_pool_usable(backend: Any, pool: Any, stream: Any) -> None:
    anchor = backend.segment(pool)
    with backend.on_stream(stream):
        anchor.begin()
        anchor.end()
        for _ in range(3):
            segment = backend.segment(pool)
            segment.begin()
            segment.end()


def _drop_scratch_memory() -> None:
    from tests.simulated.device import card  # importing it makes the device known to torch

    card.drop_workspaces()


def test_a_scratch_block_that_was_freed_corrupts_whoever_owns_it(
    sim: torch.device, backend: Any, record: Record
) -> None:
    a = torch.ones(4, 4, device=sim)
    _drop_scratch_memory()  # then the recording makes its own
    segment, y = record(lambda: a @ a)
    segment.replay()
    assert y.eq(4).all().item()
    _drop_scratch_memory()
    _, victim = record(lambda: torch.empty(1024, device=sim))
    victim.fill_(1.0)
    segment.replay()
    assert y.eq(4).all().item()
    assert not victim.eq(1).any().item()


def test_a_dying_segment_takes_its_streams_scratch_memory_along(
    sim: torch.device, backend: Any, pool: Any, stream: Any
) -> None:
    a = torch.ones(4, 4, device=sim)
    segments = [backend.segment(pool) for _ in range(2)]
    results = []
    _drop_scratch_memory()
    with torch.no_grad(), backend.on_stream(stream):
        for segment in segments:
            segment.begin()
            results.append(a @ a)
            segment.end()
    blocks = backend.live_blocks(pool)
    del segments[0], segment
    assert len(blocks - backend.live_blocks(pool)) == 1


def test_the_card_can_be_full(sim: torch.device, backend: Any) -> None:
    backend.empty_cache()
    backend.set_total_memory(backend.reserved_bytes(sim) + 4 * SLAB)
    free, total = backend.memory(sim)
    assert (free, total) == (4 * SLAB, backend.reserved_bytes(sim) + 4 * SLAB)
    x = torch.empty(3 * SLAB, dtype=torch.uint8, device=sim)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.empty(2 * SLAB, dtype=torch.uint8, device=sim)
    del x
    assert backend.reclaimable_bytes(sim) >= 3 * SLAB
    torch.empty(4 * SLAB, dtype=torch.uint8, device=sim)  # the cache makes room by itself


def test_a_full_card_ends_a_recording_cleanly(
    sim: torch.device, backend: Any, record: Record
) -> None:
    x = torch.ones(SLAB, dtype=torch.uint8, device=sim)
    backend.empty_cache()
    backend.set_total_memory(backend.reserved_bytes(sim))
    with pytest.raises(torch.OutOfMemoryError):
        record(lambda: x + 1)
    backend.set_total_memory(1 << 30)
    segment, y = record(lambda: x + 1)
    segment.replay()
    assert y.eq(2).all().item()


def test_many_sizes_come_and_go_without_growth(sim: torch.device, backend: Any) -> None:
    def churn() -> None:
        kept: list[Tensor] = []
        for step in range(300):
            kept.append(torch.full((17 * (step % 23) + 1,), float(step), device=sim))
            if step % 3 == 0:
                kept.pop(step % len(kept))
        addresses = sorted((t.data_ptr(), t.numel() * 4) for t in kept)
        for (a, size), (b, _) in itertools.pairwise(addresses):
            assert a + size <= b
        assert all(t.eq(t[0]).all().item() for t in kept[::20])

    churn()
    reserved = backend.reserved_bytes(sim)
    churn()
    assert backend.reserved_bytes(sim) == reserved
