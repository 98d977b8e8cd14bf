"""BreakableGraph: segments, breaks and boundary buffers.

A graph is an ordered list of steps. A segment is recorded device work; a break is Python, or one
op, that runs again on every replay. This module knows how a recording is cut into them and how a
break's results reach the next segment. It does not know which ops need a break (record.py) nor when
to record (runner.py).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import nn

from accel.backend import Backend
from accel.guard import Ambient, Held
from accel.memory import Pool
from accel.reporting import BreakReport
from accel.signature import (
    Uncapturable,
    bytes_of,
    distinct,
    laid_out,
    leaves,
    like_in_memory,
    map_tree,
)

P = ParamSpec("P")
R = TypeVar("R")

OURS, ARGUMENT, WEIGHT = "", "an argument", "a weight"
"""Where storages come from that a recording meets."""


class GuardMiss(Exception):
    """A replay met a value on the host that its recording had met otherwise.

    >>> x = torch.zeros(1, device=device)
    >>> graph = BreakableGraph(Pool(device))
    >>> with capture(graph):
    ...     y = x + x.item()
    >>> _ = x.fill_(1)
    >>> graph.replay()
    Traceback (most recent call last):
    accel.graph.GuardMiss: aten::_local_scalar_dense returned 1.0, in the recording 0.0
    """

    owner: type[nn.Module] | None = None
    """The class of the innermost module around what was guarded, if there is one."""


class Refused(Uncapturable):
    """The call cannot be replayed rightly, for the reason given; it has to run eagerly.

    >>> with capture(BreakableGraph(Pool(device))):
    ...     y = torch.rand(1).to(device)
    Traceback (most recent call last):
    accel.graph.Refused: the forward draws random numbers on the host
    """

    def __init__(self, reason: str, passing: bool = False) -> None:
        super().__init__(reason)
        if (recording := current_recording()) is not None:
            recording.refusal = self  # the forward may catch it, and go on
        self.passing = passing
        """Whether it may have been another thread's doing, and a later call is worth a try."""


class BreakableGraph:
    """A recorded forward pass: `replay` runs its segments and breaks in order.

    `pool` is where its memory comes from; graphs that share a pool never run at the same time.

    >>> x = torch.ones(3, device=device)
    >>> graph = BreakableGraph(Pool(device))
    >>> with capture(graph):
    ...     y = x + 1
    >>> _ = x.fill_(5)
    >>> graph.replay()
    >>> y.tolist()
    [6.0, 6.0, 6.0]
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.steps: list[Any] = []
        self.breaks: list[BreakReport] = []
        self.held: list[Any] = []
        self.operations = 0

    def replay(self) -> None:
        """Runs every step on the current stream. Raises `GuardMiss` if a guarded value differs: all
        that ran up to there wrote to the graph's own memory only, so the caller can run eagerly."""
        with self.pool.use():
            if not self.breaks:
                for segment in self.steps:
                    segment.replay()
                return
            with torch.inference_mode(False), torch.no_grad():
                for step in self.steps:
                    step.replay()

    @property
    def segments(self) -> int:
        """How many stretches of recorded work there are."""
        return len(self.steps) - len(self.breaks)

    def discard(self) -> None:
        """Lets go of everything; the segments stay parked until their pool's generation ends."""
        self.pool.bury([step for step in self.steps if not isinstance(step, Break)])
        self.steps, self.held = [], []


