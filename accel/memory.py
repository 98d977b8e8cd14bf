"""Pools: one stream, one lock, one last-use event, a graveyard and an anchor; the byte budget.

Knows when recorded work may run, where its memory comes from and when it is given back. Does not
know what is recorded or why.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from accel.backend import backend_for, keep_for_ever

_idle_streams: defaultdict[torch.device, list[Any]] = defaultdict(list)
"""Streams of pools that are gone: libraries keep scratch memory for each they ever ran on."""

_sides: dict[torch.device, tuple[Any, Any]] = {}
"""A device's streams for constants and for segments that run beside: no pool records on them."""

_OF_PRODUCTS = torch.float16, torch.bfloat16, torch.float32
"""What libraries are warmed in; other weights (quantized ones, say) are made one of these."""

STREAMS = 32
"""That torch has of a device; it gives out the same ones again and again."""

_turns: dict[Any, threading.RLock] = {}
"""Held while a pool works on its stream, by stream: many pools may have to share theirs."""

_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_watched: set[str] = set()
"""Types of devices whose failing allocations are heard of."""


class Pool:
    """Memory and order of a family of graphs: they share it and never run at the same time.

    Any thread may use a pool. Discarded segments wait in the graveyard until the generation ends:
    destroying one can take a workspace away from the others. An anchor, an empty recording, keeps
    the pool's id alive while no graph does. `memory_limit` is in bytes, `dtype` that of most of the
    matrix products, if it is known. `tenants` say whether they have graphs in it, `has_graphs`;
    when a new generation begins `forget_graphs` is called. `unrecordable` are ops that a recording
    failed on: from the next one on they are breaks. `may_cut` is off once a recording in several
    segments failed: work forked to another stream cannot be cut in two.

    >>> pool = Pool(device)
    >>> pool.bytes()
    0
    """

    def __init__(
        self,
        device: torch.device | str,
        memory_limit: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        backend = backend_for(device)
        if backend is None:
            raise ValueError(f"nothing can be recorded on {device}: graphs need CUDA")
        try:
            self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        except (AssertionError, RuntimeError) as error:
            line = str(error).partition("\n")[0]
            raise ValueError(f"nothing can be recorded on {device}: {line}") from None
        self.backend = backend
        self.dtype = dtype if dtype in _OF_PRODUCTS else torch.bfloat16
        self.lock = threading.RLock()
        if self.device not in _sides:
            sides = backend.new_stream(self.device), backend.new_stream(self.device)
            _sides.setdefault(self.device, sides)
        self._take_stream()
        self.limit = memory_limit
        self.generation = -1
        self.tenants: weakref.WeakSet[Any] = weakref.WeakSet()
        self.unrecordable: set[Any] = set()
        self.may_cut = True
        self.short = False
        """Whether an allocation failed somewhere since graphs were given up last."""
        self._here = threading.local()
        self._last_use: Any = None
        self._last_stream: Any = None
        _pools.add(self)
        if backend.device_type not in _watched:
            _watched.add(backend.device_type)
            backend.on_out_of_memory(_memory_is_short)
        self._open_generation()

    def _take_stream(self) -> None:
        idle = _idle_streams[self.device]
        try:
            self.stream = idle.pop()
        except IndexError:
            self.stream = self._another_stream()
        self._turn = _turns.setdefault(self.stream, threading.RLock())
        self._give_stream_back = weakref.finalize(self, idle.append, self.stream)

    def _another_stream(self) -> Any:
        """One that no other pool has, if there is one: those that share theirs wait for each other,
        and where a pool's work is in the middle of another's that can be for ever."""
        news = (self.backend.new_stream(self.device) for _ in range(STREAMS + 1))
        others = (new for new in news if new not in _sides[self.device])
        first = next(others)
        return next((new for new in itertools.chain([first], others) if new not in _turns), first)

    def _open_generation(self) -> None:
        for tenant in list(self.tenants):
            tenant.forget_graphs()
        self.generation += 1
        self.id = self.backend.new_pool()
        self._graveyard: list[Any] = []
        self._anchor: Any = None

    def anchor(self, *pieces: int) -> None:
        """Makes sure that the pool's id outlives its graphs. Call on the pool's stream. The first
        time `pieces` of so many bytes are taken, for graphs to find theirs in: taken tensor by
        tensor, memory is lost between them. Raises OutOfMemoryError if there is no such piece; the
        pool can do without."""
        if self._anchor is None:
            anchor = self.backend.segment(self.id)
            anchor.begin()
            try:
                [torch.empty(n, dtype=torch.uint8, device=self.device) for n in pieces]
            finally:
                anchor.end()
                self._anchor = anchor  # one that could not begin or end holds nothing

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """`entered`, the libraries' handles made. Outside inference mode: tensors made in it, such
        as a random generator's seed at the first recording, could not be written later."""
        grad = torch.is_grad_enabled()
        with self.entered(), torch.inference_mode(False), torch.set_grad_enabled(grad):
            self.backend.warm_libraries(self.device, self.dtype)
            self.anchor()
            yield

    @contextlib.contextmanager
    def entered(self) -> Iterator[Any]:
        """The pool's stream as current stream, after all earlier work; what the caller's stream,
        which is yielded, does next waits for it. Comes before locks that are not the pool's."""
        caller = self.backend.current_stream(self.device)
        with self.use():
            if not self._give_stream_back.alive:  # closed, and yet in use
                self._take_stream()
            with self._turn, self.backend.on_stream(self.stream):
                self.backend.wait_stream(self.stream, caller)
                try:
                    yield caller
                finally:
                    self.backend.wait_stream(caller, self.stream)

    def warm(self) -> None:
        """For eager work on the pool's stream: the libraries' handles and scratch memory, once a
        thread and generation, as a stream's scratch memory goes with its segments."""
        if getattr(self._here, "warm", None) != self.generation:
            self.backend.warm_libraries(self.device, self.dtype)
            self._here.warm = self.generation

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Exclusive use: the pool's earlier work comes before what the caller's stream gets now."""
        with self.lock:
            self.begin_use()
            try:
                yield
            finally:
                self.end_use()

    def begin_use(self) -> None:
        """As `use`, for who holds the lock and calls `end_use`. A launch waits for this, and a
        context of Python's own is five calls more."""
        if self._last_use is not None and self._last_stream != self._stream_id:
            self.backend.wait_event(self.backend.current_stream(self.device), self._last_use)

    def end_use(self) -> None:
        """The pool's next work comes after what the current stream has got."""
        stream = self.backend.current_stream(self.device)
        self._last_use, self._last_stream = self.backend.record_event(stream), self._stream_id

    @property
    def _stream_id(self) -> Any:
        return self.backend.stream_id(self.device.index)

    @contextlib.contextmanager
    def upload(self) -> Iterator[None]:
        """A stream on which constants reach the device although the pool's stream records."""
        side, _ = _sides[self.device]
        with self.backend.on_stream(side):
            yield
            self.backend.synchronize(side)

    def start(self, segment: Any) -> None:
        """Has a segment run beside the pool's stream, after what is queued there, as soon as it can
        be launched."""
        _, beside = _sides[self.device]
        self.backend.wait_stream(beside, self.stream)
        segment.prepare(beside)

    def join(self) -> None:
        """What is queued on the pool's stream next comes after the segments that run beside."""
        _, beside = _sides[self.device]
        self.backend.wait_stream(self.stream, beside)

    def bury(self, segments: list[Any]) -> None:
        """Takes discarded segments: they are destroyed with the generation, not before."""
        self._graveyard.extend(segments)

    def abandon(self, wreck: Any) -> None:
        """After a device error while recording: the id is unusable, so a new generation begins, and
        the broken segment is held for ever, since destroying it can abort the process."""
        keep_for_ever((wreck, self._anchor, self._graveyard))
        self._open_generation()

    def relieve(self) -> None:
        """Gives the graphs up if memory has run out somewhere: whoever tries again finds it."""
        if self.short:
            self.retire()

    def retire(self) -> None:
        """Gives all graph memory back to the device: every tenant forgets its graphs."""
        with self.lock:
            self.short = False
            if self._last_use is not None:
                self._last_use.synchronize()
            self._open_generation()
            self.backend.empty_cache()

    def retire_if_unused(self) -> None:
        """Gives the memory back that nobody's graphs are in."""
        if not any(tenant.has_graphs for tenant in self.tenants):
            self.retire()

    def close(self) -> None:
        """Gives the pool up: its anchor goes too, and its stream to the next pool."""
        with self.lock:
            self._anchor = None
            self._give_stream_back()
            self.backend.empty_cache()

    def make_room(self) -> None:
        """On a nearly full card the allocator's own cache can be what a recording lacks."""
        free, total = self.backend.memory(self.device)
        if free < total // 20:
            self.backend.empty_cache()

    def bytes(self) -> int:
        """Device memory that the pool has reserved, in bytes."""
        return self.backend.pool_bytes(self.id) if self._anchor is not None else 0

    def set_default_limit(self) -> None:
        """Half of what is free, once: called after the first eager call, when weights are in."""
        if self.limit is None:
            free, _ = self.backend.memory(self.device)
            self.limit = (free + self.backend.reclaimable_bytes(self.device)) // 2


def outlives_garbage(kept: Callable[[], bool]) -> bool:
    """Whether something is kept, and still is when garbage, which waits to be collected, is gone.

    >>> outlives_garbage(lambda: True), outlives_garbage(lambda: False)
    (True, False)
    """
    if not kept():
        return False
    gc.collect()
    return kept()


def _memory_is_short(*figures: Any) -> None:
    for pool in list(_pools):
        pool.short = True
