"""A tiny pipeline twice, plain and patched: what is done is done to both, and both must agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import accel
from accel.patches.overview import Report
from accel.pipelines import tiny
from accel.reporting import PartReport

Do = Callable[[Any], Any]


class Pair:
    """`plain` and `patched` have equal weights. On the simulated device the plain one stays on the
    CPU, whose bits the device's are."""

    def __init__(self, name: str, device: torch.device, **options: Any) -> None:
        self.name = name
        eager_on = "cpu" if device.type == "sim" else device
        self.plain = tiny.pipeline(name).to(eager_on)
        self.patched = tiny.pipeline(name).to(device)
        for pipe in (self.plain, self.patched):
            pipe.set_progress_bar_config(disable=True)
        accel.patch(self.patched, **{"capture": "always", **options})

    def both(self, do: Do) -> None:
        """Does the same to both, from the same random state."""
        for pipe in (self.plain, self.patched):
            torch.manual_seed(7)
            do(pipe)

    def picture(self, seed: int, prompt: str = "a red circle", **call: Any) -> np.ndarray:
        """The picture that both draw; fails where they differ in one bit."""
        expected, result = (
            draw(pipe, self.name, seed, prompt, **call) for pipe in (self.plain, self.patched)
        )
        assert np.array_equal(expected, result), f"{self.name}: another picture, seed {seed}"
        return expected

    @property
    def report(self) -> Report:
        """What was done to the patched one."""
        return accel.report(self.patched)

    def part(self, name: str) -> PartReport:
        """The report on one part."""
        return self.report[name]


def draw(pipe: Any, name: str, seed: int = 0, prompt: str = "a circle", **call: Any) -> np.ndarray:
    """The picture that a tiny pipeline draws for a seed, as numbers."""
    options = {**tiny.CALLS[name], **call}
    generator = torch.Generator().manual_seed(seed)
    picture = pipe(prompt, generator=generator, output_type="np", **options)[0]
    return np.asarray(picture)