class Break:
    """A function that runs on every replay, with the arguments and in the context of its recording.

    Arguments that were born in the recording are held as aliases without ownership, so that a chain
    of segments needs the memory of the largest and not of the sum. Of what it returns, device
    tensors get a boundary buffer each, except those that it was given (an `out` argument, or a view
    of one). What reached the host steered Python: it has to come back byte for byte, `guarded`.

    >>> graph = BreakableGraph(Pool(device))
    >>> with capture(graph):
    ...     one = torch.ones(1, device=device).item()
    >>> [(step.what, step.guarded) for step in graph.steps if isinstance(step, Break)]
    [('aten::_local_scalar_dense', True)]
    """

    def __init__(
        self, function: Callable[..., Any], args: Any, kwargs: Any, pool: Pool, ambient: Any
    ) -> None:
        self.what = getattr(function, "__qualname__", None) or str(function)
        self.where, self.owner = _caller()
        self.guarded = False
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
            if not _on_device(x):
                return x
            if id(x) not in kept:
                kept[id(x)] = alias(x) if storage(x).data_ptr() in born else x
            return kept[id(x)]

        self._args, self._kwargs = map_tree(keep, self._args), map_tree(keep, self._kwargs)
        given = {storage(x).data_ptr() for x in kept.values()}

        def receive(x: Any) -> Any:
            if _on_device(x) and storage(x).data_ptr() not in given:
                x = self._buffered(x)
                self.buffers.append(x)
                self._targets.append(x)
                # An object of the model's own: that it is kept shows in the number of holders.
                return laid_out(x, storage(x), x.storage_offset())
            self._targets.append(x.clone() if isinstance(x, torch.Tensor) and x.is_cpu else keep(x))
            return x

        self.guarded = not all(x is None or _on_device(x) for x in leaves(result))
        self._settle()
        return map_tree(receive, result)

    def _buffered(self, x: torch.Tensor) -> torch.Tensor:
        buffer = like_in_memory(x, self._pool.backend)
        distinct(buffer).copy_(distinct(x))
        return buffer

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every device tensor that this break keeps."""
        return [x for x in leaves([self._args, self._kwargs, self.buffers]) if _on_device(x)]

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


def _on_device(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not x.is_cpu


class Recording:
    """A graph in the making: opens and closes segments around breaks.

    A segment is replayed as soon as it closes, so that break bodies, and the call that is being
    recorded, see true values. `origins` tells, by address, what storages are that need not be held.

    >>> with capture(BreakableGraph(Pool(device))) as recording:
    ...     with recording.interrupted():
    ...         value = torch.ones(1, device=device).item()
    >>> value, recording.graph.segments
    (1.0, 2)
    """

    def __init__(self, graph: BreakableGraph, origins: Mapping[int, str]) -> None:
        self.graph = graph
        self.origins = dict(origins)
        """What the storages are that this recording has met, by address: OURS, or in words."""
        self.known: set[int] = set()
        """Addresses of device tensors that need no second look."""
        self.held = Held()
        self.effect: str | None = None
        """The first thing that a replay could not take back; no guard may follow it."""
        self.refusal: Refused | None = None
        """Why no replay could be right, once that is known."""
        self._made: list[torch.UntypedStorage] = []
        self.paused = self._was_cut = False
        self._undo: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._segment: Any = None

    def open(self) -> None:
        """Begins the next segment."""
        pool = self.graph.pool
        self._segment = pool.backend.segment(pool.id)
        pool.backend.clear_workspaces()
        self._segment.begin()

    def close(self) -> None:
        """Ends the open segment and runs it for the first time."""
        self._segment.end()
        segment, self._segment = self._segment, None
        self.graph.pool.backend.clear_workspaces()
        self.graph.steps.append(segment)
        segment.replay()

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        """Runs the body eagerly, between two segments: nothing inside is recorded or breaks."""
        self.close()
        _thread.recording, self.paused = None, True
        try:
            yield
        finally:
            _thread.recording = self
        self.open()
        self.paused = False  # not before: opening a segment writes the generator's seed

    def cut(self) -> None:
        """Ends a segment without a break: the device runs it while the host records the next."""
        self._was_cut = True
        with self.interrupted():
            pass

    def run_break(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        pure: bool,
        ambient: Ambient | None = None,
        kind: str = "automatic",
    ) -> Any:
        """Runs `function` as a break, in the context of `ambient`, and returns its result in
        buffers. Raises `Refused` if a guard would have to undo what cannot be undone."""
        step = Break(function, args, kwargs, self.graph.pool, ambient)
        with self.interrupted():
            result = step.first_run()
        if step.guarded and self.effect is not None:
            raise Refused(f"{step.what} brings a value to the host after {self.effect}")
        if step.guarded and not pure:
            raise Refused(f"{step.what} returns host values: only a pure break may (pure=True)")
        if not pure:
            self.effect = self.effect or f"the break {step.what} has run"
        self.graph.steps.append(step)
        self.graph.breaks.append(BreakReport(step.where, step.what, kind, step.guarded))
        self.adopt([x for x in leaves(result) if not _on_device(x)])
        self.adopt(step.buffers)
        return result

    def adopt(self, made: list[Any]) -> None:
        """Notes tensors as made by this recording. Those on the host are constants, kept so that
        their addresses stay their own."""
        for x in made:
            if isinstance(x, torch.Tensor):
                storage = self.graph.pool.backend.storage(x)
                self.origins[storage.data_ptr()] = OURS
                if x.is_cpu:
                    self._made.append(storage)

    def note_effect(self, written: torch.Tensor, effect: str) -> None:
        """Recorded work is about to write a tensor from outside: its value is kept for `undo`."""
        self.effect = self.effect or effect
        storage = self.graph.pool.backend.storage(written)
        if storage.data_ptr() not in self._undo:
            with self.interrupted():
                elements = storage.nbytes() // written.element_size()
                whole = written.as_strided((elements,), (1,), 0)
                self._undo[storage.data_ptr()] = whole, whole.clone()

    def abort(self) -> None:
        """Ends a recording that failed and leaves the process usable. Writes outside the recording
        are taken back, for the eager rerun."""
        pool, segment = self.graph.pool, self._segment
        self._segment = None
        if segment is not None:
            try:
                segment.end()
                pool.bury([segment])
            except Exception:
                pool.may_cut &= not self._was_cut
                pool.abandon(segment)
                self.graph.steps = []
        self.graph.discard()
        for written, before in self._undo.values():
            written.copy_(before)


_thread = threading.local()


def current_recording() -> Recording | None:
    """The calling thread's open recording, if any.

    >>> with capture(BreakableGraph(Pool(device))) as recording:
    ...     current_recording() is recording
    True
    >>> current_recording() is None
    True
    """
    return getattr(_thread, "recording", None)


@contextlib.contextmanager
def capture(
    graph: BreakableGraph,
    *,
    automatic: bool = True,
    origins: Mapping[int, str] = types.MappingProxyType({}),
) -> Iterator[Recording]:
    """Records what the body does into `graph`, running it at the same time.

    `automatic` finds and breaks ops that cannot be recorded; without it every break must be
    explicit (`eager_on_graph`, `break_graph`) and recording costs nothing an op. `origins` tells,
    by address, what storages are that need not be held: ARGUMENT, WEIGHT. Raises what the body
    raises, or `Refused`; the process and the pool stay usable.

    >>> x = torch.ones(2, device=device)
    >>> graph = BreakableGraph(Pool(device))
    >>> with capture(graph):
    ...     doubled = x * 2
    ...     host = doubled.tolist()
    ...     y = doubled + host[0]
    >>> graph.segments, [b.kind for b in graph.breaks], y.tolist()
    (2, ['automatic'], [4.0, 4.0])
    """
    from accel.record import watched  # record.py builds on this module

    recording = Recording(graph, origins)
    with graph.pool.recording(), _surroundings(graph.pool.backend, recording):
        try:
            recording.open()
            with watched(recording) if automatic else contextlib.nullcontext():
                yield recording
            if recording.refusal is not None:
                raise recording.refusal
            recording.close()
        except BaseException:
            recording.abort()
            raise


@contextlib.contextmanager
def _surroundings(backend: Backend, recording: Recording) -> Iterator[None]:
    """How torch and Python are set while recording.

    A weight cast while recording would stay in autocast's cache, in the graph's memory. A garbage
    collection may destroy someone's graphs and events, and takes longer than the recording.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(backend.hide_capturing())
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        stack.callback(gc.enable if gc.isenabled() else gc.disable)
        gc.disable()
        stack.callback(setattr, _thread, "recording", current_recording())
        _thread.recording = recording
        yield


