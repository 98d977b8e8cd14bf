"""Recorded work made launchable, and given back, through the driver.

Torch keeps what it has made launchable until the recording is gone, and the driver some 150 KiB of
device memory for each. What is given back here goes to whatever is made launchable next.

Knows the driver's calls. Does not know what was recorded, nor what rests when (prefill/graphs.py).
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import Any

import torch

OUT_OF_MEMORY = 2
"""What the driver answers where memory is lacking."""


class Launchable:
    """What the driver has made of a closed recording, `torch.cuda.CUDAGraph(keep_graph=True)`, of
    the current device. Given back with this object; work that is under way ends first. Raises
    RuntimeError, or OutOfMemoryError, if the driver refuses.

    >>> Launchable(None)
    Traceback (most recent call last):
    AttributeError: 'NoneType' object has no attribute 'raw_cuda_graph'
    """

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._handle = ctypes.c_void_p()
        recorded = ctypes.c_void_p(graph.raw_cuda_graph())
        _ask("cuGraphInstantiateWithFlags", ctypes.byref(self._handle), recorded, _NO_FLAGS)
        given_back = weakref.finalize(self, _driver().cuGraphExecDestroy, self._handle)
        given_back.atexit = False  # the process's end gives everything back, in no order

    def launch(self) -> None:
        """Queues the recorded work on the current stream."""
        _ask("cuGraphLaunch", self._handle, ctypes.c_void_p(_stream()))


_NO_FLAGS = ctypes.c_ulonglong(0)


def _stream() -> int:
    handle: int = torch.cuda.current_stream().cuda_stream
    return handle


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _ask(function: str, *args: Any) -> None:
    error = getattr(_driver(), function)(*args)
    if error == OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"CUDA out of memory in {function}")
    if error:
        raise RuntimeError(f"CUDA error {error} in {function}")
