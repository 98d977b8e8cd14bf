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
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import torch

from accel.backend import Segment
from accel.guard import Ambient, Held
from accel.memory import Pool
from accel.reporting import BreakReport
from accel.signature import bytes_of, distinct, leaves, like_in_memory, map_tree

P = ParamSpec("P")
R = TypeVar("R")


class GuardMiss(Exception):
    """A replay met a value on the host that its recording had met otherwise."""


class Refused(Exception):
    """The call cannot be replayed rightly, for the reason given; it has to run eagerly."""


class Step(Protocol):
    """What a graph is made of: a segment or a break."""

    def replay(self) -> None:
        """Does on the current stream what it did when recorded."""


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
        self.steps: list[Step] = []
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
        self.pool.bury([step for step in self.steps if not isinstance(step, Break)])  # type: ignore[misc]
        self.steps, self.held = [], []


class Outputs:
    """What a break returned when recorded, and where later returns have to go.

    Device tensors get a boundary buffer each, except those that the break was given (an `out`
    argument returned). What reached the host steered Python: it has to come back byte for byte.
    `handed_out` is what the model gets during the recording.
    """

    def __init__(self, result: Any, aliases: dict[int, Any], pool: Pool) -> None:
        self._pool, self._aliases = pool, aliases
        self.guarded = any(self._on_host(x) for x in leaves(result))
        if self.guarded:
            self._settle()
        self._targets: list[Any] = []
        self.handed_out = map_tree(self._receive, result)

    def _on_host(self, x: Any) -> bool:
        return x is not None and (not isinstance(x, torch.Tensor) or x.is_cpu)

    def _settle(self) -> None:
        """Waits for copies to pinned host memory, which return before they are done."""
        self._pool.backend.synchronize(self._pool.backend.current_stream(self._pool.device))

    def _receive(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            self._targets.append(x)
            return x
        if x.is_cpu:
            self._targets.append(x.clone())
            return x
        if id(x) in self._aliases:
            self._targets.append(self._aliases[id(x)])
            return x
        buffer = like_in_memory(x, self._pool.backend)
        distinct(buffer).copy_(distinct(x))
        self._targets.append(buffer)
        return buffer

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The boundary buffers, without tensors that the break was given."""
        given = {id(x) for x in self._aliases.values()}
        return [
            x
            for x in self._targets
            if isinstance(x, torch.Tensor) and not x.is_cpu and id(x) not in given
        ]

    def deliver(self, fresh: Any, what: str) -> None:
        """Puts `fresh` where the recording expects it. Raises `GuardMiss` if it does not fit."""
        if self.guarded:
            self._settle()
        news = leaves(fresh)
        if len(news) != len(self._targets):
            raise GuardMiss(f"{what} returned another structure")
        for new, old in zip(news, self._targets, strict=True):
            if isinstance(old, torch.Tensor):
                self._deliver_tensor(new, old, what)
            elif type(new) is not type(old) or repr(new) != repr(old):
                raise GuardMiss(f"{what} returned {new!r}, in the recording {old!r}")

    def _place(self, x: torch.Tensor) -> tuple[int, Any]:
        return self._pool.backend.address(x), x.stride()

    def _deliver_tensor(self, new: Any, old: torch.Tensor, what: str) -> None:
        if not isinstance(new, torch.Tensor) or (new.device, new.dtype) != (old.device, old.dtype):
            raise GuardMiss(f"{what} returned another kind of value")
        if new.shape != old.shape:
            was, is_ = tuple(old.shape), tuple(new.shape)
            raise GuardMiss(f"{what} returned shape {is_}, in the recording {was}")
        if old.is_cpu:
            if not torch.equal(bytes_of(new), bytes_of(old)):
                raise GuardMiss(f"{what} brought other values to the host")
        elif self._place(new) != self._place(old):
            distinct(old).copy_(distinct(new) if new.stride() == old.stride() else new)


class Break:
    """A function that runs on every replay, with the arguments and in the context of its recording.

    Tensors that were born in the recording are held as aliases without ownership, so that a chain
    of segments needs the memory of the largest and not of the sum.
    """

    def __init__(
        self, function: Callable[..., Any], args: Any, kwargs: Any, ambient: Ambient | None
    ) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs
        self._ambient = ambient
        self.what = getattr(function, "__qualname__", None) or str(function)
        self.outputs: Outputs | None = None

    def first_run(self, pool: Pool) -> Outputs:
        """Runs the function with the live arguments, then exchanges those for aliases."""
        result = self._run()
        backend, born = pool.backend, pool.backend.live_blocks(pool.id)
        aliases: dict[int, Any] = {}
        given: set[int] = set()

        def hold(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or x.is_cpu:
                return x
            if id(x) not in aliases:
                base = backend.storage(x).data_ptr()
                given.add(base)
                aliases[id(x)] = backend.alias(x) if base in born else x
            return aliases[id(x)]

        args, kwargs = map_tree(hold, self._args), map_tree(hold, self._kwargs)
        for x in leaves(result):  # views of what it was given are given too
            if isinstance(x, torch.Tensor) and backend.storage(x).data_ptr() in given:
                hold(x)
        outputs = Outputs(result, aliases, pool)
        self._args, self._kwargs, self.outputs = args, kwargs, outputs
        return outputs

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every device tensor that this break keeps."""
        assert self.outputs is not None
        kept = [*leaves([self._args, self._kwargs]), *self.outputs.buffers]
        return [x for x in kept if isinstance(x, torch.Tensor) and not x.is_cpu]

    def replay(self) -> None:
        """Runs the function and delivers what it returns to the boundary buffers."""
        assert self.outputs is not None
        self.outputs.deliver(self._run(), self.what)

    def _run(self) -> Any:
        with self._ambient.restored() if self._ambient else contextlib.nullcontext():
            return self._function(*self._args, **self._kwargs)


class Observer(Protocol):
    """Watches a recording op by op (record.py)."""

    paused: bool

    def adopt(self, result: Any) -> None:
        """Told what a break returned."""

    def own(self, buffers: list[torch.Tensor]) -> None:
        """Told where the device tensors of that lie."""


class Recording:
    """A graph in the making: opens and closes segments around breaks.

    A segment is replayed as soon as it closes, so that break bodies, and the call that is being
    recorded, see true values. `weights` are addresses of storages that a module owns, watched by
    its guard and not held; `arguments` those of the static inputs.
    """

    def __init__(
        self, graph: BreakableGraph, weights: Collection[int] = (), arguments: Collection[int] = ()
    ) -> None:
        self.graph, self.weights, self.arguments = graph, weights, arguments
        self.observer: Observer | None = None
        self.held = Held()
        self.effect: str | None = None
        """The first thing that a replay could not take back; no guard may follow it."""
        self._undo: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._segment: Segment | None = None

    def open(self) -> None:
        """Begins the next segment."""
        pool = self.graph.pool
        segment = pool.backend.segment(pool.id)
        self._segment = segment
        pool.backend.clear_workspaces()
        segment.begin()

    def close(self) -> None:
        """Ends the open segment and runs it for the first time."""
        assert self._segment is not None
        self._segment.end()
        segment, self._segment = self._segment, None
        self.graph.pool.backend.clear_workspaces()
        self.graph.steps.append(segment)
        segment.replay()

    def run_break(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        pure: bool,
        ambient: Ambient | None = None,
        kind: str = "automatic",
    ) -> Any:
        """Interrupts the recording, runs `function` for real and returns its result in buffers.
        Raises `Refused` if a guard would have to undo what cannot be undone."""
        self.close()
        step = Break(function, args, kwargs, ambient)
        with self.suspended():
            outputs = step.first_run(self.graph.pool)
        if outputs.guarded:
            self.refuse_after_effect(step.what)
            if not pure:
                raise Refused(f"{step.what} returns host values: only a pure break may (pure=True)")
        if not pure:
            self.effect = self.effect or f"the break {step.what} has run"
        self.graph.steps.append(step)
        self.graph.breaks.append(BreakReport(_caller(), step.what, kind, outputs.guarded))
        if self.observer is not None:
            self.observer.adopt(outputs.handed_out)
            self.observer.own(outputs.buffers)
        self.open()
        result, outputs.handed_out = outputs.handed_out, None
        return result

    def note_effect(self, written: torch.Tensor, effect: str) -> None:
        """Recorded work is about to write a tensor from outside: its value is kept for `undo`."""
        self.effect = self.effect or effect
        storage = self.graph.pool.backend.storage
        if any(storage(x).data_ptr() == storage(written).data_ptr() for x, _ in self._undo):
            return
        self.close()
        with self.suspended():
            elements = storage(written).nbytes() // written.element_size()
            whole = written.as_strided((elements,), (1,), 0)
            self._undo.append((whole, whole.clone()))
        self.open()

    def undo(self) -> None:
        """After a failure: writes outside the recording are taken back, for the eager rerun."""
        for written, before in self._undo:
            written.copy_(before)

    def refuse_after_effect(self, what: str) -> None:
        """Raises `Refused` if a guard on `what` would come after something irrevocable."""
        if self.effect is not None:
            raise Refused(f"{what} brings a value to the host after {self.effect}")

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """The body of a break: nothing is recorded and nothing inside may break again."""
        _thread.recording = None
        if self.observer is not None:
            self.observer.paused = True
        try:
            yield
        finally:
            _thread.recording = self
            if self.observer is not None:
                self.observer.paused = False

    def abort(self) -> None:
        """Ends a recording that failed and leaves the process usable."""
        pool, segment = self.graph.pool, self._segment
        self._segment = None
        if segment is not None:
            try:
                segment.end()
            except Exception:
                pool.abandon(segment)
                self.graph.steps = []
                return
            pool.bury([segment])
        self.graph.discard()


_thread = threading.local()


def current_recording() -> Recording | None:
    """The calling thread's open recording, if any."""
    return getattr(_thread, "recording", None)


@contextlib.contextmanager
def capture(
    graph: BreakableGraph,
    *,
    automatic: bool = True,
    weights: Collection[int] = (),
    arguments: Collection[int] = (),
) -> Iterator[Recording]:
    """Records what the body does into `graph`, running it at the same time.

    `automatic` finds and breaks ops that cannot be recorded; without it every break must be
    explicit (`eager_on_graph`, `break_graph`) and recording costs nothing an op. `weights` and
    `arguments` are addresses that a `Recording` treats apart. Raises what the body raises, or
    `Refused`; the process and the pool stay usable.

    >>> x = torch.ones(2, device=device)
    >>> graph = BreakableGraph(Pool(device))
    >>> with capture(graph):
    ...     doubled = x * 2
    ...     host = doubled.tolist()
    ...     y = doubled + host[0]
    >>> graph.segments, [b.kind for b in graph.breaks], y.tolist()
    (2, ['automatic'], [4.0, 4.0])
    """
    from accel.record import OpRecorder  # record.py builds on this module

    pool = graph.pool
    recording = Recording(graph, weights, arguments)
    with contextlib.ExitStack() as stack:
        for context in (pool.recording(), torch.inference_mode(False), torch.no_grad()):
            stack.enter_context(context)
        stack.enter_context(pool.backend.hide_capturing())
        stack.enter_context(_no_autocast_cache())
        stack.enter_context(_no_garbage_collection())
        outer, _thread.recording = current_recording(), recording
        try:
            recording.open()
            with OpRecorder(recording) if automatic else contextlib.nullcontext():
                yield recording
            recording.close()
        except BaseException:
            recording.abort()
            recording.undo()
            raise
        finally:
            _thread.recording = outer


@contextlib.contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """A weight cast while recording would stay in the cache, in the graph's memory."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection may destroy someone's graphs and events, and takes longer than the recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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
        return functools.partial(_breaking, pure=pure)
    return _breaking(function, pure=pure)


def _breaking(function: Callable[P, R], *, pure: bool) -> Callable[P, R]:
    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        recording = current_recording()
        if recording is None:
            return function(*args, **kwargs)
        ambient = Ambient(recording.graph.pool.device.type)
        result: R = recording.run_break(
            function, args, kwargs, pure=pure, ambient=ambient, kind="explicit"
        )
        return result

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


def _caller() -> str:
    """The source line of the model that led to a break: the nearest frame outside torch and us."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("torch.", "accel.graph", "accel.record", "contextlib")):
            path = frame.f_code.co_filename.split("/site-packages/")[-1]
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"
