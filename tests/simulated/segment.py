"""A recording: operators with the addresses they work on. Replaying it runs no Python of the model.

Nothing here keeps memory alive: arguments are CPU views over raw addresses. What was freed and
handed out again in the meantime is read, and overwritten, as a real device would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.simulated.arena import Pool
from tests.simulated.device import Stream, card, scribble
from tests.simulated.errors import CaptureError
from tests.simulated.tensors import arena, poison, quiet, span


class Step:
    """One recorded operator: `run` on CPU views, results to be copied to `targets`."""

    __slots__ = ("args", "kwargs", "name", "run", "targets", "workspace")

    def __init__(
        self,
        name: str,
        run: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        targets: list[torch.Tensor | None],
        workspace: int,
    ) -> None:
        self.name, self.run, self.args, self.kwargs = name, run, args, kwargs
        self.targets, self.workspace = targets, workspace

    def replay(self) -> None:
        if self.workspace:
            scribble(self.workspace)
        result = self.run(*self.args, **self.kwargs)
        if self.targets:
            for target, value in zip(self.targets, flat(result), strict=True):
                if target is not None:
                    target.copy_(value)


def flat(result: Any) -> list[Any]:
    """The leaves of what an operator returned."""
    if isinstance(result, (list, tuple)):
        return [leaf for part in result for leaf in flat(part)]
    return [result]


class SimulatedSegment:
    """A stretch of recorded work on one stream, its memory from one pool. `launchable` is whether
    the device keeps memory for its launch: one that `rests` from a replay on until `rest`."""

    def __init__(self, pool_id: Any, rests: bool = False) -> None:
        self._pool_id, self._rests = pool_id, rests
        self.launchable = False
        self._stream: Stream | None = None
        self._epoch = card.epoch
        self._recorded = False
        self.pool: Pool
        self.steps: list[Step] = []
        self.invalid = False
        self._carried: dict[int, int] = {}
        self._beside: Stream | None = None

    def poison(self, view: torch.Tensor) -> None:
        """Makes a recorded result unreadable until it is computed. Not where an earlier segment's
        tensor lay when this one began, or one that waits for its first replay: these may still have
        to read it."""
        begin = view.untyped_storage().data_ptr() + view.storage_offset() * view.itemsize
        end = begin + span(view.size(), view.stride()) * view.itemsize
        read = (self._carried, *self.pool.waiting.values())
        if not any(a < end and begin < a + size for blocks in read for a, size in blocks.items()):
            poison(view)

    def begin(self) -> None:
        """Starts recording what this thread issues on its current stream.

        Raises RuntimeError where CUDA would: on the default stream, on a stream or in a pool that
        records already, in a pool whose last segment is gone; and forever after that last one.
        """
        stream = card.current_stream()
        pool = arena.pools.get(self._pool_id)
        _check_may_record(stream, pool, self._pool_id, self._stream is not None)
        assert pool is not None
        card.write_seed(self)
        pool.opened, pool.segments = True, pool.segments + 1
        self.pool, self._stream = pool, stream
        pool.recording, stream.segment = True, self
        self._carried = arena.live_blocks(pool)

    def end(self) -> None:
        """Closes the recording. Raises if it was spoilt; its pool cannot record again then."""
        if self._stream is None or self._stream.segment is not self:
            raise RuntimeError("end() without a recording")
        if card.current_stream() is not self._stream:
            raise RuntimeError("a recording must end on the stream it began on")
        self._stream.segment = None
        if self.invalid:
            raise CaptureError("sim error: operation failed due to a previous error during capture")
        self.pool.recording = False
        self._recorded = True

    def prepare(self, stream: Stream | None = None) -> None:
        """Notes that it waits for `ready`, and then for its first replay: on `stream`, if given, as
        of now."""
        self.launchable |= stream is not None or not self._rests
        if not self._recorded:
            raise RuntimeError("prepare() of a segment that holds no finished recording")
        self.pool.waiting[id(self)] = self._carried
        self._beside = stream
        if stream is not None:
            stream.time = max(stream.time, card.clock.host + card.clock.replay_host)

    def ready(self) -> None:
        """It is, here."""
        self.pool.waiting.pop(id(self), None)
        stream, self._beside = self._beside, None
        if stream is not None:
            self._run(stream)

    def replay(self) -> None:
        """Runs the recorded operators on the current stream."""
        if not self._recorded:
            raise RuntimeError("replay() of a segment that holds no finished recording")
        self.ready()
        self.launchable = True
        stream, clock = card.current_stream(), card.clock
        if stream.segment is not None:
            raise stream.segment.refuse("the replay of another segment")
        clock.host += clock.replay_host
        stream.time = max(stream.time, clock.host)
        self._run(stream)

    def rest(self) -> None:
        """Gives back what the next replay takes again."""
        assert self._rests, "torch keeps what it made launchable"
        self.launchable = False

    def _run(self, stream: Stream) -> None:
        clock = card.clock
        with quiet():
            for step in self.steps:
                step.replay()
                stream.time += clock.cost(step.name) * clock.replay_factor
        card.counters.replays += 1
        card.counters.replayed += len(self.steps)

    def refuse(self, what: str) -> CaptureError:
        """Spoils the recording; the error to raise for it."""
        self.invalid = True
        return CaptureError(f"sim error: operation not permitted when stream is capturing ({what})")

    def __del__(self) -> None:
        if self._stream is None or card is None or self._epoch != card.epoch:  # card: at exit
            return
        if self.invalid:
            card.aborts += 1
        self.pool.segments -= 1
        self.pool.waiting.pop(id(self), None)
        card.drop_workspace(self._stream)
        card.forget_segment(self)


def _check_may_record(stream: Stream, pool: Pool | None, pool_id: Any, used: bool) -> None:
    if card.broken:
        raise RuntimeError("sim error: the allocator is broken by an earlier INTERNAL ASSERT")
    if used:
        raise RuntimeError("this segment holds a recording already")
    if pool is None:
        raise RuntimeError(f"unknown pool {pool_id!r}")
    if stream is card.default_stream:
        raise RuntimeError("segments must be recorded on a non-default stream")
    if stream.segment is not None:
        raise CaptureError("sim error: operation not permitted when stream is capturing (begin)")
    if pool.recording:
        raise RuntimeError(f"already recording to mempool_id {pool_id!r}")
    if pool.retired:
        card.broken = True
        raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED: the pool's last segment is gone")
