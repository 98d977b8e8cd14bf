"""The same call again: the same random numbers, and nothing left behind."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from diffusers import DDIMScheduler, UniPCMultistepScheduler

from accel.backend import Backend
from accel.patches.rerun import Call, Traces, make_schedulers_plain, plain_schedulers
from accel.patches.schedulers import install, is_sync_free, take_off


class Pipe:
    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.history = scheduler, [1]

    @property
    def components(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler}


def test_generators_in_lists_are_copied_and_left_alone() -> None:
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    states = [g.get_state() for g in generators]
    call = Call((), {"generator": generators, "other": (1, [generators[0]])})
    draws = []
    for _ in range(2):
        copies = call.fresh()[1]["generator"]
        draws.append([torch.rand(1, generator=g).item() for g in copies])
    assert draws[0] == draws[1]
    assert draws[0][0] != draws[0][1]
    assert all(torch.equal(g.get_state(), s) for g, s in zip(generators, states, strict=True))


def test_another_call_has_other_words_steps_and_noise() -> None:
    generator = torch.Generator().manual_seed(1)
    call = Call((), {"prompt": ["a", "b"], "num_inference_steps": 2, "generator": generator})
    other = call.another().fresh()[1]
    assert other["prompt"] == ["a at night", "b at night"]
    assert other["num_inference_steps"] == 3
    assert other["generator"].initial_seed() != 1
    assert call.kwargs["prompt"] == ["a", "b"]


def test_random_numbers_of_all_kinds_are_put_back(device: torch.device, backend: Backend) -> None:
    def draw() -> list[float]:
        return [
            random.random(),
            float(np.random.rand()),
            torch.rand(1).item(),
            torch.rand(1, device=device).item(),
        ]

    traces = Traces(torch.nn.Linear(2, 2), (device,))
    first = draw()
    traces.put_back()
    assert draw() == first


def test_a_schedulers_history_is_put_back() -> None:
    pipe = Pipe(UniPCMultistepScheduler())
    pipe.scheduler.set_timesteps(4)
    outputs, box = list(pipe.scheduler.model_outputs), pipe.history
    with Traces(pipe).put_back_after():
        for t in pipe.scheduler.timesteps[:2]:
            pipe.scheduler.step(torch.ones(1, 4, 2, 2), t, torch.ones(1, 4, 2, 2))
        pipe.history.append(2)
        pipe.extra = 1  # type: ignore[attr-defined]
        assert pipe.scheduler.step_index == 2
    assert pipe.scheduler.step_index is None
    assert pipe.scheduler.model_outputs == outputs
    assert pipe.history is box and box == [1]
    assert not hasattr(pipe, "extra")


def test_schedulers_wait_again_while_they_are_plain() -> None:
    pipe = Pipe(DDIMScheduler())
    install(pipe.scheduler)
    with plain_schedulers(pipe):
        assert not is_sync_free(pipe.scheduler)
    assert is_sync_free(pipe.scheduler)
    assert make_schedulers_plain(pipe) == [pipe.scheduler]
    assert not is_sync_free(pipe.scheduler)
    with plain_schedulers(pipe):
        pass
    assert not is_sync_free(pipe.scheduler)
    take_off(pipe.scheduler)
