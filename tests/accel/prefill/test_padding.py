"""Batches run without padding where the device is the bottleneck: measured once, or as told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from accel.prefill.model import Attend
from accel.prefill.padding import REASON
from accel.prefill.runner import PrefillRunner
from tests.accel.prefill.tiny import TinyModel, prompts_of

Make = Callable[..., PrefillRunner]
MODES = ["breakable", "full"]
BUCKETS = (16, 64, 128)


@pytest.fixture
def tiny(sim: torch.device) -> TinyModel:
    """A tiny model on the simulated device, whose clock can be set."""
    return TinyModel(sim)


@pytest.fixture
def clock(sim: torch.device) -> Any:
    """The simulated device's: an operation takes it 10 µs, and the host as long as a test says."""
    from tests.simulated.backend import SimulatedBackend

    return SimulatedBackend().clock


def rows_of(runner: PrefillRunner, *lengths: int) -> int:
    """The rows that a batch of such prompts runs with."""
    before = runner.report.tokens + runner.report.padding
    runner(prompts_of(*lengths))
    return runner.report.tokens + runner.report.padding - before


class Growing(TinyModel):
    """Its operations take the device longer the more rows there are: 0.1 µs for each."""

    def __init__(self, device: torch.device, clock: Any) -> None:
        super().__init__(device)
        self.clock = clock

    def body(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        self.clock.default_cost = 0.1e-6 * ids.shape[1]
        return super().body(ids, positions, attend)


@pytest.mark.parametrize(("host_us", "above"), [(0, 16), (1.5, 64), (7, 128), (12, 256), (90, 256)])
def test_the_number_is_where_the_device_becomes_the_bottleneck(
    host_us: float, above: int, sim: torch.device, clock: Any, make: Make
) -> None:
    clock.default_host = host_us * 1e-6
    runner = make(Growing(sim, clock), buckets=BUCKETS, unpadded_above=None).capture()
    assert runner.report.unpadded_above == above
    assert rows_of(runner, 70) == (80 if above < 70 else 128)
    assert rows_of(runner, 140) == (144 if above < 140 else 256)
    eager = (above < 70) + (above < 140)
    assert runner.report.eager_passes == runner.report.reasons[REASON] == eager
    assert runner.report.replays == 2 - eager


@pytest.mark.parametrize("mode", MODES)
def test_results_without_padding_are_the_models_own(
    mode: str, clock: Any, tiny: TinyModel, make: Make
) -> None:
    runner = make(tiny, mode=mode, buckets=BUCKETS, unpadded_above=None, cache_tokens=1024)
    for lengths in ((33, 50), (130,), (64,), (5,), (200, 1, 3), (300,)):
        prompts = prompts_of(*lengths)
        result = runner(prompts)
        behind = runner([[3] * 70], prefix=result.handle(0))
        for i, prompt in enumerate(prompts):
            own = tiny.own(torch.tensor(prompt, device=tiny.device))
            assert (result.hidden(i) - own).abs().max() < 1e-5
        own = tiny.own(torch.tensor([*prompts[0], *[3] * 70], device=tiny.device))
        assert (behind.hidden(0) - own[-70:]).abs().max() < 1e-5
    assert set(runner.report.reasons) == {REASON}
    assert runner.report.replays > 0


@pytest.mark.parametrize("mode", MODES)
def test_it_is_measured_at_the_first_batch_that_needs_it(
    mode: str, clock: Any, tiny: TinyModel, make: Make
) -> None:
    runner = make(tiny, mode=mode, buckets=BUCKETS, unpadded_above=None)
    for n in (16, 60, 128, 250):  # padded by little, or not at all
        runner(prompts_of(n))
    assert runner.report.unpadded_above is None
    runner(prompts_of(70))
    assert runner.report.unpadded_above == 16
    clock.default_host = 1e-3
    bodies = tiny.bodies
    tiny.setting = 1  # graphs are made anew
    runner(prompts_of(64))
    runner.capture()
    assert runner.report.unpadded_above == 16
    assert tiny.bodies == bodies + 4  # a capture each


def test_a_number_that_is_given_counts(clock: Any, tiny: TinyModel, make: Make) -> None:
    clock.default_host = 1e-3
    runner = make(tiny, buckets=BUCKETS, unpadded_above=100)
    bodies = tiny.bodies
    assert [rows_of(runner, n) for n in (70, 100, 129)] == [128, 128, 144]
    assert runner.report.unpadded_above == 100
    assert tiny.bodies == bodies + 3  # 256, 128 and the eager pass


def test_ranks_do_not_measure(clock: Any, tiny: TinyModel, make: Make) -> None:
    tiny.ranks = 2
    runner = make(tiny, buckets=BUCKETS, unpadded_above=None)
    bodies = tiny.bodies
    assert rows_of(runner.capture(), 140) == 256
    assert (runner.report.unpadded_above, tiny.bodies) == (256, bodies + 4)
    assert rows_of(make(tiny, buckets=BUCKETS, unpadded_above=0), 140) == 144


@pytest.mark.parametrize("most", [64, 256])
def test_buckets_that_pad_by_little_need_no_measurement(
    most: int, clock: Any, tiny: TinyModel, make: Make
) -> None:
    runner = make(tiny, max_tokens=most, unpadded_above=None)
    bodies = tiny.bodies
    assert rows_of(runner.capture(), 3) == 64
    assert (runner.report.unpadded_above, tiny.bodies) == (most, bodies + most // 64)


def test_a_coarse_smallest_bucket_makes_no_batch_larger(
    clock: Any, tiny: TinyModel, make: Make
) -> None:
    runner = make(tiny, max_tokens=150, buckets=(100,), unpadded_above=0)
    assert rows_of(runner, 120) == 150


def test_mode_eager_pads_as_graphs_would(clock: Any, tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, mode="eager", buckets=BUCKETS, unpadded_above=None).capture()
    assert (rows_of(runner, 140), runner.report.unpadded_above) == (256, None)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_what_cannot_be_measured_is_padded_with_a_note(
    error: type[Exception], clock: Any, tiny: TinyModel, make: Make
) -> None:
    runner = make(tiny, buckets=BUCKETS, unpadded_above=None)
    body = tiny.module.layers[1].forward

    def refusing(x: torch.Tensor, attend: Any) -> torch.Tensor:
        if x.shape[1] == 64:
            raise error("too much")
        hidden: torch.Tensor = body(x, attend)
        return hidden

    tiny.module.layers[1].forward = refusing
    assert rows_of(runner, 70) == 128
    assert runner.report.unpadded_above == 256
    [note] = [note for note in runner.report.notes if "unpadded_above" in note]
    assert note == f"every batch is padded, unpadded_above=256: {error.__name__}: too much"
