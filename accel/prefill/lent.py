"""Memory that graphs lend to eager work between two replays, so that neither adds to the other.

Knows one pool. What such work returns is copied out, as replays' results are. What it keeps for
itself must not stay there: the next replay would write over it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from accel.memory import Pool
from accel.runner import _inside as runners_step_aside

T = TypeVar("T")
OTHER_GRAPHS = "torch._inductor.cudagraph_trees"
"""Loaded where the compiler records graphs of its own: their memory would be mistaken for ours."""


class LentMemory:
    """Runs eager work in a pool's memory. Used on the pool's stream, under its lock."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._lends = True

    @property
    def lends(self) -> bool:
        """Whether work runs there: if there are graphs, and until it was seen to keep a tensor."""
        graphs = any(tenant.has_graphs for tenant in self._pool.tenants)
        return self._lends and graphs and OTHER_GRAPHS not in sys.modules

    def run(self, work: Callable[[], torch.Tensor], taken_out: Callable[[torch.Tensor], T]) -> T:
        """What `taken_out` makes of the result of `work`, which is gone from the pool then. Work
        that runs out of memory runs once more, outside: a pool gets none that is cached."""
        if self.lends:
            short = self._pool.short
            try:
                return self._run(work, taken_out)
            except torch.OutOfMemoryError:
                self._pool.short = short  # nobody else was short
            self._pool.backend.empty_cache()
        return taken_out(work())

    def _run(self, work: Callable[[], torch.Tensor], taken_out: Callable[[torch.Tensor], T]) -> T:
        pool = self._pool
        pool.warm()
        before = pool.backend.live_blocks(pool.id)
        with runners_step_aside(), pool.backend.in_pool(pool, pool.device):
            result = work()
        kept = taken_out(result)
        del result
        if self._more_than(before):  # asked while the device works
            self._lends = False
            gc.collect()
            if self._more_than(before):
                pool.retire()
        return kept

    def _more_than(self, before: set[int]) -> bool:
        return not self._pool.backend.live_blocks(self._pool.id) <= before