@overload
def eager_on_graph(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def eager_on_graph(*, pure: bool) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def eager_on_graph(function: Callable[P, R] | None = None, /, *, pure: bool = False) -> Any:
    """Makes a function an explicit break: a recording runs it eagerly, and so does every replay.

    It must return device tensors, of the same shapes each time, or None. A `pure` function has no
    effect but its result and may return host values too: they are guarded. Outside a recording the
    function is what it was.

    >>> calls = []
    >>> @eager_on_graph
    ... def count(x):
    ...     calls.append(1)
    ...     return x + len(calls)
    >>> x = torch.zeros(1, device=device)
    >>> graph = BreakableGraph(Pool(device))
    >>> with capture(graph):
    ...     y = count(x * 2) * 10
    >>> graph.replay()
    >>> y.item(), graph.segments
    (20.0, 2)
    """
    if function is None:
        return functools.partial(eager_on_graph, pure=pure)
    return as_break(function, pure, "explicit")


def as_break(function: Callable[..., R], pure: bool, kind: str) -> Callable[..., R]:
    """`function`, a break of that kind wherever it is recorded (see `eager_on_graph`).

    >>> with capture(BreakableGraph(Pool(device))) as recording:
    ...     y = as_break(torch.ones, pure=True, kind="module")(2, device=device)
    >>> recording.graph.breaks[0].kind
    'module'
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        recording = current_recording()
        if recording is None:
            return function(*args, **kwargs)
        ambient = Ambient(recording.graph.pool.device.type)
        return recording.run_break(function, args, kwargs, pure, ambient, kind)

    return run


@eager_on_graph(pure=True)
def break_graph() -> None:
    """Ends the current segment and begins another: nothing runs in between.

    >>> x = torch.ones(1, device=device)
    >>> graph = BreakableGraph(Pool(device))
    >>> with capture(graph):
    ...     y = x + 1
    ...     break_graph()
    ...     z = y + 1
    >>> graph.segments
    2
    """


def _caller() -> tuple[str, type[nn.Module] | None]:
    """What led to a break, outside torch and us: the nearest source line, the nearest module."""
    where = "unknown"
    for frame, line in traceback.walk_stack(None):
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("torch.", "accel.graph", "accel.record", "contextlib")):
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
