"""The simulated device's memory: one address range, pools of slabs in it, blocks in the slabs.

Knows addresses and sizes only, nothing of tensors. A freed block is handed out again as soon as
possible (last freed, first reused) and keeps its old bytes until then, as on a real card; addresses
stay mapped for good, so whoever reads a dangling one gets garbage and not a crash.
"""

from __future__ import annotations

import bisect
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

ALIGNMENT = 64  # what the CPU allocator gives: some kernels pick their path by alignment
SLAB = 2 << 20
NORESERVE = 0x4000
ADDRESS_SPACE = (1 << 36, 1 << 34, 1 << 32)


class AddressSpace:
    """A reserved range of addresses. Pages cost memory from first touch until given back."""

    def __init__(self) -> None:
        self._map, self.size = _reserve()
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.base = self.bytes.data_ptr()
        self.end = self.base + self.size
        self._top = self.base
        self._spare: dict[int, list[int]] = {}

    def take(self, size: int) -> int:
        """The address of `size` fresh bytes (a multiple of `SLAB`)."""
        spare = self._spare.get(size)
        if spare:
            return spare.pop()
        address, self._top = self._top, self._top + size
        if self._top > self.end:
            raise MemoryError("the simulated device ran out of addresses: this test leaks slabs")
        return address

    def give(self, address: int, size: int) -> None:
        """Takes `size` bytes back and drops their pages."""
        self._map.madvise(mmap.MADV_DONTNEED, address - self.base, size)
        self._spare.setdefault(size, []).append(address)


def _reserve() -> tuple[mmap.mmap, int]:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    for size in ADDRESS_SPACE[:-1]:
        try:
            return mmap.mmap(-1, size, flags=flags), size
        except OSError:  # a limit on address space: be content with less
            continue
    return mmap.mmap(-1, ADDRESS_SPACE[-1], flags=flags), ADDRESS_SPACE[-1]


class Death(weakref.ref[Any]):
    """Tells which block a storage owned when the storage dies."""

    __slots__ = ("address", "pool")
    address: int
    pool: Pool


