"""The simulated device: streams, clock, random generator, scratch memory of its libraries.

It is in-order and synchronous: an operation has run when its call returns, and only the fake clock
says when it would have. It knows nothing of operators or of recordings beyond whose turn it is.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections import Counter
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from tests.simulated import tensors
from tests.simulated.arena import Pool
from tests.simulated.clock import Clock, Counters
from tests.simulated.tensors import TOTAL_BYTES, arena

if TYPE_CHECKING:
    from tests.simulated.segment import SimulatedSegment

WORKSPACE_BYTES = 4096
SCRIBBLE = 0xA5


_streams: WeakSet[Stream] = WeakSet()


class Stream:
    """An in-order queue of work. `time` is when its last operation ends."""

    _ids = itertools.count()

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream_id = next(self._ids)
        self.time = 0.0
        _streams.add(self)
        self.segment: SimulatedSegment | None = None

    def __repr__(self) -> str:
        return f"<sim stream {self.stream_id}>"

    def synchronize(self) -> None:
        """The host waits for this stream."""
        card.synchronize(self)

    def wait_stream(self, other: Stream) -> None:
        """What is queued here from now on starts after what is queued on `other`."""
        self.time = max(self.time, other.time)


class _Here(threading.local):
    """What a thread has, and loses when it ends: another may get its number."""

    stream: Stream | None = None

    def __init__(self) -> None:
        self.handles: set[tuple[int, int]] = set()


class Device:
    """State of the one simulated device. `card` below is it."""

    def __init__(self) -> None:
        self.default_stream = Stream(tensors.SIM)
        self.generator = torch.Generator(tensors.CPU)
        self.hiding: Counter[int] = Counter()
        self.workspaces: dict[Stream, tuple[Pool, int]] = {}
        self._here = _Here()
        self.epoch = 0  # counts resets: what died late must not count for the next test
        self.reset()
        tensors.module.card = self

    def reset(self) -> None:
        """Forgets pools, handles, failures, counters and times. Tensors stay what they are."""
        self.drop_workspaces()
        arena.total = TOTAL_BYTES
        arena.forget_pools()
        self.scratch: dict[Stream, Pool] = {}
        self.epoch += 1
        self.seed: torch.Tensor | None = None
        self.segments: WeakSet[SimulatedSegment] = WeakSet()
        self.clock = Clock()
        self.counters = Counters()
        self.broken = False
        self.aborts = 0
        self.generator.manual_seed(0)
        self.hiding.clear()
        for stream in list(_streams):
            stream.time, stream.segment = 0.0, None
        self._here.stream = None

    def current_stream(self) -> Stream:
        return self._here.stream or self.default_stream

    def set_current_stream(self, stream: Stream) -> None:
        self._here.stream = stream

    def pool_of(self, stream: Stream) -> Pool:
        """Where memory comes from for work on `stream`."""
        return arena.heap if stream.segment is None else stream.segment.pool

    def issued(self, stream: Stream, name: str) -> None:
        """Time passes for one operation that runs now."""
        clock = self.clock
        clock.host += clock.host_cost(name)
        stream.time = max(stream.time, clock.host) + clock.cost(name)
        self.counters.executed += 1
        self.counters.by_name[name] += 1

    def synchronize(self, stream: Stream) -> None:
        """The host waits for `stream`."""
        if stream.segment is not None:
            raise stream.segment.refuse("a synchronization")
        self.clock.host = max(self.clock.host, stream.time)

    def read_by_host(self, stream: Stream, what: str) -> None:
        """The host wants a value: it waits, and no recording can hold that."""
        if stream.segment is not None:
            raise stream.segment.refuse(what)
        self.counters.host_reads += 1
        self.clock.host = max(self.clock.host, stream.time)

    def workspace(self, stream: Stream) -> int:
        """The address of the math library's scratch memory for `stream`, made at first use."""
        if (self.epoch, stream.stream_id) not in self._here.handles:
            self.make_handle(stream)
        if stream not in self.workspaces:
            pool = self.pool_of(stream)
            self.workspaces[stream] = pool, arena.allocate(pool, WORKSPACE_BYTES)
        return self.workspaces[stream][1]

    def make_scratch(self, stream: Stream) -> None:
        """Makes the scratch memory for `stream` where nothing else will ever lie."""
        pool = self.scratch.setdefault(stream, Pool(f"scratch of {stream}"))
        if stream not in self.workspaces:
            self.workspaces[stream] = pool, arena.allocate(pool, WORKSPACE_BYTES)

    def make_handle(self, stream: Stream) -> None:
        """Makes the math library's handle of this thread for `stream`: not while it records."""
        if stream.segment is not None:
            raise stream.segment.refuse("the creation of a math library's handle")
        self._here.handles.add((self.epoch, stream.stream_id))

    def write_seed(self, segment: SimulatedSegment) -> None:
        """What the first segment makes for all to come, and each writes as it begins: the random
        generator's seed. Ordinary tensors and operators, that modes see, as on CUDA."""
        if self.seed is None:
            self.seed = torch.empty(1, dtype=torch.int64, device=tensors.SIM)
        self.segments.add(segment)
        counters, host = copy.deepcopy(self.counters), self.clock.host
        self.seed.fill_(0)
        self.counters, self.clock.host = counters, host

    def forget_segment(self, segment: SimulatedSegment) -> None:
        """With the last one the seed goes."""
        self.segments.discard(segment)
        if not self.segments:
            self.seed = None

    def drop_workspace(self, stream: Stream) -> None:
        pool, address = self.workspaces.pop(stream, (None, 0))
        if pool is not None:
            arena.free(pool, address)

    def drop_workspaces(self) -> None:
        for stream in list(self.workspaces):
            self.drop_workspace(stream)


def scribble(address: int) -> None:
    """What a matrix product leaves in its scratch memory, whoever owns that memory by now."""
    tensors.bytes_at(address, WORKSPACE_BYTES).fill_(SCRIBBLE)


card = Device()
