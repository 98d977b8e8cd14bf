"""One recording of one call: static inputs in, a graph, results out.

Knows how a call is recorded rightly or refused, how random generators are put back where it is, and
how its result is given back so that it is the caller's own. Does not know when to record or which
recording to use (runner.py).
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from accel.backend import Backend
from accel.breaks import GuardMiss
from accel.graph import ARGUMENT, OURS, WEIGHT, BreakableGraph, Recording, Refused, capture
from accel.guard import WeightGuard
from accel.layout import laid_out, span
from accel.memory import Pool, outlives_garbage
from accel.reporting import BreakReport, GraphReport
from accel.signature import Edits, Signature, StaticInputs, is_value, leaves, map_tree

WRITTEN = "the forward writes what an argument lies in"


class Recorded:
    """A call's recording. Making one runs the call; `first_result` is then what it returned.

    Raises `Refused` if replaying could go wrong, or what the call raises; either way nothing is
    left behind: outside writes are undone, the random generator is where it was. `objection` is
    asked after the call why it may not be replayed.

    >>> from accel.signature import signature
    >>> call = ((torch.ones(2, device=device),), {})
    >>> guard = WeightGuard(None, backend)
    >>> recorded = Recorded(lambda x: x * 2, call, signature(call, backend), Pool(device), guard)
    >>> recorded.first_result.tolist(), recorded.replay([torch.zeros(2, device=device)]).tolist()
    ([2.0, 2.0], [0.0, 0.0])
    """

    def __init__(
        self,
        function: Callable[..., Any],
        call: tuple[tuple[Any, ...], dict[str, Any]],
        key: Signature,
        pool: Pool,
        guard: WeightGuard,
        objection: Callable[[], str | None] = lambda: None,
    ) -> None:
        begin, self.graph = pool.backend.now(), BreakableGraph(pool)
        generators = Generators(pool)
        with pool.recording(), contextlib.ExitStack() as undo:
            undo.callback(generators.put_back)
            live, reserved = pool.backend.live_blocks(pool.id), pool.bytes()
            self._static = StaticInputs(key.tensors, pool.backend)
            args, kwargs = self._static.substitute(call, key.tensors)
            self.edits = Edits((args, kwargs))
            recording, result = self._run(function, args, kwargs, guard)
            undo.callback(recording.abort)
            if (objected := objection()) is not None:
                raise Refused(objected)
            generators.refuse_drawn_on_host()
            self._refuse_written(key.tensors, recording)
            self.edits.close()
            born = dict.fromkeys(pool.backend.live_blocks(pool.id) - live, OURS)
            self._results = Results(result, self._static, recording.origins | born, pool.backend)
            self._refuse_leaks(live | set(self._results.storages))
            undo.pop_all()
            grown = pool.bytes() - reserved
        self.held, self.uses_random = recording.held, generators.moved()
        self.commits = recording.effect is not None or self.uses_random
        """Whether a replay changes something that discarding its result does not undo."""
        self.state: Any = None
        """What else it depends on, for whoever made it to compare."""
        self.first_result = self._results.give(key.tensors)
        self.edits.apply(call)
        shapes = ", ".join("x".join(map(str, x.shape)) or "scalar" for x in key.tensors)
        figures = self.graph.segments, self.graph.operations, pool.backend.now() - begin, grown
        breaks = [BreakReport(b.where, b.what, b.kind, b.guarded) for b in self.graph.breaks]
        self.report = GraphReport(shapes, *figures, breaks=breaks)

    def _run(
        self, function: Callable[..., Any], args: Any, kwargs: Any, guard: WeightGuard
    ) -> tuple[Recording, Any]:
        """The recording of a call, and what it returned."""
        origins = dict.fromkeys(guard.storages, WEIGHT)
        origins |= dict.fromkeys(self._static.storages, ARGUMENT)
        mode = torch.is_grad_enabled()  # nothing asks for gradients, but a forward may ask
        with capture(self.graph, origins=origins) as recording, torch.set_grad_enabled(mode):
            return recording, function(*args, **kwargs)

    def replay(self, tensors: list[torch.Tensor]) -> Any:
        """The call's result for `tensors`. Raises `GuardMiss`; the generator is then put back."""
        if self._written and self._written_among(tensors):
            raise GuardMiss(WRITTEN)
        pool = self.graph.pool
        before = pool.backend.rng_state(pool.device) if self.uses_random else None
        with pool.lock:
            pool.begin_use()
            try:
                self._static.fill(tensors)
                try:
                    self.graph.run()
                except BaseException:
                    if before is not None:
                        pool.backend.set_rng_state(pool.device, before)
                    raise
                self.report.replays += 1
                return self._results.give(tensors)
            finally:
                pool.end_use()

    def _refuse_written(self, tensors: list[torch.Tensor], recording: Recording) -> None:
        self._storage = self.graph.pool.backend.storage
        self._written = set(recording.written)
        if self._written_among(tensors):
            raise Refused(WRITTEN)

    def _written_among(self, tensors: list[torch.Tensor]) -> bool:
        """Whether the recorded work writes what a caller's tensor lies in: its copy would not see
        that."""
        return any(self._storage(x).data_ptr() in self._written for x in tensors)

    def discard(self) -> None:
        """Lets go of the graph and of the memory that it holds."""
        self.graph.discard()
        del self._results

    def _refuse_leaks(self, ours: set[int]) -> None:
        """A tensor of this recording that the model keeps would change with every replay."""
        if outlives_garbage(lambda: self._leaks(ours)):
            raise Refused("the model keeps a tensor that this call made (a cache it fills)")

    def _leaks(self, ours: set[int]) -> bool:
        """Whether someone beside the graph holds memory of its pool or a boundary buffer."""
        breaks, pool = self.graph.breaks, self.graph.pool
        tensors = {id(x): x for step in breaks for x in step.tensors}.values()
        holders = Counter(pool.backend.storage(x).data_ptr() for x in tensors)
        for buffer in (x for step in breaks for x in step.buffers):
            storage = pool.backend.storage(buffer)  # one more holder
            beside = torch._C._storage_Use_Count(storage._cdata) - holders[storage.data_ptr()] - 1
            if beside > 0 and storage.data_ptr() not in ours:
                return True
        return not pool.backend.live_blocks(pool.id) <= ours