class Pool:
    """Slabs, and the blocks in them. The ordinary heap is one; every graph pool is another."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.slabs: dict[int, int] = {}
        self.live: dict[int, int] = {}
        self.deaths: dict[int, Death] = {}
        self.segments = 0  # recordings that still need this pool
        self.opened = False
        self.recording = False  # stays so when a recording was spoilt
        # What segments that have yet to run for the first time may read, by their identities.
        self.waiting: dict[int, dict[int, int]] = {}
        self._recent: dict[int, list[int]] = {}
        self._by_size: list[tuple[int, int]] = []
        self._by_start: dict[int, int] = {}
        self._by_end: dict[int, int] = {}

    @property
    def retired(self) -> bool:
        """Whether the last recording of this pool is gone."""
        return self.opened and self.segments == 0

    @property
    def reserved(self) -> int:
        return sum(self.slabs.values())

    def reuse(self, size: int) -> int | None:
        """A free block of `size` bytes, or None."""
        recent = self._recent.get(size)
        if recent:
            address = recent.pop()
        else:
            found = self._fitting(size)
            if found is None:
                self._merge_recent()
                found = self._fitting(size)
            if found is None:
                return None
            address = found
        self.live[address] = size
        return address

    def free(self, address: int) -> None:
        size = self.live.pop(address)
        self.deaths.pop(address, None)
        self._recent.setdefault(size, []).append(address)

    def add_slab(self, address: int, size: int) -> None:
        self.slabs[address] = size
        self._insert(address, size)

    def empty_slabs(self) -> list[tuple[int, int]]:
        """Removes the slabs that hold no live block, and returns them."""
        self._merge_recent()
        empty = [(a, s) for a, s in self.slabs.items() if self._by_start.get(a) == s]
        for address, _ in empty:
            self._remove(address)
            del self.slabs[address]
        return empty

    def _fitting(self, size: int) -> int | None:
        at = bisect.bisect_left(self._by_size, (size, 0))
        if at == len(self._by_size):
            return None
        whole, address = self._by_size[at]
        self._remove(address)
        if whole > size:
            self._insert(address + size, whole - size)
        return address

    def _merge_recent(self) -> None:
        for size, addresses in self._recent.items():
            for address in addresses:
                self._join(address, size)
        self._recent.clear()

    def _join(self, address: int, size: int) -> None:
        # Slabs that happen to touch are not joined: each must be able to go back by itself.
        before = self._by_end.get(address) if address not in self.slabs else None
        if before is not None:
            size += self._remove(before)
            address = before
        after = address + size
        if after in self._by_start and after not in self.slabs:
            size += self._remove(after)
        self._insert(address, size)

    def _insert(self, address: int, size: int) -> None:
        bisect.insort(self._by_size, (size, address))
        self._by_start[address] = size
        self._by_end[address + size] = address

    def _remove(self, address: int) -> int:
        size = self._by_start.pop(address)
        del self._by_end[address + size]
        del self._by_size[bisect.bisect_left(self._by_size, (size, address))]
        return size


class Arena:
    """All memory of the device: the heap, the graph pools, and how much there is in total."""

    def __init__(self, total: int) -> None:
        self.space = AddressSpace()
        self.total = total
        self.heap = Pool("heap")
        self.pools: dict[Any, Pool] = {}
        self.observers: list[Callable[..., None]] = []
        """Told of every allocation that fails."""
        self.peak = 0
        """The most that was ever reserved, as far as a test wants to know."""
        self._pending: deque[Death] = deque()
        self._lock = threading.Lock()

    def allocate(self, pool: Pool, nbytes: int) -> int:
        """The address of a block of at least `nbytes`.

        Raises `torch.OutOfMemoryError` if the device has no room for another slab.
        """
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        with self._lock:
            self._collect()
            address = pool.reuse(size)
            if address is None:
                self._grow(pool, size)
                address = pool.reuse(size)
                assert address is not None
            return address

    def own(self, storage: torch.UntypedStorage, pool: Pool, address: int) -> None:
        """The block at `address` is free again once `storage` is dead."""
        # The callback may run in the middle of anything, so it only leaves a note.
        death = Death(storage, self._pending.append)
        death.pool, death.address = pool, address
        pool.deaths[address] = death

    def free(self, pool: Pool, address: int) -> None:
        """Frees a block that no storage owns."""
        with self._lock:
            pool.free(address)

    def live_blocks(self, pool: Pool) -> dict[int, int]:
        """Addresses and sizes of what a tensor, or the device itself, still owns in `pool`."""
        with self._lock:
            self._collect()
            return dict(pool.live)

    def reserved(self) -> int:
        return self.heap.reserved + sum(pool.reserved for pool in list(self.pools.values()))

    def in_use(self) -> int:
        with self._lock:
            self._collect()
        pools = (self.heap, *list(self.pools.values()))
        return sum(sum(pool.live.values()) for pool in pools)

    def empty_cache(self) -> None:
        """Gives empty slabs of the heap back, and those of pools that no recording needs."""
        with self._lock:
            self._collect()
            self._empty()

    def forget_pools(self) -> None:
        """Starts over without graph pools; tensors that still live in one keep their memory."""
        with self._lock:
            self._collect()
            for pool in list(self.pools.values()):
                pool.segments = 0
            self._empty()
            self.pools = {}

    def _collect(self) -> None:
        while self._pending:
            death = self._pending.popleft()
            death.pool.free(death.address)

    def _empty(self) -> None:
        for pool in (self.heap, *list(self.pools.values())):
            if pool is self.heap or pool.segments == 0:
                for address, size in pool.empty_slabs():
                    self.space.give(address, size)

    def _grow(self, pool: Pool, nbytes: int) -> None:
        size = -(-nbytes // SLAB) * SLAB
        if self.reserved() + size > self.total:
            self._empty()
        if self.reserved() + size > self.total:
            for call in self.observers:
                call(0, nbytes, self.total, self.total - self.reserved())
            raise torch.OutOfMemoryError(
                f"sim out of memory. Tried to allocate {nbytes} bytes in {pool.name}; "
                f"{self.reserved()} of {self.total} bytes are reserved."
            )
        pool.add_slab(self.space.take(size), size)
        self.peak = max(self.peak, self.reserved())
