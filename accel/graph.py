"""BreakableGraph: segments and breaks, and how they are recorded.

A graph is an ordered list of steps. A segment is recorded device work; a break (breaks.py) is
Python, or one op, that runs again on every replay. This module knows how a recording is cut into
them. It does not know which ops need a break (record.py) nor when to record (runner.py).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar, overload

import torch

from accel.breaks import Break, on_device
from accel.guard import Ambient, Held
from accel.memory import Pool
from accel.signature import Uncapturable, leaves

P = ParamSpec("P")
R = TypeVar("R")

OURS, ARGUMENT, WEIGHT = "", "an argument", "a weight"
"""Where storages come from that a recording meets."""


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

    `pool` is where its memory comes from; graphs that share a pool never run at the same time. One
    that `rests` takes what its segments need to be launched at a replay, and can give it back.

    >>> x, graph = torch.ones(3, device=device), BreakableGraph(Pool(device))
    >>> with capture(graph):
    ...     y = x + 1
    >>> _ = x.fill_(5)
    >>> graph.replay()
    >>> y.tolist()
    [6.0, 6.0, 6.0]
    """

    def __init__(self, pool: Pool, rests: bool = False) -> None:
        self.pool, self.rests = pool, rests
        self.steps: list[Any] = []
        self.breaks: list[Break] = []
        self.held: list[Any] = []
        self.operations = 0

    def replay(self) -> None:
        """Runs every step on the current stream. Raises `GuardMiss` if a guarded value differs: all
        that ran up to there wrote to the graph's own memory only, so the caller can run eagerly."""
        with self.pool.use():
            self.run()

    def run(self) -> None:
        """As `replay`, for a caller that has the pool in use."""
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

    def rest(self) -> None:
        """Gives back what the next replay takes again, of a graph that `rests`."""
        for step in self.steps:
            if not isinstance(step, Break):
                step.rest()

    def discard(self) -> None:
        """Lets go of everything; the segments stay parked until their pool's generation ends."""
        self.pool.bury([step for step in self.steps if not isinstance(step, Break)])
        self.steps, self.breaks, self.held = [], [], []


