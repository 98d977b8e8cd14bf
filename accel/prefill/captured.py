"""Captured bodies: one graph per bucket, breakable or full, and what is done before each replay.

Knows how a `PackedBody` becomes a graph. Does not know when (graphs.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from accel.graph import OURS, WEIGHT, BreakableGraph, as_break, capture, current_recording
from accel.memory import Pool
from accel.prefill.attention import Attention, Unsupported
from accel.prefill.batch import Batch, Buffers, Request, pack
from accel.prefill.packed_body import Attending, PackedBody, Run, packed_mask

ALWAYS_LAUNCHABLE = 1024
"""Rows up to which graphs are ready for launch. Of larger ones a layer keeps the device busy for
longer than the host takes to make the next layer's segment launchable, some 0.1 ms."""
LAYERS_A_SEGMENT = 4
"""Of full graphs that are larger, which nothing else cuts."""


class Captured(Protocol):
    """A captured body of one bucket."""

    graph: BreakableGraph
    bucket: int
    output: torch.Tensor
    """`[bucket, hidden]`: where a replay leaves the hidden states. It keeps no memory alive: the
    pool lends it to the other graphs, so it holds until the next of them runs or is captured."""

    def replay(self, requests: Sequence[Request]) -> None:
        """Runs the body for `requests`."""

    @property
    def workspace_bytes(self) -> int:
        """Device memory that belongs to this graph and lies outside the pool, in bytes."""


@dataclass
class Ground:
    """What all graphs of a runner share: the pool, and how they are recorded.

    `automatic` has the op-level recorder find what cannot be recorded. Most bodies need it not, and
    it costs time an op; some upload a constant in the middle.
    """

    pool: Pool
    automatic: bool = False
    run: bool = True
    """Whether what is captured also runs: its results are nobody's."""
    _batch: torch.Tensor | None = field(default=None, init=False, repr=False)
    """What captured graphs read their batches from, in the pool's generation of that number."""
    _generation: int = field(default=-1, init=False, repr=False)

    def buffers(
        self, bucket: int, device: torch.device, slots: int = 0, pages: int = 0, kv_bound: int = 0
    ) -> Buffers:
        """Where a graph reads its batch: the same memory for all, as one runs at a time and loads
        its own before. Not with pages: behind the last one in use kernels may look at what lies
        there, which must be pages, too."""
        if self._generation != self.pool.generation:  # the graphs that had it are gone
            self._batch, self._generation = None, self.pool.generation
        within = None if pages else self._batch
        return Buffers.new(bucket, device, slots, pages, kv_bound, within)

    def share(self, buffers: Buffers) -> None:
        """Has later graphs read their batches where one that is captured now reads its own."""
        if buffers.nbytes:
            self._batch = buffers.flat


@contextlib.contextmanager
def _on_all_ranks(
    body: PackedBody, ground: Ground, graph: BreakableGraph, buffers: Buffers
) -> Iterator[None]:
    """Captures the body on every rank or on none. They agree before the last segment runs for the
    first time: its collectives would wait for ever for a rank that has none."""
    model = body.model
    model.agree(True)
    origins = _origins(body, ground, buffers) if ground.automatic else {}
    with (
        model.capturing(),
        capture(graph, automatic=ground.automatic, origins=origins, run=ground.run) as recording,
    ):
        graph.held.append(recording.held)
        try:
            yield
        except BaseException:
            model.agree(False)
            raise
        if not model.agree(True):
            raise Unsupported("another rank could not capture")


def _origins(body: PackedBody, ground: Ground, buffers: Buffers) -> dict[int, str]:
    """By address: weights, and buffers of ours, which recorded work may write and nobody frees."""
    storage, module = ground.pool.backend.storage, body.model.module
    ours = [buffers.flat, *(body.cache.tensors if body.cache else ())]
    weights = dict.fromkeys((*module.parameters(), *module.buffers()), WEIGHT)
    return {
        storage(x).data_ptr(): kind for x, kind in (weights | dict.fromkeys(ours, OURS)).items()
    }


