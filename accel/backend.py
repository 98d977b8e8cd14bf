"""What a segment, a stream and a pool are: a small protocol and its CUDA implementation.

This module knows how one device records and replays work. It does not know what a break, a
signature or a module is. Tests bring a second implementation, a simulated device, so that the
engine's rules are checked on machines without a GPU; the engine asks `backend_for` and never names
CUDA itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Segment(Protocol):
    """A stretch of device work: recorded between `begin` and `end`, replayed at will."""

    def begin(self) -> None:
        """Starts recording what the current stream is asked to do; nothing runs until `replay`."""

    def end(self) -> None:
        """Closes the recording. Raises what the device reports if it could not record the work."""

    def replay(self) -> None:
        """Runs the recorded work on the current stream."""


class Event(Protocol):
    """A point in a stream's work (`torch.cuda.Event` is one)."""

    def synchronize(self) -> None:
        """Blocks the host until the device has passed this point."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds of device time from this point to `end_event`."""


class Backend(Protocol):
    """One kind of device: how it records, where its memory is, what it has left."""

    device_type: str
    tensor_types: tuple[type[torch.Tensor], ...]
    """Classes whose instances are plain device tensors, not subclasses to look inside of."""

    def now(self) -> float:
        """Host time in seconds, from a clock that only goes forward."""

    def address(self, tensor: torch.Tensor) -> int:
        """Where `tensor`'s first element lies, in bytes; 0 if it has none."""

    def segment(self, pool: Any) -> Segment:
        """A new segment whose memory comes from `pool` (an id from `new_pool`)."""

    def new_pool(self) -> Any:
        """A new, hashable pool id."""

    def new_stream(self, device: torch.device) -> Any:
        """A new stream of `device`."""

    def current_stream(self, device: torch.device) -> Any:
        """The calling thread's current stream of `device`."""

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes `stream` the calling thread's current stream for the length of the context."""

    def wait_stream(self, stream: Any, awaited: Any) -> None:
        """Work queued on `stream` from now on starts after all that is queued on `awaited`."""

    def record_event(self, stream: Any, timing: bool = False) -> Event:
        """An event at the end of what is queued on `stream`, able to tell time if asked."""

    def wait_event(self, stream: Any, event: Event) -> None:
        """Work queued on `stream` from now on starts after `event`."""

    def synchronize(self, stream: Any) -> None:
        """Blocks the host until `stream` has no work left."""

    def is_capturing(self) -> bool:
        """Whether the calling thread's current stream is recording, for anyone."""

    def hide_capturing(self) -> AbstractContextManager[Any]:
        """While open, code of the calling thread that asks whether a stream records hears no."""

    def storage(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        """The storage with `tensor`'s bytes: identity, address and size of the real memory."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over the same memory as `tensor` that does not keep that memory alive."""

    def live_blocks(self, pool: Any) -> set[int]:
        """Addresses of the blocks of `pool` that a tensor still owns."""

    def pool_bytes(self, pool: Any) -> int:
        """Bytes of device memory that `pool` has reserved."""

    def memory(self, device: torch.device) -> tuple[int, int]:
        """(free, total) bytes of `device`, as its driver sees them."""

    def reserved_bytes(self, device: torch.device) -> int:
        """Bytes that the allocator of `device` holds, pools included."""

    def reclaimable_bytes(self, device: torch.device) -> int:
        """Bytes that the allocator holds and no tensor uses: what `empty_cache` could give back."""

    def empty_cache(self) -> None:
        """Gives the allocator's unused memory back to the device."""

    def rng_state(self, device: torch.device) -> torch.Tensor:
        """The state of the default random generator of `device`."""

    def set_rng_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Sets the state that `rng_state` gave."""

    def warm_libraries(self, device: torch.device) -> None:
        """Makes the math libraries' handles for the current stream: no recording can."""

    def clear_workspaces(self) -> None:
        """Drops the math libraries' scratch memory, so that the next recording makes its own."""


_factories: dict[str, Callable[[], Backend]] = {}
_instances: dict[str, Backend] = {}


def register_backend(device_type: str, factory: Callable[[], Backend]) -> None:
    """Makes `factory` the maker of the backend for devices of type `device_type`.

    >>> register_backend("cuda", CudaBackend)
    """
    _factories[device_type] = factory
    _instances.pop(device_type, None)


def backend_for(device: torch.device | str) -> Backend | None:
    """The backend for `device`, or None where nothing can be recorded (the CPU, say).

    >>> backend_for("cpu") is None
    True
    """
    kind = torch.device(device).type
    if kind not in _instances and kind in _factories:
        _instances[kind] = _factories[kind]()
    return _instances.get(kind)


class CudaSegment:
    """One `torch.cuda.CUDAGraph`, in relaxed mode: constants are uploaded on a side stream."""

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def begin(self) -> None:
        self._graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")

    def end(self) -> None:
        with warnings.catch_warnings():
            # An empty segment is normal here (two breaks in a row), and cannot be told from one
            # that holds a Triton kernel.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


class CudaBackend:
    """CUDA through torch's own graphs, streams and caching allocator."""

    device_type = "cuda"
    tensor_types: tuple[type[torch.Tensor], ...] = (torch.Tensor, torch.nn.Parameter)
    now = staticmethod(time.perf_counter)
    # Called for every tensor of every recorded op: no Python frame of ours in between.
    address = staticmethod(torch.Tensor.data_ptr)
    storage = staticmethod(torch.Tensor.untyped_storage)

    def segment(self, pool: Any) -> Segment:
        return CudaSegment(pool)

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def new_stream(self, device: torch.device) -> Any:
        return torch.cuda.Stream(device)

    def current_stream(self, device: torch.device) -> Any:
        return torch.cuda.current_stream(device)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def wait_stream(self, stream: Any, awaited: Any) -> None:
        stream.wait_stream(awaited)

    def record_event(self, stream: Any, timing: bool = False) -> Event:
        event = torch.cuda.Event(enable_timing=timing)
        event.record(stream)
        return event

    def wait_event(self, stream: Any, event: Event) -> None:
        stream.wait_event(event)

    def synchronize(self, stream: Any) -> None:
        stream.synchronize()

    def is_capturing(self) -> bool:
        return torch._C._cuda_isCurrentStreamCapturing()

    def hide_capturing(self) -> AbstractContextManager[Any]:
        return _hidden_capture()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        held = tensor.untyped_storage()
        storage = torch._C._construct_storage_from_data_pointer(
            held.data_ptr(), tensor.device, held.nbytes()
        )
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def live_blocks(self, pool: Any) -> set[int]:
        return {
            block["address"]
            for segment in torch.cuda.memory_snapshot(pool, include_traces=False)
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        }

    def pool_bytes(self, pool: Any) -> int:
        snapshot = torch.cuda.memory_snapshot(pool, include_traces=False)
        return sum(segment["total_size"] for segment in snapshot)

    def memory(self, device: torch.device) -> tuple[int, int]:
        return torch.cuda.mem_get_info(device)

    def reserved_bytes(self, device: torch.device) -> int:
        return torch.cuda.memory_reserved(device)

    def reclaimable_bytes(self, device: torch.device) -> int:
        return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def rng_state(self, device: torch.device) -> torch.Tensor:
        return torch.cuda.get_rng_state(device)

    def set_rng_state(self, device: torch.device, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, device)

    def warm_libraries(self, device: torch.device) -> None:
        # cuDNN makes its handle inside a relaxed recording without complaint (tried).
        torch.cuda.current_blas_handle()

    def clear_workspaces(self) -> None:
        torch._C._cuda_clearCublasWorkspaces()


_hiding = threading.local()


@contextlib.contextmanager
def _hidden_capture() -> Iterator[None]:
    """Answers no to `torch.cuda.is_current_stream_capturing` in this thread (the mask code of
    transformers builds another mask, for another kernel, when it hears yes)."""
    _hiding.depth = getattr(_hiding, "depth", 0) + 1
    torch.cuda.is_current_stream_capturing = _visible_capture
    try:
        yield
    finally:
        _hiding.depth -= 1


def _visible_capture() -> bool:
    """What torch's own function answers, except in a thread that hides its recording. It stays in
    place once installed: taking it away would race with recordings of other threads."""
    return not getattr(_hiding, "depth", 0) and torch._C._cuda_isCurrentStreamCapturing()


register_backend("cuda", CudaBackend)