class Generators:
    """Random generators as they are now, to be put back: the device's, Python's, numpy's (if it is
    there: importing it takes half a second). Torch's own of the host is left to the recorder.

    >>> before = Generators(Pool(device))
    >>> _ = torch.rand(1, device=device), random.random()
    >>> before.put_back()
    >>> before.moved()
    False
    """

    def __init__(self, pool: Pool) -> None:
        self._pool, self._state = pool, pool.backend.rng_state(pool.device)
        self._host = [read() for read, _ in _host_generators()]

    def moved(self) -> bool:
        """Whether the device's generator was drawn from since."""
        return not torch.equal(self._state, self._pool.backend.rng_state(self._pool.device))

    def refuse_drawn_on_host(self) -> None:
        """Raises `Refused` if one of the host was drawn from since: no replay would."""
        now = [read() for read, _ in _host_generators()]
        if pickle.dumps(self._host) != pickle.dumps(now):  # numpy's state holds an array
            raise Refused("the forward draws random numbers on the host", passing=True)

    def put_back(self) -> None:
        """Sets all of them as they were: the work since then is going to be done again."""
        self._pool.backend.set_rng_state(self._pool.device, self._state)
        for (_, write), state in zip(_host_generators(), self._host, strict=False):
            write(state)


def _host_generators() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    numpy = sys.modules.get("numpy.random")
    numpys = [] if numpy is None else [(numpy.get_state, numpy.set_state)]
    return [(random.getstate, random.setstate), *numpys]


