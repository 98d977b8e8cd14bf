"""Breaks: Python, or one op, between two segments, that runs again on every replay.

This module knows how a break's arguments are held, how its results reach the next segment and when
what it brought to the host no longer fits. It does not know which ops need a break (record.py) nor
how a recording is cut (graph.py).
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accel.guard import Ambient
from accel.layout import bytes_of, distinct, laid_out, like_in_memory
from accel.memory import Pool
from accel.signature import leaves, map_tree


class GuardMiss(Exception):
    """A replay met a value on the host that its recording had met otherwise.

    >>> from accel.graph import BreakableGraph, capture
    >>> x = torch.zeros(1, device=device)
    >>> graph = BreakableGraph(Pool(device))
    >>> with capture(graph):
    ...     y = x + x.item()
    >>> _ = x.fill_(1)
    >>> graph.replay()
    Traceback (most recent call last):
    accel.breaks.GuardMiss: aten::_local_scalar_dense returned 1.0, in the recording 0.0
    """

    owner: type[nn.Module] | None = None
    """The class of the innermost module around what was guarded, if there is one."""


class Break:
    """A function that runs on every replay, with the arguments and in the context of its recording.

    Arguments that were born in the recording are held as aliases without ownership, so that a chain
    of segments needs the memory of the largest and not of the sum. Of what it returns, device
    tensors get a boundary buffer each, except those that it was given (an `out` argument, or a view
    of one). What reached the host steered Python: it has to come back byte for byte, `guarded`.
    Without `ambient` it runs in whatever context the replay is in.

    >>> from accel.graph import BreakableGraph, capture
    >>> graph = BreakableGraph(Pool(device))
    >>> with capture(graph):
    ...     one = torch.ones(1, device=device).item()
    >>> [(step.what, step.guarded) for step in graph.steps if isinstance(step, Break)]
    [('aten::_local_scalar_dense', True)]
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        pool: Pool,
        kind: str = "automatic",
        ambient: Ambient | None = None,
    ) -> None:
        self.what = getattr(function, "__qualname__", None) or str(function)
        self.where, self.owner = _caller()
        self.kind, self.guarded = kind, False
        self.buffers: list[torch.Tensor] = []
        self._function, self._args, self._kwargs = function, args, kwargs
        self._pool, self._ambient = pool, ambient
        self._targets: list[Any] = []

    def first_run(self) -> Any:
        """Runs the function with the live arguments, then exchanges those for aliases. Returns what
        the model gets."""
        storage, alias = self._pool.backend.storage, self._pool.backend.alias
        result = self._run()
        born, kept = self._pool.backend.live_blocks(self._pool.id), dict[int, torch.Tensor]()

        def keep(x: Any) -> Any:
            if not on_device(x):
                return x
            if id(x) not in kept:
                kept[id(x)] = alias(x) if storage(x).data_ptr() in born else _without_base(x)
            return kept[id(x)]

        self._args, self._kwargs = map_tree(keep, self._args), map_tree(keep, self._kwargs)
        given = {storage(x).data_ptr() for x in kept.values()}

        def receive(x: Any) -> Any:
            if on_device(x) and storage(x).data_ptr() not in given:
                x = self._buffered(x)
                self.buffers.append(x)
                self._targets.append(x)
                # An object of the model's own: that it is kept shows in the number of holders.
                return laid_out(x, storage(x), x.storage_offset())
            self._targets.append(x.clone() if isinstance(x, torch.Tensor) and x.is_cpu else keep(x))
            return x

        self.guarded = not all(x is None or on_device(x) for x in leaves(result))
        self._settle()
        return map_tree(receive, result)

    def _buffered(self, x: torch.Tensor) -> torch.Tensor:
        buffer = like_in_memory(x, self._pool.backend)
        distinct(buffer).copy_(distinct(x))
        return buffer

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every device tensor that this break keeps."""
        return [x for x in leaves([self._args, self._kwargs, self.buffers]) if on_device(x)]

    def replay(self) -> None:
        """Runs the function and puts what it returns where the recording expects it. Raises
        `GuardMiss` if it does not fit."""
        news = leaves(self._run())
        self._settle()
        if len(news) != len(self._targets):
            raise self._miss("returned another structure")
        for new, old in zip(news, self._targets, strict=True):
            if isinstance(old, torch.Tensor):
                self._deliver(new, old)
            elif type(new) is not type(old) or repr(new) != repr(old):
                raise self._miss(f"returned {new!r}, in the recording {old!r}")

    def _miss(self, how: str) -> GuardMiss:
        miss = GuardMiss(f"{self.what} {how}")
        miss.owner = self.owner
        return miss

    def _deliver(self, new: Any, old: torch.Tensor) -> None:
        if not isinstance(new, torch.Tensor) or (new.device, new.dtype) != (old.device, old.dtype):
            raise self._miss("returned another kind of value")
        if new.shape != old.shape:
            shapes = f"shape {tuple(new.shape)}, in the recording {tuple(old.shape)}"
            raise self._miss(f"returned {shapes}")
        address = self._pool.backend.address
        if old.is_cpu:
            if not torch.equal(bytes_of(new), bytes_of(old)):
                raise self._miss("brought other values to the host")
        elif (address(new), new.stride()) != (address(old), old.stride()):
            distinct(old).copy_(distinct(new) if new.stride() == old.stride() else new)

    def _run(self) -> Any:
        with self._ambient.restored() if self._ambient else contextlib.nullcontext():
            return self._function(*self._args, **self._kwargs)

    def _settle(self) -> None:
        """Waits for copies to pinned host memory, which return before they are done."""
        if self.guarded:
            backend = self._pool.backend
            backend.synchronize(backend.current_stream(self._pool.device))


def _without_base(x: Any) -> Any:
    """`x`, or where it is a view another that keeps nothing but the memory: the tensor that `x` is
    a view of would be taken for one that the model keeps."""
    return x if x._base is None else laid_out(x, x.untyped_storage(), x.storage_offset())


def on_device(x: Any) -> bool:
    """Whether `x` is a tensor on a device, not on the host.

    >>> on_device(torch.ones(1)), on_device(torch.ones(1, device=device)), on_device(1)
    (False, True, False)
    """
    return isinstance(x, torch.Tensor) and not x.is_cpu


def _caller() -> tuple[str, type[nn.Module] | None]:
    """What led to a break, outside torch and us: the nearest source line, the nearest module."""
    where = "unknown"
    for frame, line in traceback.walk_stack(None):
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(
            ("torch.", "accel.breaks", "accel.graph", "accel.record", "contextlib")
        ):
            if where == "unknown":
                where = f"{frame.f_code.co_filename.split('/site-packages/')[-1]}:{line}"
            if isinstance(owner := _self_of(frame), nn.Module):
                return where, type(owner)
    return where, None


def _self_of(frame: types.FrameType) -> Any:
    """`self` in a function's frame. Before Python 3.13 a look at its variables leaves a copy there,
    which would keep tensors alive until the function ends."""
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return None
    variables = frame.f_locals
    owner = variables.get("self")
    if isinstance(variables, dict):
        variables.clear()
    return owner
