"""What a device has to offer: segments, streams, pools and memory, and how CUDA offers them.

This module knows how one device records and replays work. It does not know what a break, a
signature or a module is. Tests bring a second implementation, a simulated device, so that the
engine's rules are checked on machines without a GPU; the engine asks `backend_for` and never names
CUDA itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch

from accel.launchable import Launchable


class Segment:
    """A stretch of device work: recorded between `begin` and `end`, replayed at will.

    One `torch.cuda.CUDAGraph`, in relaxed mode: constants are uploaded on a side stream. It holds
    no random numbers: an op that draws some raises, and leaves the recording as it was.

    >>> x, pool = torch.ones(2, device=device), backend.new_pool()
    >>> segment, stream = backend.segment(pool), backend.new_stream(x.device)
    >>> backend.wait_stream(stream, backend.current_stream(x.device))
    >>> with backend.on_stream(stream):
    ...     segment.begin()
    ...     y = x + 1
    ...     segment.end()
    ...     segment.replay()
    >>> backend.synchronize(stream)
    >>> y.tolist()
    [2.0, 2.0]
    """

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)  # else closing makes it launchable
        self._pool = pool
        self._preparation: Future[None] | None = None

    def begin(self) -> None:
        """Starts recording what the current stream is asked to do; nothing runs until `replay`.

        Torch ties the device's random generator to a recording, and no other thread may draw from
        it until that ends: a spare is put in its place for the moment in which this happens. Each
        recording has a spare of its own: torch notes there which recordings it is tied to, and
        does not expect that one begins while another thread throws one away.
        """
        device = torch.cuda.current_device()
        generator, spare = torch.cuda.default_generators[device], torch.Generator(f"cuda:{device}")
        spare.seed()  # should another thread draw just then, then not what others draw anyway
        with _generator_in_place:
            state = generator.graphsafe_get_state()
            generator.graphsafe_set_state(spare)
            try:
                self._graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            finally:
                generator.graphsafe_set_state(state)

    def end(self) -> None:
        """Closes the recording. Raises what the device reports if it could not record the work.

        An empty segment is normal here (two breaks in a row), and cannot be told from one that
        holds a Triton kernel.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            try:
                self._graph.capture_end()
            except BaseException:
                self._tell_allocator()
                raise

    def _tell_allocator(self) -> None:
        """Torch leaves this out where a recording was spoilt: its allocator would wait for the end
        of it and give no memory back to the device any more, to nobody."""
        with contextlib.suppress(RuntimeError):  # it knows
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)

    def prepare(self, stream: Any = None) -> None:
        """Begins to make a closed recording launchable, in another thread: that needs no lock of
        Python's. There it is also replayed on `stream`, if given. `ready` waits for it."""
        device = torch.cuda.current_device()
        task = functools.partial(_make_launchable, self._graph, device, stream)
        try:
            self._preparation = _preparing.submit(task)
        except RuntimeError:  # the main thread has ended, and others still serve
            task()

    def ready(self) -> None:
        """Returns when nothing is being prepared any more. Raises what the device reports if the
        segment cannot be launched."""
        preparation, self._preparation = self._preparation, None
        try:
            if preparation is not None:
                preparation.result()
        finally:
            del preparation  # it holds its error, and so the frames that this came through

    def replay(self) -> None:
        """Runs the recorded work on the current stream."""
        if self._preparation is not None:
            self.ready()
        self._graph.replay()


class RestingSegment(Segment):
    """A segment that takes the device memory that it needs to be launched at its first replay only,
    and gives it back at `rest`. The first replay after that costs the host some 0.1 ms.

    >>> x, pool = torch.ones(2, device=device), backend.new_pool()
    >>> segment, stream = backend.resting_segment(pool), backend.new_stream(x.device)
    >>> backend.wait_stream(stream, backend.current_stream(x.device))
    >>> with backend.on_stream(stream):
    ...     segment.begin()
    ...     y = x.add_(1)
    ...     segment.end()
    ...     segment.replay()
    ...     segment.rest()
    ...     segment.replay()
    >>> backend.synchronize(stream)
    >>> y.tolist()
    [3.0, 3.0]
    """

    _launchable: Launchable | None = None

    def prepare(self, stream: Any = None) -> None:
        """Replays it on `stream`, if given; otherwise there is nothing to do before a replay."""
        if stream is not None:
            with torch.cuda.stream(stream):
                self.replay()

    def replay(self) -> None:
        """As `Segment.replay`."""
        if self._launchable is None:
            self._launchable = Launchable(self._graph)
        self._launchable.launch()

    def rest(self) -> None:
        """Gives back what the next replay will take again; work that is under way ends first."""
        self._launchable = None


