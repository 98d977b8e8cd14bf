"""Where the calls of a runner run: on whose stream, in whose memory, and how results come out.

With graphs all of a call runs on their pool's stream, eager work and the head too: a library keeps
scratch memory for every stream that it ever ran on, and memory that was freed on one stream goes to
no other. Knows pools and tensors, no prompts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from accel.memory import Pool


class Workplace:
    """One runner's. `ranks` are as in `PrefillModel`; without a `pool` it is the caller's stream.

    Used by one thread at a time. What is handed out lives until the caller's stream waits for the
    pool's: other threads may work on the caller's, too, and the memory would be theirs at once.
    """

    def __init__(self, pool: Pool | None, ranks: int) -> None:
        self._pool, self._alone = pool, ranks == 1
        self._caller: Any = None
        """The stream of whoever calls; None while work is done on that itself."""
        self._handed_out: list[torch.Tensor] | None = None
        """The caller's own, so far; None where hidden states stay here."""

    @contextlib.contextmanager
    def entered(self, graphs: bool, hands_out: bool = True) -> Iterator[None]:
        """Exclusive use of the pool, on its own stream if there are `graphs`, or will be. Where
        memory has run out somewhere these are given up before, but not over several ranks, which
        capture anew together or not at all. What a call `hands_out` is the caller's own."""
        if self._pool is None:
            yield
            return
        outer = self._caller, self._handed_out
        try:
            with self._pool.entered() if graphs else self._pool.use() as self._caller:
                self._handed_out = [] if hands_out else None
                if self._alone:
                    self._pool.relieve()
                if graphs:
                    self._pool.warm()
                yield
        finally:
            self._caller, self._handed_out = outer

    def catch_up(self) -> None:
        """What is queued on the caller's stream by now, by other threads too, comes first."""
        if self._pool is not None and self._caller is not None:
            self._pool.backend.wait_stream(self._pool.stream, self._caller)

    def taken_out(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, or, of work on the pool's stream, a copy: no graph's, and the caller's own if the
        call hands out what it computes."""
        return x if self._caller is None else self._owned(x, len(x)).copy_(x)

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The rows of several tensors that were taken out in one."""
        if self._caller is None or len(parts) == 1:
            return torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        return torch.cat(list(parts), out=self._owned(parts[0], sum(map(len, parts))))

    def _owned(self, like: torch.Tensor, rows: int) -> torch.Tensor:
        """Memory that belongs to the caller's stream, so that it goes back in the order of the work
        there. What is queued there, and may still use it, comes first."""
        shape = rows, *like.shape[1:]
        if self._pool is None or self._handed_out is None:
            return like.new_empty(shape)
        with self._pool.backend.on_stream(self._caller):
            whole = like.new_empty(shape)
        self.catch_up()
        self._handed_out.append(whole)
        return whole
