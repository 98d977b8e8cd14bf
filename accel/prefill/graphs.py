"""The captured buckets of one runner: when they are captured, what drops them, what they take.

Knows captured bodies by (bucket, paged). All of them share one pool; the largest is captured first,
so that the others find their memory in what it left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from accel.graph import BreakableGraph
from accel.guard import Ambient, WeightGuard
from accel.memory import Pool
from accel.prefill.buckets import Ladder
from accel.prefill.captured import BreakableBody, Captured, FullBody, Ground
from accel.prefill.packed_body import PackedBody
from accel.prefill.report import BucketReport, PrefillReport

FRUITLESS = 4
"""Times in a row that the model changed while graphs of it ran, after which none are captured."""
BARRED_CALLS = 64
"""Batches that run eagerly then, before graphs are tried again."""

Progress = Callable[[int, int, int], None]
"""Called with (graphs captured, graphs to capture, bucket)."""


class Graphs:
    """Captured bodies, made at first use. Used under the pool's lock."""

    def __init__(
        self, body: PackedBody, pool: Pool, ladder: Ladder, full: bool, report: PrefillReport
    ) -> None:
        self._body, self.pool, self._ladder, self._full = body, pool, ladder, full
        self._report = report
        model = body.model
        self._ground = Ground(pool)
        report.output_bytes = ladder.largest * model.hidden_size * model.dtype.itemsize
        self._guard = WeightGuard(model.module, pool.backend)
        self._captured: dict[tuple[int, bool], Captured] = {}
        self._failed: dict[tuple[int, bool], str] = {}
        self._state: object = None
        self._version = -1
        self._fruitless = self._barred = 0
        self._awake: BreakableGraph | None = None
        """The one that is ready for launch, of graphs that can rest."""
        pool.tenants.add(self)

    def get(self, bucket: int, paged: bool) -> Captured | str:
        """The captured body for a batch of that kind, captured now if need be; or why there is
        none. What it was captured with is looked at after the launch (`hold`); only that no weight
        it reads was freed has to be known before."""
        if self._barred:
            self._barred -= 1
            return "the model changes in every call"
        found = self._captured.get((bucket, paged and self._full))
        if found is not None and self._guard.check_alive() == self._version:
            return found
        self._follow_the_model()
        if self.given_up is not None:
            return self.given_up
        if not self._captured and not self._failed:
            self._clear_the_ground()
            self._capture(self._ladder.largest, paged and self._full)
        return self._capture(bucket, paged and self._full)

    def capture(self, progress: Progress | None, pieces: Sequence[int] = ()) -> None:
        """Captures every bucket that is not there yet, the largest first. Activations find places
        in `pieces` of so many bytes: the pool then begins with these. Not where a mask,
        which grows with the square, makes that a guess."""
        self._follow_the_model()
        self._clear_the_ground()
        with contextlib.suppress(torch.OutOfMemoryError):
            self.pool.anchor(*(pieces if self._body.groups else ()))
        kinds = list(self.kinds())
        for done, (bucket, paged) in enumerate(kinds):
            if self.given_up is not None:
                break
            self._capture(bucket, paged)
            if progress is not None:
                progress(done + 1, len(kinds), bucket)
        self._clear_the_ground()

    def _clear_the_ground(self) -> None:
        """What eager passes left in the allocator's hands, graphs cannot take; what capturing left
        there (FlashInfer makes 8 MiB for each graph, and 20 are held for it), nobody needs."""
        self.pool.backend.empty_cache()

    @property
    def given_up(self) -> str | None:
        """Why nothing is captured any more, in words. Several ranks stay in step: after the first
        failure on any of them, all run eagerly."""
        if self._guard.opaque is not None:
            return f"nothing is captured: {self._guard.opaque}"
        several = self._body.model.ranks > 1
        return next(iter(self._failed.values()), None) if several else None

    def kinds(self) -> Iterator[tuple[int, bool]]:
        """Every (bucket, paged) that a batch can have, in the order of capture."""
        cached = self._full and self._body.cache is not None
        for bucket in reversed(self._ladder.sizes):
            yield from ((bucket, paged) for paged in ((True, False) if cached else (False,)))

    def hold(self) -> bool:
        """Whether graphs still are what the model would do. If not they are dropped, and what they
        computed is worth nothing: asked while the device is at work."""
        self._follow_the_model()
        held = bool(self._captured)
        self._fruitless = 0 if held else self._fruitless + 1
        if self._fruitless == FRUITLESS:
            self._fruitless, self._barred = 0, BARRED_CALLS
        return held

    @property
    def has_graphs(self) -> bool:
        """Whether there is one to replay."""
        return bool(self._captured)

    def forget_graphs(self) -> None:
        """Drops every graph; the next call captures anew. Called by the pool, too."""
        for captured in self._captured.values():
            captured.graph.discard()
        self._captured.clear()
        self._awake = None
        self._report.buckets.clear()
        self._report.pool_bytes = self._report.buffer_bytes = 0

    def _follow_the_model(self) -> None:
        """Drops the graphs of weights or settings that are no longer the model's."""
        switches = Ambient(self._body.model.device.type).key
        self._version = self._guard.check()
        state = self._version, switches, self._body.model.state()
        if state != self._state:
            if self._captured:
                self._report.recaptures += 1
                self.pool.retire()
                self.pool.warm()  # an eager pass may come next
            self.forget_graphs()
            self._failed.clear()
        self._state = state

    def _capture(self, bucket: int, paged: bool) -> Captured | str:
        kind = bucket, paged
        if kind in self._captured:
            return self._captured[kind]
        if kind in self._failed:
            return self._failed[kind]
        generation = self.pool.generation
        found = self._try(bucket, paged)
        if (
            self.pool.generation != generation
        ):  # a device error while recording: all graphs are gone
            self.forget_graphs()
        if isinstance(found, str):
            self._failed[kind] = found
            self._report.notes.append(found)
            if self._body.model.ranks > 1:
                self.forget_graphs()
        else:
            self._captured[kind] = found
            self._let_others_rest(found.graph)
        return found

    def _try(self, bucket: int, paged: bool) -> Captured | str:
        for group in self._body.groups if self._full else ():
            if why := self._body.backend.objection(group, static=True, paged=paged):
                return f"not captured: {self._body.backend.name}: {why}"
        pool, report = self.pool, self._report
        pool.make_room()
        before, started = pool.bytes() if self._captured else 0, pool.backend.now()
        try:
            captured = self._with_or_without_recorder(bucket, paged)
        except torch.OutOfMemoryError:
            free, _ = pool.backend.memory(pool.device)
            return f"bucket {bucket} not captured: out of memory, {free:,} bytes free"
        except Exception as error:
            line = str(error).partition("\n")[0]
            return f"bucket {bucket} not captured: {type(error).__name__}: {line}"
        graph, seconds = captured.graph, pool.backend.now() - started
        report.captures += 1
        report.pool_bytes = pool.bytes()
        report.buffer_bytes += captured.workspace_bytes
        report.buckets.append(
            BucketReport(
                bucket,
                paged,
                graph.segments,
                len(graph.breaks),
                report.pool_bytes - before,
                seconds,
            )
        )
        return captured

    def _with_or_without_recorder(self, bucket: int, paged: bool) -> Captured:
        """What the plain capture of the first bucket fails on, the op-level recorder may know."""
        try:
            return self._attempt(bucket, paged)
        except torch.OutOfMemoryError:
            raise
        except Exception as first:
            if self._ground.automatic or self._captured:
                raise
            self._ground.automatic = True
            try:
                return self._attempt(bucket, paged)
            except Exception:
                self._ground.automatic = False
                raise first from None

    def _needs_values(self) -> bool:
        """Whether a capture has to run, too. The first one does, and shows whether there are breaks
        that read values; attention waits for the first replay."""
        first = next(iter(self._captured.values()), None)
        kinds = set() if first is None else {b.kind for b in first.graph.breaks}
        return first is None or self._ground.automatic or not kinds <= {"attention"}

    def _attempt(self, bucket: int, paged: bool) -> Captured:
        self._ground.run = self._needs_values()
        if self._full:
            fewest = self._ladder.fewest(bucket)
            return FullBody(self._body, self._ground, bucket, paged, fewest)
        return BreakableBody(self._body, self._ground, bucket)

    def count(self, captured: Captured, paged: bool) -> None:
        """Counts one replay; of graphs that can rest, the others do from now on."""
        self._let_others_rest(captured.graph)
        self._report.replays += 1
        for entry in self._report.buckets:
            if (entry.bucket, entry.paged) == (captured.bucket, paged and self._full):
                entry.replays += 1

    def _let_others_rest(self, graph: BreakableGraph) -> None:
        """Of graphs that can rest only the last one to run stays ready for launch."""
        if not graph.rests or graph is self._awake:
            return
        if self._awake is not None:
            self._awake.rest()
        self._awake = graph
