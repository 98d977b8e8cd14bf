"""The simulated device behind `accel.backend.Backend`, plus what tests look at."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from tests.simulated import tensors
from tests.simulated.arena import Pool
from tests.simulated.clock import Clock, Counters, Event
from tests.simulated.device import Stream, card
from tests.simulated.segment import SimulatedSegment
from tests.simulated.tensors import arena, quiet


class SimulatedBackend:
    """Records and replays on the simulated device. All instances speak of the same device."""

    device_type = tensors.NAME
    tensor_types: tuple[type[torch.Tensor], ...] = (torch.Tensor, torch.nn.Parameter)
    address = staticmethod(torch.Tensor.data_ptr)
    storage = staticmethod(torch.Tensor.untyped_storage)
    _pool_ids = itertools.count(1)

    def segment(self, pool: Any) -> SimulatedSegment:
        return SimulatedSegment(pool)

    def resting_segment(self, pool: Any) -> SimulatedSegment:
        return SimulatedSegment(pool, rests=True)

    def new_pool(self) -> Any:
        pool_id = (0, next(self._pool_ids))
        arena.pools[pool_id] = Pool(f"pool {pool_id}")
        return pool_id

    def new_stream(self, device: torch.device) -> Stream:
        return Stream(device)

    def current_stream(self, device: torch.device) -> Stream:
        return card.current_stream()

    def stream_id(self, index: int) -> Stream:
        return card.current_stream()

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[Stream]:
        before = card.current_stream()
        card.set_current_stream(stream)
        try:
            yield stream
        finally:
            card.set_current_stream(before)

    def wait_stream(self, stream: Stream, awaited: Stream) -> None:
        stream.time = max(stream.time, awaited.time)

    def record_event(self, stream: Stream, timing: bool = False) -> Event:
        return Event(card.clock, max(stream.time, card.clock.host))

    def wait_event(self, stream: Stream, event: Any) -> None:
        stream.time = max(stream.time, event.time)

    def synchronize(self, stream: Stream) -> None:
        card.synchronize(stream)

    def now(self) -> float:
        """Host seconds by the fake clock."""
        return card.clock.host

    def is_capturing(self) -> bool:
        return card.current_stream().segment is not None

    def hide_capturing(self) -> AbstractContextManager[None]:
        return _hidden()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        with quiet():
            held = tensor.untyped_storage()
            storage = tensors.unowned_storage(held.data_ptr(), held.nbytes())
            return tensors.on_storage(
                storage, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
            )

    def live_blocks(self, pool: Any) -> set[int]:
        return set(arena.live_blocks(arena.pools[pool]))

    def pool_bytes(self, pool: Any) -> int:
        return arena.pools[pool].reserved

    def memory(self, device: torch.device) -> tuple[int, int]:
        return arena.total - arena.reserved(), arena.total

    def reserved_bytes(self, device: torch.device) -> int:
        return arena.reserved()

    def reclaimable_bytes(self, device: torch.device) -> int:
        return arena.reserved() - arena.in_use()

    def empty_cache(self) -> None:
        arena.empty_cache()

    def rng_state(self, device: torch.device) -> torch.Tensor:
        return card.generator.get_state()

    def set_rng_state(self, device: torch.device, state: torch.Tensor) -> None:
        card.generator.set_state(state)

    def on_out_of_memory(self, call: Callable[..., None]) -> None:
        arena.observers.append(call)

    def warm_libraries(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        card.make_handle(card.current_stream())
        card.make_scratch(card.current_stream())

    # What only tests use.

    @property
    def clock(self) -> Clock:
        return card.clock

    @property
    def counters(self) -> Counters:
        return card.counters

    @property
    def aborts(self) -> int:
        """Spoilt recordings that were destroyed: each might have ended the process."""
        return card.aborts

    def set_total_memory(self, nbytes: int) -> None:
        """The size of the card, for out-of-memory tests. `new_device` restores it."""
        arena.total = nbytes

    def block_of(self, tensor: torch.Tensor) -> int:
        """The address of the block that `tensor` lies in."""
        return tensor.untyped_storage().data_ptr()


@contextmanager
def _hidden() -> Iterator[None]:
    here = threading.get_ident()
    card.hiding[here] += 1
    try:
        yield
    finally:
        card.hiding[here] -= 1
        if not card.hiding[here]:
            del card.hiding[here]
