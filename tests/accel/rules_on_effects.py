"""L7, L9, L10: what each does for failures, effects and tensors that a model keeps, and how to
switch it off."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accel.runner
from accel.backend import keep_for_ever
from accel.breaks import Break
from accel.graph import Recording, current_recording, eager_on_graph
from accel.memory import Pool
from accel.recorded import Generators, Recorded
from tests.accel.rules import Box, Rule, new_runner, replaced, together, wrapped
from tests.accel.same import assert_same
from tests.accel.twin import watching

# L7: failed recordings


@torch.no_grad()
def a_forward_raises(device: torch.device) -> None:
    pool, x = Pool(device), torch.ones(3, device=device)
    bad = new_runner(lambda x: x.add(1) + dict[str, int]()["nothing"], device, pool=pool)
    for _ in range(3):
        with pytest.raises(KeyError, match="nothing"):
            bad(x)
    good = new_runner(lambda x: x * 3, device, pool=pool)
    for _ in range(3):
        assert good(x).tolist() == [3.0] * 3
    assert good.report.replays == 1, "no later call is recorded"


@torch.no_grad()
def the_device_objects(device: torch.device) -> None:
    """The forward survives it; the recording does not."""

    def hostile(x: Tensor) -> Tensor:
        y = x.add(1)
        if current_recording() is not None:
            try:
                getattr(torch, x.device.type).synchronize()
            except Exception as error:
                raise ValueError("the first error") from error
        return y

    pool, x = Pool(device), torch.ones(3, device=device)
    bad, good = (new_runner(f, device, pool=pool) for f in (hostile, lambda x: x * 3))
    for _ in range(3):
        assert bad(x).tolist() == [2.0] * 3
    reason = bad.report.declined
    assert reason == "recording failed: ValueError: the first error", reason
    for _ in range(3):
        assert good(x).tolist() == [3.0] * 3
    assert good.report.replays == 1, "no later call is recorded"
    gc.collect()
    assert getattr(pool.backend, "aborts", 0) == 0, "a spoilt recording was destroyed"


def not_ended(self: Recording) -> None:
    self.graph.discard()


def ended_without_care(self: Recording) -> None:
    segment, self._segment = self._segment, None
    try:
        segment.end()
    finally:
        self.graph.pool.abandon(segment)


# L9: effects


@torch.no_grad()
def a_write_before_a_read(device: torch.device) -> None:
    total = torch.zeros(3, device=device)

    def forward(x: Tensor) -> Tensor:
        total.add_(x)
        return x + total.sum().item()

    runner = new_runner(forward, device)
    for turn in range(1, 7):
        runner(torch.ones(3, device=device))
        assert total.tolist() == [float(turn)] * 3, "it was added twice"


def without_the_ban(note: Any) -> Any:
    def note_effect(self: Recording, written: Tensor, effect: str) -> None:
        note(self, written, effect)
        self.effect = None

    return note_effect


def without_undo(self: Recording, written: Tensor, effect: str) -> None:
    self.effect = self.effect or effect


@torch.no_grad()
def a_write_and_a_setting_that_changes(device: torch.device) -> None:
    total, setting = torch.zeros(3, device=device), [1]

    def forward(x: Tensor) -> Tensor:
        total.add_(x)
        return total * setting[0]

    runner = new_runner(forward, device, probe=lambda: setting[0])
    for turn in range(1, 7):
        setting[0] = 1 + turn // 4
        y = runner(torch.ones(3, device=device))
        assert total.tolist() == [float(turn)] * 3, "it was added twice"
        assert y.tolist() == [float(turn * setting[0])] * 3
    assert runner.report.replays > 0


def not_known_to_write(init: Any) -> Any:
    def initialize(self: Recorded, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.commits = False

    return initialize


def sequences(device: torch.device, forward: Callable[[Tensor], Any]) -> tuple[Any, Any, Any]:
    """What six calls draw, plain and behind a runner; the runner."""
    runner, drawn = new_runner(forward, device), []
    with torch.no_grad():
        for function in (forward, runner):
            torch.manual_seed(3)
            random.seed(3)
            inputs = [torch.full((3,), float(turn), device=device) for turn in range(6)]
            drawn.append([getattr(y := function(x), "value", y) for x in inputs])
    expected, result = drawn
    return expected, result, runner


def chance_before_a_read(device: torch.device) -> None:
    expected, result, runner = sequences(device, lambda x: torch.rand_like(x) + x.sum().item())
    assert runner.report.guard_misses > 0
    assert_same(result, expected, "other random numbers")


def chance_before_a_refusal(device: torch.device) -> None:
    expected, result, runner = sequences(device, lambda x: Box(torch.rand_like(x) + x))
    assert "Box" in str(runner.report.declined)
    assert_same(result, expected, "other random numbers")


def chance_on_the_host(device: torch.device) -> None:
    expected, result, _ = sequences(device, lambda x: x * random.random())
    assert_same(result, expected, "other random numbers")


def never_put_back_in_a_replay(replay: Any) -> Any:
    def run(self: Recorded, tensors: list[Tensor]) -> Any:
        with pytest.MonkeyPatch.context() as monkeypatch:
            kind = type(self.graph.pool.backend)
            monkeypatch.setattr(kind, "set_rng_state", lambda *args: None)
            return replay(self, tensors)

    return run


def impure_break_before_a_read(device: torch.device) -> list[int]:
    """How often each of six calls runs an effect."""
    effects: list[int] = []

    @eager_on_graph
    def note(x: Tensor) -> None:
        effects[-1] += 1

    def forward(x: Tensor) -> Tensor:
        note(x)
        return x + x.sum().item()

    runner = new_runner(forward, device)
    with torch.no_grad():
        for turn in range(6):
            effects.append(0)
            runner(torch.full((3,), float(turn), device=device))
    return effects


def an_effect_before_a_read(device: torch.device) -> None:
    assert impure_break_before_a_read(device)[2:] == [1] * 4, "a break ran twice in a call"


def all_pure(run_break: Any) -> Any:
    def run(self: Recording, step: Break, pure: bool) -> Any:
        return run_break(self, step, pure=True)

    return run


# L10: tensors that the model keeps


@torch.no_grad()
def keeps(made: Callable[[Tensor], Tensor], device: torch.device) -> None:
    shelf: dict[int, Tensor] = {}

    def forward(x: Tensor) -> Tensor:
        shelf[turn] = made(x)
        return shelf[turn] + 1

    runner = new_runner(forward, device)
    for turn in range(5):
        runner(torch.full((3,), float(turn), device=device))
    kept = {turn: x.tolist()[0] for turn, x in shelf.items()}
    assert kept == {turn: 2.0 * turn for turn in range(5)}, "what it kept has changed"


def it_keeps_what_it_computed(device: torch.device) -> None:
    keeps(lambda x: x * 2, device)


doubled = eager_on_graph(pure=True)(lambda x: x * 2)


def it_keeps_what_a_break_gave_it(device: torch.device) -> None:
    keeps(doubled, device)


def it_keeps_a_view_of_what_a_break_gave_it(device: torch.device) -> None:
    keeps(lambda x: doubled(x)[:], device)


def without_buffers(leaks: Any) -> Any:
    def only_the_pool(self: Recorded, ours: set[int]) -> bool:
        backend, pool_id = self.graph.pool.backend, self.graph.pool.id
        return not backend.live_blocks(pool_id) <= ours

    return only_the_pool


class Turns(nn.Module):
    """Goes one way in one call and the other in the next."""

    flip = False

    def forward(self, x: Tensor) -> Tensor:
        self.flip = not self.flip
        return x * 2 if self.flip else x * 3


@torch.no_grad()
def it_counts_its_calls(device: torch.device) -> None:
    model = Turns()
    runner = new_runner(model, device, module=model, **watching(model))
    results = [runner(torch.ones(1, device=device)).item() for _ in range(8)]
    assert results == [2.0, 3.0] * 4, "it went the wrong way"


def nothing_objected(init: Any) -> Any:
    def initialize(self: Recorded, *args: Any) -> None:
        init(self, *args[:5])

    return initialize


ON_EFFECTS = [
    Rule(
        "L7",
        "a failed recording is ended",
        a_forward_raises,
        replaced(Recording, "abort", not_ended),
        "no later call is recorded",
    ),
    Rule(
        "L7",
        "the first error is reported",
        the_device_objects,
        replaced(Recording, "abort", ended_without_care),
        "previous error",
    ),
    Rule(
        "L7",
        "a poisoned pool is left",
        the_device_objects,
        together(
            replaced(Pool, "abandon", lambda self, wreck: keep_for_ever(wreck)),
            replaced(accel.runner, "outlives_garbage", lambda kept: False),
        ),
        "no later call is recorded",
    ),
    Rule(
        "L7",
        "a spoilt recording is never destroyed",
        the_device_objects,
        replaced(Pool, "abandon", lambda self, wreck: self._open_generation()),
        "a spoilt recording was destroyed",
    ),
    Rule(
        "L9",
        "no guard after a write outside",
        a_write_before_a_read,
        wrapped(Recording, "note_effect", without_the_ban),
        "added twice",
    ),
    Rule(
        "L9",
        "writes of a refused recording are taken back",
        a_write_before_a_read,
        replaced(Recording, "note_effect", without_undo),
        "added twice",
    ),
    Rule(
        "L9",
        "what writes is checked before it is launched",
        a_write_and_a_setting_that_changes,
        wrapped(Recorded, "__init__", not_known_to_write),
        "added twice",
    ),
    Rule(
        "L9",
        "no guard after an impure break",
        an_effect_before_a_read,
        wrapped(Recording, "run_break", all_pure),
        "ran twice",
    ),
    Rule(
        "L9",
        "the generator after an abandoned replay",
        chance_before_a_read,
        wrapped(Recorded, "replay", never_put_back_in_a_replay),
        "other random numbers",
    ),
    Rule(
        "L9",
        "the generator after a refused recording",
        chance_before_a_refusal,
        replaced(Generators, "put_back", lambda self: None),
        "other random numbers",
    ),
    Rule(
        "L9",
        "random numbers of the host",
        chance_on_the_host,
        replaced(Generators, "refuse_drawn_on_host", lambda self: None),
        "other random numbers",
    ),
    Rule(
        "L10",
        "memory of the pool",
        it_keeps_what_it_computed,
        replaced(Recorded, "_refuse_leaks", lambda self, ours: None),
        "what it kept has changed",
    ),
    Rule(
        "L10",
        "boundary buffers",
        it_keeps_a_view_of_what_a_break_gave_it,
        wrapped(Recorded, "_leaks", without_buffers),
        "what it kept has changed",
    ),
    Rule(
        "L10",
        "attributes",
        it_counts_its_calls,
        wrapped(Recorded, "__init__", nothing_objected),
        "the wrong way",
    ),
]
