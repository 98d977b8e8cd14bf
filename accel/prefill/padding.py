"""Where padding costs more than launching: batches that run eagerly, without a bucket's padding.

A graph saves the host's time, and its bucket costs the device's. Where the device is the bottleneck
anyway, an eager pass over fewer rows is as fast as a graph, row for row, and so never slower. Knows
from how many tokens on that is: a number that was given, or that is measured once.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable

import torch

from accel.memory import Pool
from accel.prefill.batch import Batch, Request
from accel.prefill.buckets import Ladder
from accel.prefill.packed_body import PackedBody
from accel.prefill.report import PrefillReport
from accel.prefill.slots import HOST
from accel.runner import HOST_SLACK

REASON = "padding costs more than launching"
PADDING = 0.03
"""Rows that a bucket adds, as a share of those it needs not, up to which a graph is taken all the
same: about what one gains where the device is the bottleneck, by smaller gaps between kernels."""


class Unpadded:
    """Which batches run without padding. `run` is an eager pass.

    The number of tokens stands in the report: None until it is needed for the first time.
    """

    def __init__(
        self,
        body: PackedBody,
        pool: Pool,
        ladder: Ladder,
        run: Callable[[Batch], object],
        report: PrefillReport,
    ) -> None:
        self._body, self._pool, self._ladder, self._run = body, pool, ladder, run
        self._report = report
        several = body.model.ranks > 1  # they could come to different numbers
        matters = any(self._padded(size + 1) for size in ladder.sizes[:-1])
        if report.unpadded_above is None and (several or not matters):
            report.unpadded_above = ladder.largest

    def rows(self, tokens: int) -> int | None:
        """Rows for an eager pass without padding, or None where the bucket is right."""
        if not self._padded(tokens) or tokens <= self.found_out():
            return None
        return self._ladder.multiple(tokens)

    def _padded(self, tokens: int) -> bool:
        """Whether such a batch has a bucket that adds many rows."""
        fewer = self._ladder.multiple(tokens)
        return (self._ladder.bucket(tokens) or 0) > fewer * (1 + PADDING)

    def found_out(self) -> int:
        """The number of tokens above which batches are not padded, measured the first time. It is
        one of the ladder's sizes, so that the next process hardly ever comes to another; the
        largest means that all are padded."""
        if self._report.unpadded_above is None:
            self._report.unpadded_above = self._measured()
        return self._report.unpadded_above

    def _measured(self) -> int:
        """The smallest size at which the device is the bottleneck: it is at larger ones, too."""
        sizes, short = self._ladder.sizes, self._pool.short
        try:
            return sizes[bisect_left(sizes, True, hi=len(sizes) - 1, key=self._waits_for_device)]
        except Exception as error:
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            note = f"every batch is padded, unpadded_above={sizes[-1]}: {why}"
            self._report.notes.append(note)
        self._pool.short = short  # memory that is missing here is missing to nobody
        self._pool.backend.empty_cache()
        return sizes[-1]

    def _waits_for_device(self, rows: int) -> bool:
        """Whether the device still has much to do when an eager pass has returned: in the better of
        two, as the first one loads kernels and takes memory."""
        batch = self._batch(rows)
        return max(self._lag(batch) for _ in range(2)) >= HOST_SLACK

    def _lag(self, batch: Batch) -> float:
        """The part of the device's time that is to come when the host is done."""
        backend, stream = self._pool.backend, self._pool.backend.current_stream(self._pool.device)
        backend.synchronize(stream)
        first = backend.record_event(stream, timing=True)
        self._run(batch)
        last, host = backend.record_event(stream, timing=True), backend.now()
        last.synchronize()
        device = first.elapsed_time(last) / 1e3
        return (backend.now() - host) / device if device else 0.0

    def _batch(self, rows: int) -> Batch:
        """One prompt of random tokens: of equal ones all would go to the same experts. Positions
        are harmless ones, as a table of positions may end before the bucket."""
        draw = torch.Generator(HOST).manual_seed(rows)
        vocabulary = self._body.model.vocab_size
        ids = torch.randint(0, vocabulary, (rows,), generator=draw, device=HOST).tolist()
        batch = self._body.pack([Request(array("q", ids))], rows)
        batch.positions.zero_()
        return batch