class BreakableBody:
    """Every layer's attention is a break. Only ids and positions have addresses that count."""

    def __init__(self, body: PackedBody, ground: Ground, bucket: int) -> None:
        self._body, self.bucket = body, bucket
        self._buffers = ground.buffers(bucket, body.model.device)
        self.graph = BreakableGraph(ground.pool, rests=bucket > ALWAYS_LAUNCHABLE)
        batch = self._load([Request((0,) * bucket)])
        batch.positions.zero_()  # harmless ones: a table of positions may end before the bucket
        if not ground.run:
            body.live = None  # there will be nothing to attend to before the first replay
        attending = Attending(body.groups, as_break(body.attend, pure=False, kind="attention"))
        with _on_all_ranks(body, ground, self.graph, self._buffers):
            hidden = body.model.body(batch.ids, batch.positions, attending)
            self._check_breaks()
        self.output = ground.pool.backend.alias(hidden[0])
        ground.share(self._buffers)

    def _check_breaks(self) -> None:
        fired = sum(b.kind == "attention" for b in self.graph.breaks)
        if fired != len(self._body.groups):
            layers = len(self._body.groups)
            raise Unsupported(f"{fired} attention breaks fired for {layers} attention layers")

    def _load(self, requests: Sequence[Request]) -> Batch:
        body = self._body
        batch = pack(
            requests,
            self.bucket,
            body.model.device,
            cache=body.cache,
            kv_bound=body.kv_bound,
            into=self._buffers,
        )
        body.plan(batch)
        return batch

    def replay(self, requests: Sequence[Request]) -> None:
        """As `Captured.replay`, for any number of requests."""
        self._load(requests)
        self.graph.replay()

    @property
    def workspace_bytes(self) -> int:
        """Ids and positions; attention has one workspace for all buckets."""
        return self._buffers.nbytes


class FullBody:
    """One graph, attention and all: slots, pages and rows have addresses that were captured. In one
    segment, or in several that are made launchable while the device runs those before.

    Captured with the largest batch there can be, all of it in the cache's dummy page. Those that it
    runs have `fewest` tokens or more.
    """

    def __init__(
        self, body: PackedBody, ground: Ground, bucket: int, paged: bool, fewest: int = 1
    ) -> None:
        self._body, self.bucket, self._paged, self._fewest = body, bucket, paged, fewest
        cache = body.cache
        pages = cache.pages_for(body.kv_bound) + body.slots if cache else 0
        bound = body.kv_bound if paged else 0
        self._buffers = ground.buffers(bucket, body.model.device, body.slots, pages, bound)
        self._attention: Attention | None = None
        if body.groups:
            room = body.room(bucket, static=True, paged=paged)
            self._attention = body.backend.attention(room)
        self.graph = BreakableGraph(ground.pool, rests=self._may_rest(ground))
        batch = self._load([self._largest()])
        batch.positions.zero_()
        with _on_all_ranks(body, ground, self.graph, self._buffers):
            hidden = self._record(batch)
        self.output = ground.pool.backend.alias(hidden[0])
        if not pages:
            ground.share(self._buffers)

    def _may_rest(self, ground: Ground) -> bool:
        """Whether it is large enough, and can be cut: not in the middle of ranks' work."""
        whole = self._attention is None or self._body.model.ranks > 1 or not ground.pool.may_cut
        return self.bucket > ALWAYS_LAUNCHABLE and not whole

    def _largest(self) -> Request:
        cache, ids = self._body.cache, (0,) * self.bucket
        if cache is None:
            return Request(ids)
        prefix = self._body.kv_bound - self.bucket if self._paged else 0
        return Request(ids, prefix, (cache.dummy_page,) * cache.pages_for(prefix + len(ids)))

    def _record(self, batch: Batch) -> torch.Tensor:
        model = self._body.model
        if self._attention is None:
            return model.masked_body(batch.ids, batch.positions, packed_mask(batch))
        run = self._body.attend_in_graph(batch, self._attention, self._fewest)
        attending = Attending(self._body.groups, _cutting(run) if self.graph.rests else run)
        hidden = model.body(batch.ids, batch.positions, attending)
        if attending.layers != len(self._body.groups):
            raise Unsupported(f"{attending.layers} of {len(self._body.groups)} layers attended")
        return hidden

    def _load(self, requests: Sequence[Request]) -> Batch:
        body = self._body
        batch = pack(
            requests,
            self.bucket,
            body.model.device,
            slots=body.slots,
            cache=body.cache,
            paged=self._paged,
            kv_bound=body.kv_bound,
            into=self._buffers,
        )
        if batch.tokens < self._fewest:
            raise Unsupported(f"a graph for {self._fewest} tokens or more got {batch.tokens}")
        if self._attention is not None:
            self._attention.plan(batch)
        return batch

    def replay(self, requests: Sequence[Request]) -> None:
        """As `Captured.replay`, for at most as many requests as there are slots."""
        self._load(requests)
        self.graph.replay()

    @property
    def workspace_bytes(self) -> int:
        """Batch tensors and what attention holds for this graph."""
        own = self._attention.workspace_bytes if self._attention else 0
        return own + self._buffers.nbytes


def _cutting(run: Run) -> Run:
    """`run`, in a new segment every few layers."""

    def attend(index: int, *tensors: Any) -> None:
        recording = current_recording()
        if recording is not None and index and index % LAYERS_A_SEGMENT == 0:
            recording.cut()
        run(index, *tensors)

    return attend
