"""Long random sequences of calls on one runner: every result is what the model itself gives."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from accel.prefill.kv_cache import CacheFull
from accel.prefill.result import Handle
from accel.prefill.runner import PrefillRunner
from tests.accel.common import scribble
from tests.accel.prefill.tiny import VOCAB, TinyModel

Make = Callable[..., PrefillRunner]


class Story:
    """Calls a runner with random prompts, some of them behind cached ones, and checks each."""

    def __init__(self, runner: PrefillRunner, model: TinyModel, seed: int) -> None:
        self._runner, self._model, self._draw = runner, model, random.Random(seed)
        self._handles: list[Handle] = []
        self.full = self.checked = 0

    def turn(self) -> None:
        """One call, with one to six prompts."""
        draw = self._draw
        prefixes = [self._prefix() for _ in range(draw.randint(1, 6))]
        prompts = [[draw.randrange(VOCAB) for _ in range(self._length())] for _ in prefixes]
        try:
            result = self._runner(prompts, prefix=prefixes)
        except CacheFull:
            self.full += 1
            self._handles.clear()
            return
        for i, (prompt, prefix) in enumerate(zip(prompts, prefixes, strict=True)):
            self._check(result.hidden(i), prompt, prefix)
            if draw.random() < 0.4:
                self._handles.append(result.handle(i))
        draw.shuffle(self._handles)
        del self._handles[6:]

    def _length(self) -> int:
        return self._draw.choice([1, 2, 15, 16, 17, self._draw.randint(1, 90)])

    def _prefix(self) -> Handle | None:
        near = [handle for handle in self._handles if handle.tokens < 300]
        return self._draw.choice(near) if near and self._draw.random() < 0.6 else None

    def _check(self, hidden: torch.Tensor, prompt: list[int], prefix: Handle | None) -> None:
        ids = torch.tensor([*(prefix.ids if prefix else ()), *prompt], device=self._model.device)
        with torch.no_grad():
            own = self._model.own(ids)[-len(prompt) :]
        assert (hidden - own).abs().max() < 2e-5
        self.checked += 1


@pytest.mark.parametrize("mode", ["eager", "breakable", "full"])
@pytest.mark.parametrize("seed", range(3))
def test_every_call_of_a_long_sequence(
    mode: str, seed: int, tiny: TinyModel, make: Make, device: torch.device
) -> None:
    runner = make(
        tiny, mode=mode, max_tokens=96, max_requests=5, buckets=(16, 48), cache_tokens=1200
    )
    story = Story(runner, tiny, seed)
    for turn in range(25):
        story.turn()
        if turn % 5 == 0:
            scribble(device)
    assert story.checked > 40
    del story
    assert runner.free_cache_tokens == 1200
