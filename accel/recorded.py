"""One recording of one call: static inputs in, a graph, results out.

Knows how a call is recorded rightly or refused, and how its result is given back so that it is the
caller's own. Does not know when to record or which recording to use (runner.py).
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from accel.graph import Break, BreakableGraph, Recording, Refused, capture
from accel.memory import Pool
from accel.reporting import GraphReport
from accel.signature import (
    Edits,
    Signature,
    StaticInputs,
    Uncapturable,
    is_value,
    leaves,
    map_tree,
)


class Recorded:
    """A call's recording. Making one runs the call; `first_result` is then what it returned.

    Raises `Refused` if replaying could go wrong, or what the call raises; either way nothing is
    left behind: outside writes are undone, the random generator is where it was. `objection` is
    asked after the call why it may not be replayed.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        call: tuple[tuple[Any, ...], dict[str, Any]],
        key: Signature,
        pool: Pool,
        weights: Collection[int],
        objection: Callable[[], str | None] = lambda: None,
    ) -> None:
        backend = pool.backend
        begin, random = backend.now(), backend.rng_state(pool.device)
        self.graph = BreakableGraph(pool)
        with pool.recording(), _rng_restored_on_error(pool, random):
            live = backend.live_blocks(pool.id)
            grown = backend.pool_bytes(pool.id)
            self._static = StaticInputs(key.tensors, backend)
            args, kwargs = self._static.substitute(call, key.tensors)
            edits = Edits((args, kwargs))
            inputs = self._static.storages
            with capture(self.graph, weights=weights, arguments=inputs) as recording:
                result = function(*args, **kwargs)
            self._settle(recording, result, edits, live, objection)
            grown = backend.pool_bytes(pool.id) - grown
        self.weights_version: Any = None
        self.state: Any = None
        self.uses_random = not torch.equal(random, backend.rng_state(pool.device))
        self.first_result = self._results.give(key.tensors)
        self._edits.apply(call)
        self.report = GraphReport(
            "", self.graph.segments, self.graph.operations, backend.now() - begin, grown
        )
        self.report.breaks = self.graph.breaks

    def _settle(
        self,
        recording: Recording,
        result: Any,
        edits: Edits,
        live: set[int],
        objection: Callable[[], str | None],
    ) -> None:
        try:
            if (objected := objection()) is not None:
                raise Refused(objected)
            self._edits = edits.closed()
            self._results = Results(result, self._static, recording)
            self._refuse_leaks(live)
        except (Refused, Uncapturable):
            recording.abort()
            self.discard()
            raise
        self.held = recording.held
        self.irrevocable = recording.effect is not None

    @property
    def commits(self) -> bool:
        """Whether a replay changes something that discarding its result does not undo."""
        return self.irrevocable or self.uses_random

    def replay(self, tensors: list[torch.Tensor]) -> Any:
        """The call's result for `tensors`. Raises `GuardMiss`; the generator is then put back."""
        pool = self.graph.pool
        random = pool.backend.rng_state(pool.device) if self.uses_random else None
        with _rng_restored_on_error(pool, random), pool.use():
            self._static.fill(tensors)
            self.graph.replay()
            self.report.replays += 1
            return self._results.give(tensors)

    def leave(self, call: Any) -> None:
        """Does to `call`'s lists and dicts what the forward does: once its result is accepted."""
        self._edits.apply(call)

    def discard(self) -> None:
        """Lets go of the graph and of the memory that it holds."""
        self.graph.discard()
        self._results = None  # type: ignore[assignment]

    def _refuse_leaks(self, live: set[int]) -> None:
        """A tensor of this recording that the model keeps would change with every replay."""
        ours = live | self._results.storages
        if self._leaks(ours):
            gc.collect()
            if self._leaks(ours):
                raise Refused("the model keeps a tensor that this call made (a cache it fills)")

    def _leaks(self, ours: set[int]) -> bool:
        pool = self.graph.pool
        if pool.backend.live_blocks(pool.id) - ours:
            return True
        return any(base not in ours for base in self._shared_buffers())

    def _shared_buffers(self) -> Iterator[int]:
        """Addresses of boundary buffers that someone beside the graph holds."""
        storage = self.graph.pool.backend.storage
        breaks = [step for step in self.graph.steps if isinstance(step, Break)]
        holders = Counter(
            storage(x).data_ptr() for x in {id(x): x for b in breaks for x in b.tensors}.values()
        )
        for buffer in (x for b in breaks for x in b.buffers):
            held = storage(buffer)
            handle = 1  # `held` itself
            if torch._C._storage_Use_Count(held._cdata) > holders[held.data_ptr()] + handle:
                yield held.data_ptr()


@contextlib.contextmanager
def _rng_restored_on_error(pool: Pool, state: torch.Tensor | None) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if state is not None:
            pool.backend.set_rng_state(pool.device, state)
        raise


class Results:
    """What a recorded call returned, and how to give it to a caller.

    Copies, laid out as the originals: results that shared storage share it again. A result that
    is an argument or a weight is that argument or weight. Raises `Refused` for results that may
    hold anything (objects of unknown type).
    """

    def __init__(self, result: Any, static: StaticInputs, recording: Recording) -> None:
        self._result, self._static = result, static
        self._backend = recording.graph.pool.backend
        self.storages: set[int] = set()
        groups: dict[int, list[torch.Tensor]] = {}
        for x in leaves(result):
            if not isinstance(x, torch.Tensor):
                if not is_value(x):
                    raise Refused(
                        f"the call returns a {type(x).__name__}, whose contents may change"
                    )
                continue
            base = self._backend.storage(x).data_ptr()
            if base in static.storages or base in recording.weights:
                continue
            self.storages.add(base)
            groups.setdefault(base, []).append(x)
        self._copies = [_Copies(group) for group in groups.values()]

    def give(self, tensors: list[torch.Tensor]) -> Any:
        """The result for a call with `tensors`, the caller's own."""
        fresh = {id(x): y for copies in self._copies for x, y in copies.make()}

        def leaf(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or id(x) in fresh:
                return fresh.get(id(x), x)
            return self._argument(x, tensors)

        return map_tree(leaf, self._result)

    def _argument(self, x: torch.Tensor, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The caller's tensor, or the same view of it, where the call returned a static input."""
        position = self._static.storages.get(self._backend.storage(x).data_ptr())
        if position is None:
            return x
        ours, theirs = self._static.tensors[position], tensors[position]
        if x is ours:
            return theirs
        offset = theirs.storage_offset() + x.storage_offset() - ours.storage_offset()
        return theirs.as_strided(x.shape, x.stride(), offset)


class _Copies:
    """Results in one storage, copied together."""

    def __init__(self, group: list[torch.Tensor]) -> None:
        self._group = group
        self._alone = len(group) == 1 and torch.empty_like(group[0]).stride() == group[0].stride()
        if len({x.dtype for x in group}) > 1:
            raise Refused("the call returns views of one storage with different dtypes")
        self._begin = min(x.storage_offset() for x in group)
        self._length = max(_end(x) for x in group) - self._begin

    def make(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of a recorded result and its copy."""
        if self._alone:
            return [(self._group[0], self._group[0].clone())]
        flat = self._group[0].as_strided((self._length,), (1,), self._begin).clone()
        return [
            (x, flat.as_strided(x.shape, x.stride(), x.storage_offset() - self._begin))
            for x in self._group
        ]


def _end(x: torch.Tensor) -> int:
    steps = sum((n - 1) * st for n, st in zip(x.shape, x.stride(), strict=True))
    return int(x.storage_offset()) + (1 + steps if x.numel() else 0)