_preparing = ThreadPoolExecutor(1, "accel-preparing")


def _make_launchable(graph: torch.cuda.CUDAGraph, device: int, stream: Any) -> None:
    with torch.cuda.device(device):
        graph.instantiate()
        if stream is not None:
            with torch.cuda.stream(stream):
                graph.replay()


_generator_in_place = threading.RLock()  # a finalizer may ask for the state meanwhile
"""Held while a device's random generator is not its own: two threads that put theirs in its place
would leave one behind, and whoever reads or sets its state would read or set a spare's."""


class Backend:
    """CUDA: how it records, where its memory is, what it has left.

    Streams and events are torch's own, in the engine as in here only handed on. `address`, called
    for every tensor of every recorded op, and `storage` have no Python frame of ours in between.

    >>> x = torch.ones(3, device=device)
    >>> backend.address(x[1:]) - backend.address(x), backend.is_capturing()
    (4, False)
    """

    device_type = "cuda"
    tensor_types: tuple[type[torch.Tensor], ...] = (torch.Tensor, torch.nn.Parameter)
    """Classes whose instances are plain device tensors, not subclasses to look inside of."""
    now = staticmethod(time.perf_counter)
    """Host time in seconds, from a clock that only goes forward."""
    address = staticmethod(torch.Tensor.data_ptr)
    """Where a tensor's first element lies, in bytes; 0 if it has none."""
    storage = staticmethod(torch.Tensor.untyped_storage)
    """The storage with a tensor's bytes: identity, address and size of the real memory."""

    segment = staticmethod(Segment)
    """A new segment whose memory comes from a pool (an id from `new_pool`)."""
    resting_segment = staticmethod(RestingSegment)
    """A new one that can rest."""
    new_pool: Callable[[], Any] = staticmethod(torch.cuda.graph_pool_handle)
    """A new, hashable pool id."""
    new_stream: Callable[[torch.device], Any] = staticmethod(torch.cuda.Stream)
    """A new stream of a device."""
    current_stream: Callable[[torch.device], Any] = staticmethod(torch.cuda.current_stream)
    """The calling thread's current stream of a device."""
    stream_id: Callable[[int], Any] = staticmethod(getattr(torch._C, "_cuda_getCurrentStream", id))
    """What tells the current stream of the device of that number from others, without the stream
    object itself: making one takes the host several calls. Torch without CUDA lacks it."""
    on_stream: Callable[[Any], AbstractContextManager[Any]] = staticmethod(torch.cuda.stream)
    """Makes a stream the calling thread's current one for the length of the context."""
    wait_stream: Callable[[Any, Any], None] = staticmethod(torch.cuda.Stream.wait_stream)
    """Work queued on the first stream from now on starts after all that is queued on the other."""
    wait_event: Callable[[Any, Any], None] = staticmethod(torch.cuda.Stream.wait_event)
    """Work queued on a stream from now on starts after an event."""
    synchronize: Callable[[Any], None] = staticmethod(torch.cuda.Stream.synchronize)
    """Blocks the host until a stream has no work left."""
    memory: Callable[[torch.device], tuple[int, int]] = staticmethod(torch.cuda.mem_get_info)
    """(free, total) bytes of a device, as its driver sees them."""
    reserved_bytes: Callable[[torch.device], int] = staticmethod(torch.cuda.memory_reserved)
    """Bytes that the allocator of a device holds, pools included."""
    empty_cache: Callable[[], None] = staticmethod(torch.cuda.empty_cache)
    """Gives the allocator's unused memory back to the device."""

    def record_event(self, stream: Any, timing: bool = False) -> Any:
        """An event at the end of what is queued on `stream`, able to tell time if asked."""
        return stream.record_event(torch.cuda.Event(enable_timing=timing))

    def is_capturing(self) -> bool:
        """Whether the calling thread's current stream is recording, for anyone."""
        return torch._C._cuda_isCurrentStreamCapturing()

    @contextlib.contextmanager
    def hide_capturing(self) -> Iterator[None]:
        """While open, code of the calling thread that asks whether a stream records hears no (the
        mask code of transformers builds another mask, for another kernel, when it hears yes)."""
        torch.cuda.is_current_stream_capturing = _visible_capture
        outer, _hiding.now = getattr(_hiding, "now", False), True
        try:
            yield
        finally:
            _hiding.now = outer

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over the same memory as `tensor` that does not keep that memory alive."""
        held = tensor.untyped_storage()
        storage = torch._C._construct_storage_from_data_pointer(
            held.data_ptr(), tensor.device, held.nbytes()
        )
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def live_blocks(self, pool: Any) -> set[int]:
        """Addresses of the blocks of `pool` that a tensor still owns."""
        return {
            block["address"]
            for segment in _segments_of(pool)
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        }

    def pool_bytes(self, pool: Any) -> int:
        """Bytes of device memory that `pool` has reserved."""
        return sum(segment["total_size"] for segment in _segments_of(pool))

    def reclaimable_bytes(self, device: torch.device) -> int:
        """Bytes that the allocator holds and no tensor uses: what `empty_cache` could give back."""
        return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def rng_state(self, device: torch.device) -> torch.Tensor:
        """The state of the default random generator of a device."""
        with _generator_in_place:
            return torch.cuda.get_rng_state(device)

    def set_rng_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Sets the state that `rng_state` gave."""
        with _generator_in_place:
            torch.cuda.set_rng_state(state, device)

    def on_out_of_memory(self, call: Callable[..., None]) -> None:
        """Has `call` run whenever an allocation fails, in anyone's code, until the process ends."""
        torch._C._cuda_attach_out_of_memory_observer(call)  # type: ignore[attr-defined]

    def warm_libraries(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        """Makes the math libraries' handles for the calling thread, which no recording can, and
        their scratch memory for the current stream, whose address recorded work keeps: in memory
        that goes to nothing else, ever. Dropping scratch memory instead (torch knows only all of
        it at once) would take it from under the feet of other threads. (cuDNN makes its handles
        inside a relaxed recording without complaint: tried.) The first product in another `dtype`
        than the process has used takes 70 ms, to load its kernel."""
        stream = torch.cuda.current_stream(device)
        with torch.no_grad(), torch.cuda.use_mem_pool(_scratch_pool(stream.cuda_stream), device):
            torch.cuda.current_blas_handle()
            x = torch.zeros(16, 16, dtype=dtype, device=device)
            torch._C._nn.linear(x, x, x[0])  # another library's, with memory of its own


@functools.cache
def _scratch_pool(stream: int) -> torch.cuda.MemPool:
    pool = torch.cuda.MemPool()
    keep_for_ever(pool)
    return pool


def _segments_of(pool: Any) -> list[dict[str, Any]]:
    """What the allocator reserved for `pool`. Torch 2.11 takes a reference from each argument that
    it does not hold, and so frees ids that are in use: they get one more."""
    for argument in (*pool, False):
        keep_for_ever(argument)
    return torch.cuda.memory_snapshot(pool, include_traces=False)  # type: ignore[no-any-return]


def keep_for_ever(thing: object) -> None:
    """Has `thing` outlive the process: destructors of what a failed recording leaves behind, and of
    memory pools after one, can abort it, at its end too.

    >>> import sys
    >>> thing = object()
    >>> before = sys.getrefcount(thing)
    >>> keep_for_ever(thing)
    >>> sys.getrefcount(thing) - before
    1
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


_hiding = threading.local()


def _visible_capture() -> bool:
    """What torch's own function answers, except in a thread that hides its recording. It stays in
    place once installed: taking it away would race with recordings of other threads."""
    return not getattr(_hiding, "now", False) and torch._C._cuda_isCurrentStreamCapturing()


_makers: dict[str, Callable[[], Backend]] = {}


def register_backend(device_type: str, factory: Callable[[], Any]) -> None:
    """Makes `factory` the maker of the backend for devices of type `device_type`.

    >>> register_backend("cuda", Backend)
    """
    _makers[device_type] = functools.cache(factory)


def backend_for(device: torch.device | str) -> Backend | None:
    """The backend for `device`, or None where nothing can be recorded (the CPU, say).

    >>> backend_for("cpu") is None
    True
    """
    maker = _makers.get(torch.device(device).type)
    return None if maker is None else maker()


register_backend("cuda", Backend)
