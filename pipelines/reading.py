"""Ways of reading batches of texts, and how long each takes.

A way turns a batch into one tensor a text: the logits behind its last token, or the
log-probabilities of its tokens. This module knows no runner and no model. Seconds are wall clock
over all batches, the device synchronized before and after.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from accel.pipelines import machine
from accel.pipelines.texts import Text

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Read = Callable[[list[list[int]]], "Sequence[Tensor]"]
"""A batch of token ids -> one tensor a text."""

WARM_UP = 2
"""Rounds before the clock runs: kernels load, and what was not captured ahead is captured."""


@dataclass
class Way:
    """One way of reading, what it made of the texts, and the seconds of every timed round."""

    read: Read
    found: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def round(self, batches: Sequence[Sequence[Text]], device: torch.device) -> float:
        """Reads all batches once and returns the seconds that it took."""
        machine.synchronize(device)
        started = time.perf_counter()
        found = [row for batch in batches for row in self.read([text.ids for text in batch])]
        machine.synchronize(device)
        seconds = time.perf_counter() - started
        self.found = found
        return seconds

    def to_dict(self, tokens: int) -> dict[str, Any]:
        """The clock's readings for `tokens` tokens a round, as plain data."""
        middle = median(self.seconds)
        return {"median_s": middle, "tokens_per_s": tokens / middle, "seconds": self.seconds}


def read_in_turns(
    ways: Sequence[Way],
    batches: Sequence[Sequence[Text]],
    device: torch.device,
    repeats: int,
    on_round: Callable[[str], None],
) -> None:
    """Warms every way up, then times `repeats` rounds of each. `on_round` hears what runs next."""
    on_round("warming up")
    for way in ways:
        for _ in range(WARM_UP):
            way.round(batches, device)
    for index in range(repeats):
        on_round(f"round {index + 1} of {repeats}")
        # Each way goes first in half of the rounds, so that heat and clocks favour neither.
        for way in ways if index % 2 == 0 else list(reversed(ways)):
            way.seconds.append(way.round(batches, device))