class Recording:
    """A graph in the making: opens and closes segments around breaks.

    A segment is replayed when it closes, so that break bodies, and the call that is being recorded,
    see true values; where it is only cut, beside the recording, as soon as it can be launched.
    `origins` tells, by address, what storages are that need not be held.

    >>> with capture(BreakableGraph(Pool(device))) as recording:
    ...     with recording.interrupted():
    ...         value = torch.ones(1, device=device).item()
    >>> value, recording.graph.segments
    (1.0, 2)
    """

    def __init__(self, graph: BreakableGraph, origins: Mapping[int, str], run: bool = True) -> None:
        self.graph, self._run = graph, run
        self.origins = dict(origins)
        """What the storages are that this recording has met, by address: OURS, or in words."""
        self.known = {base for base, o in self.origins.items() if base and o == WEIGHT}
        """Addresses of device tensors that need no second look."""
        self.held = Held()
        self.effect: str | None = None
        """The first thing that a replay could not take back; no guard may follow it."""
        self.refusal: Refused | None = None
        """Why no replay could be right, once that is known."""
        self._made: list[torch.UntypedStorage] = []
        self.paused = self._was_cut = False
        self.written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By address, what lies outside and recorded work writes, and its value before."""
        self._segment: Any = None
        self._closed: list[Any] = []
        """Segments that are being made launchable."""

    def open(self) -> None:
        """Begins the next segment."""
        pool, backend = self.graph.pool, self.graph.pool.backend
        self._segment = (backend.resting_segment if self.graph.rests else backend.segment)(pool.id)
        self._segment.begin()

    def close(self, cut: bool = False) -> None:
        """Ends the open segment. All that were closed have run for the first time then, unless
        nobody needs their values; one that is only cut does so later. Raises `Refused` if this
        recording had failed before, and the forward went on."""
        if self._segment is None and self.refusal is not None:
            raise self.refusal
        self._segment.end()
        segment, self._segment = self._segment, None
        self.graph.steps.append(segment)
        if self._run and not cut:
            self.settle()
            segment.replay()
            return
        self._closed.append(segment)
        if self._run:
            self.graph.pool.start(segment)
        else:
            segment.prepare()

    def settle(self) -> None:
        """Waits until all segments can be launched. What comes next on the pool's stream comes
        after those that run beside."""
        while self._closed:
            self._closed.pop(0).ready()
        self.graph.pool.join()

    @contextlib.contextmanager
    def interrupted(self, cut: bool = False) -> Iterator[None]:
        """Runs the body eagerly, between two segments: nothing inside is recorded or breaks."""
        with self._refusing("recording failed"):
            self.close(cut)
        _thread.recording, self.paused = None, True
        try:
            with self._refusing("no replay would see that a break raises"):
                yield
        finally:
            _thread.recording = self
            self.open()
            self.paused = False  # not before: opening a segment writes the generator's seed

    @contextlib.contextmanager
    def _refusing(self, why: str) -> Iterator[None]:
        """Notes what the body raises as the refusal: the forward may catch it, and go on."""
        try:
            yield
        except Exception as error:
            if self.refusal is None:
                line = str(error).partition("\n")[0]
                self.refusal = Refused(f"{why}: {type(error).__name__}: {line}")
            raise

    def cut(self) -> None:
        """Ends a segment without a break: the device runs it while the host records the next."""
        self._was_cut = True
        with self.interrupted(cut=True):
            pass

    def run_break(self, step: Break, pure: bool) -> Any:
        """Runs a break for the first time and returns its result, in buffers. Raises `Refused` if a
        guard would have to undo what cannot be undone."""
        with self.interrupted():
            result = step.first_run()
        if step.guarded and not self._run:
            raise Refused(f"{step.what} brings a value to the host that was not computed")
        if step.guarded and self.effect is not None:
            raise Refused(f"{step.what} brings a value to the host after {self.effect}")
        if step.guarded and not pure:
            raise Refused(f"{step.what} returns host values: only a pure break may (pure=True)")
        if not pure:
            self.effect = self.effect or f"the break {step.what} has run"
        self.graph.steps.append(step)
        self.graph.breaks.append(step)
        self.adopt([*(x for x in leaves(result) if not on_device(x)), *step.buffers])
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
        """Recorded work is about to write a tensor from outside: its value is kept for `abort`."""
        self.effect = self.effect or effect
        storage = self.graph.pool.backend.storage(written)
        if storage.data_ptr() not in self.written:
            with self.interrupted():
                elements = storage.nbytes() // written.element_size()
                whole = written.as_strided((elements,), (1,), 0)
                self.written[storage.data_ptr()] = whole, whole.clone()

    def abort(self) -> None:
        """Ends a recording that failed and leaves the process usable. What was recorded up to there
        runs, as it would have eagerly: the forward may have kept some of it, in a cache it fills.
        Writes outside the recording are taken back, for the eager rerun."""
        pool, segment = self.graph.pool, self._segment
        self._segment, launched = None, self._run
        while self._closed:  # or their memory would not come back with the pool
            try:
                self._closed.pop(0).ready()
            except BaseException:  # Ctrl-C, too: this is the way out of an error already
                launched = False
        if segment is not None:
            try:
                segment.end()
                pool.bury([segment])
            except Exception:
                pool.may_cut &= not self._was_cut
                pool.abandon(segment)
                self.graph.steps, launched = [], False
        pool.join()
        if segment is not None and launched:
            with contextlib.suppress(Exception):
                segment.replay()
        self.graph.discard()
        for written, before in self.written.values():
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
    origins: Mapping[int, str] | None = None,
    run: bool = True,
) -> Iterator[Recording]:
    """Records what the body does into `graph`, running it at the same time.

    `automatic` finds and breaks ops that cannot be recorded; without it every break must be
    explicit (`eager_on_graph`, `break_graph`) and recording costs nothing an op. `origins` tells,
    by address, what storages are that need not be held: ARGUMENT, and WEIGHT for those on the
    pool's device. Without `run` segments are recorded only: where nobody needs the results, and no
    break minds what lies in its arguments. Raises what the body raises, or `Refused`; the process
    and the pool stay usable.

    >>> x, graph = torch.ones(2, device=device), BreakableGraph(Pool(device))
    >>> with capture(graph):
    ...     doubled = x * 2
    ...     host = doubled.tolist()
    ...     y = doubled + host[0]
    >>> graph.segments, [b.kind for b in graph.breaks], y.tolist()
    (2, ['automatic'], [4.0, 4.0])
    """
    from accel.record import watched  # record.py builds on this module

    recording = Recording(graph, origins or {}, run)
    with graph.pool.recording(), _surroundings(recording), contextlib.ExitStack() as undo:
        undo.callback(recording.abort)
        recording.open()
        with watched(recording) if automatic else contextlib.nullcontext():
            yield recording
        if recording.refusal is not None:
            raise recording.refusal
        recording.close()
        recording.settle()
        undo.pop_all()


@contextlib.contextmanager
def _surroundings(recording: Recording) -> Iterator[None]:
    """How torch and Python are set while recording.

    A weight cast while recording would stay in autocast's cache, in the graph's memory. A garbage
    collection may destroy someone's graphs and events, and takes longer than the recording.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(recording.graph.pool.backend.hide_capturing())
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
    >>> x, graph = torch.zeros(1, device=device), BreakableGraph(Pool(device))
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
        pool = recording.graph.pool
        step = Break(function, args, kwargs, pool, kind, Ambient(pool.device.type))
        return recording.run_break(step, pure)

    return run


@eager_on_graph(pure=True)
def break_graph() -> None:
    """Ends the current segment and begins another: nothing runs in between.

    >>> x, graph = torch.ones(1, device=device), BreakableGraph(Pool(device))
    >>> with capture(graph):
    ...     y = x + 1
    ...     break_graph()
    ...     z = y + 1
    >>> graph.segments
    2
    """