class Results:
    """What a recorded call returned, and how to give it to a caller.

    Copies, laid out as the originals: results that shared storage share it again. A result that
    is an argument, a weight or another tensor of the model is that tensor. Raises `Refused` for
    results that may hold anything (objects of unknown type).

    >>> static = StaticInputs([torch.ones(2, device=device)], backend)
    >>> result = {"same": static.tensors[0], "new": torch.zeros(2, device=device)}
    >>> origins = dict.fromkeys(static.storages, ARGUMENT)
    >>> origins[backend.storage(result["new"]).data_ptr()] = OURS
    >>> results = Results(result, static, origins, backend)
    >>> theirs = torch.ones(2, device=device)
    >>> given = results.give([theirs])
    >>> given["same"] is theirs, given["new"].tolist()
    (True, [0.0, 0.0])
    """

    def __init__(
        self, result: Any, static: StaticInputs, origins: dict[int, str], backend: Backend
    ) -> None:
        self._result, self._static, self._storage = result, static, backend.storage
        groups: dict[int, list[torch.Tensor]] = {}
        for x in leaves(result):
            if isinstance(x, torch.Tensor):
                if type(x) not in backend.tensor_types:
                    raise Refused(f"the call returns a {type(x).__name__}, not a plain tensor")
                groups.setdefault(self._place(x), []).append(x)
                self._refuse_what_a_copy_lacks(x, origins.get(self._place(x), OURS))
            elif not is_value(x):
                raise Refused(f"the call returns a {type(x).__name__}, whose contents may change")
        ours = {b: xs for b, xs in groups.items() if b < 0 or origins.get(b) == OURS}
        self.storages = {base: _whole(xs) for base, xs in ours.items()}
        """For each storage with results that are to be copied, the part that holds them."""

    def _refuse_what_a_copy_lacks(self, x: torch.Tensor, origin: str) -> None:
        if x.requires_grad and origin == OURS:
            raise Refused("the call returns a tensor that asks for gradients")
        if x.__dict__ and origin in (OURS, ARGUMENT):
            raise Refused(f"the call returns a tensor that carries {next(iter(x.__dict__))!r}")
        position = self._static.storages.get(self._place(x))
        if position is not None and _kind(x) != _kind(self._static.tensors[position]):
            raise Refused("the call returns an argument as another dtype")

    def _place(self, x: torch.Tensor) -> int:
        """The address of its storage; empty ones have none, and are told apart by themselves."""
        return self._storage(x).data_ptr() or -id(x)

    def give(self, tensors: list[torch.Tensor]) -> Any:
        """The result for a call with `tensors`, the caller's own."""
        fresh = {base: whole.clone() for base, whole in self.storages.items()}

        def leaf(x: Any) -> Any:
            base = self._place(x) if isinstance(x, torch.Tensor) else None
            if base in fresh:
                offset = x.storage_offset() - self.storages[base].storage_offset()
                return laid_out(x, self._storage(fresh[base]), offset)
            if base not in self._static.storages:
                return x
            position = self._static.storages[base]
            ours, theirs = self._static.tensors[position], tensors[position]
            offset = theirs.storage_offset() + x.storage_offset() - ours.storage_offset()
            return theirs if x is ours else theirs.as_strided(x.shape, x.stride(), offset)

        return map_tree(leaf, self._result)


def _kind(x: torch.Tensor) -> tuple[torch.dtype, bool, bool]:
    """How its bytes are read."""
    return x.dtype, x.is_conj(), x.is_neg()


def _whole(group: list[torch.Tensor]) -> torch.Tensor:
    """The part of their storage that tensors lie in, as a flat one."""
    if len(set(map(_kind, group))) > 1:
        raise Refused("the call returns views of one storage with different dtypes")
    begin = min(x.storage_offset() for x in group)
    end = max(x.storage_offset() + span(x) for x in group)
    return group[0].as_strided((end - begin,), (1,), begin)
