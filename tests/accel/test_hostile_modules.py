"""Modules that keep, count, change and draw behave behind a runner as they do without."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.memory import Pool
from tests.accel.twin import Draw, Twin

MakeTwin = Callable[..., Twin]


class Lazy(nn.Module):
    """Fills a cache at its first call with a size."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.arange(float(x.shape[1]), device=x.device) * 2
        return x * self.tables[x.shape[1]]


class KeepsLast(nn.Module):
    """Keeps what it computed last, as step caches do."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        if self.last is not None:
            y = y + self.last
        self.last = y
        return y + 1


class KeepsArgument(nn.Module):
    """Keeps its argument and uses it in the next call."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.last is None else x + self.last
        self.last = x
        return y * 2


class KeepsUploaded(nn.Module):
    """Replaces a table that it uploads in every call and keeps it."""

    def forward(self, x: Tensor) -> Tensor:
        self.table = torch.tensor([1.0, 2.0, 3.0], device=x.device)
        return x * self.table


class KeepsRead(nn.Module):
    """Keeps what a break brought, for the next call."""

    count: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before = self.count if self.count is not None else x.new_zeros(1, dtype=torch.long)
        self.count = (x > 0).nonzero()[:1, 0]
        return x * 2 + before


class KeepsWhatABreakBrought(nn.Module):
    count: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before = self.count if self.count is not None else x.new_zeros(1, 2, dtype=torch.long)
        self.count = (x > -1e9).nonzero()
        return x[0, 0] * 2 + before[0] + self.count[-1]


class Accumulates(nn.Module):
    """Adds to a buffer in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.sum(0)
        return x * self.total


class AccumulatesThenReads(Accumulates):
    """A host read after the change: nothing that a guard could take back."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + y.abs().sum().item()


class SwapsBuffer(Accumulates):
    """Puts a new tensor in its buffer's place."""

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + x.sum(0)
        return x * self.total


class WritesWeight(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.5)
        return super().forward(x)


class ReturnsWeight(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor) -> Any:
        return self.weight, self.bias[1:], super().forward(x)


class SetsAnAttribute(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.shape = tuple(x.shape)
        return x * self.shape[0]


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3), nn.AlphaDropout(0.2))


MODULES: list[Callable[[], nn.Module]] = [
    Lazy,
    KeepsLast,
    KeepsArgument,
    KeepsUploaded,
    KeepsRead,
    KeepsWhatABreakBrought,
    Accumulates,
    AccumulatesThenReads,
    SwapsBuffer,
    WritesWeight,
    ReturnsWeight,
    SetsAnAttribute,
    dropout,
]


@pytest.mark.parametrize("build", MODULES)
def test_a_module_that(build: Callable[[], nn.Module], twin: MakeTwin) -> None:
    both = twin(build)
    for seed in (1, 2, 3, 4, 1, 1, 5, 6):
        both(seed)


def test_batch_norm_in_training_changes_its_statistics_once_a_call(
    twin: MakeTwin, device: torch.device
) -> None:
    if device.type == "sim":
        pytest.skip("the simulated device does not know that batch norm writes its statistics")
    both = twin(batch_norm)
    for seed in range(6):
        both(seed)


def test_statistics_that_batch_norm_writes_are_an_effect_that_no_guard_may_follow(
    device: torch.device, runner: Callable[..., Any]
) -> None:
    norm = nn.BatchNorm1d(3).to(device)

    def forward(x: Tensor) -> Tensor:
        y = F.batch_norm(x, norm.running_mean, norm.running_var, training=True)
        return y + y.sum().item()

    watched = runner(forward, module=norm)
    with torch.no_grad():
        for _ in range(3):
            watched(torch.ones(2, 3, device=device))
    assert watched.report.captures == 0
    assert "batch_norm" in watched.report.declined
    assert "has written a weight" in watched.report.declined


def synchronizes(x: Tensor) -> Tensor:
    getattr(torch, x.device.type).synchronize()
    return x + 1


def test_a_recording_that_the_device_refuses_leaves_the_others_alone(
    twin: MakeTwin, device: torch.device
) -> None:
    pool = Pool(device)
    good, bad = twin(lambda: nn.Linear(3, 3), pool=pool), twin(lambda: synchronizes, pool=pool)
    for seed in range(3):
        good(seed)
    for seed in range(3):
        bad(seed)
    assert "recording failed" in str(bad.report.declined)
    assert bad.report.eager_calls == 3
    for seed in range(5):
        good(seed)
    assert good.report.captures == 2
    assert good.report.replays >= 4


def keeps_in_a_list(kept: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        kept.append(x * 2)
        return torch.stack(kept).sum(0)

    return forward


def test_what_a_plain_function_keeps_declines_it_and_stays_readable(
    device: torch.device, runner: Callable[..., Any]
) -> None:
    kept: list[Tensor] = []
    watched = runner(keeps_in_a_list(kept))
    with torch.no_grad():
        for value in range(5):
            watched(torch.full((2, 3), float(value), device=device))
    assert watched.report.captures == 0
    assert "keeps a tensor" in watched.report.declined
    assert [x[0, 0].item() for x in kept][-3:] == [4.0, 6.0, 8.0]


def test_a_lazy_cache_over_several_sizes(twin: MakeTwin) -> None:
    both = twin(Lazy, probe=lambda: None)  # or each new entry would be another state
    for size in (3, 3, 4, 3, 4, 4, 5, 3, 5, 5, 4, 3):
        both(size, lambda draw: (draw(2, draw.seed),))
    assert both.report.captures == 3


def bounded_table(entries: int) -> Callable[[], Callable[[Tensor], Tensor]]:
    def build() -> Callable[[Tensor], Tensor]:
        @functools.lru_cache(entries)
        def table(size: int, device: torch.device) -> Tensor:
            return torch.arange(float(size)).to(device) * 2

        return lambda x: x * table(x.shape[1], x.device)

    return build


@pytest.mark.parametrize("entries", [1, 8])
def test_tables_in_a_bounded_cache(entries: int, twin: MakeTwin) -> None:
    both = twin(bounded_table(entries))
    for size in (3, 3, 4, 3, 4, 4, 5, 3, 5, 5, 4, 3, 3, 4):
        both(size, lambda draw: (draw(2, draw.seed),))
        scribbled = torch.full((4096,), 7.0, device=both.device)
        del scribbled


@pytest.mark.parametrize("turn", ["autocast", "default dtype", "no tf32", "deterministic"])
def test_switches_turned_between_calls(turn: str, twin: MakeTwin) -> None:
    both = twin(lambda: nn.Linear(3, 3))

    @contextlib.contextmanager
    def turned() -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if turn == "autocast":
                kind = both.device.type
                stack.enter_context(torch.autocast(kind, dtype=torch.bfloat16))
            elif turn == "default dtype":
                torch.set_default_dtype(torch.float64)
                stack.callback(torch.set_default_dtype, torch.float32)
            elif turn == "no tf32":
                before = torch.get_float32_matmul_precision()
                torch.set_float32_matmul_precision("medium")
                stack.callback(torch.set_float32_matmul_precision, before)
            else:
                torch.use_deterministic_algorithms(True)
                stack.callback(torch.use_deterministic_algorithms, False)
            yield

    for seed, context in enumerate([torch.no_grad, torch.no_grad, turned, turned] * 3):
        both.context = context
        both(seed)
    assert both.report.captures == 2
    assert both.report.replays == 8


@pytest.mark.parametrize("values", [4, 9])
def test_more_than_four_values_at_one_position(values: int, twin: MakeTwin) -> None:
    both = twin(lambda: lambda x, scale: x * scale)
    for _ in range(3):
        for value in range(values):
            both(value, lambda draw: {"x": draw(2, 3), "scale": draw.seed / 4})
    if values > 4:
        assert any("scale has had more than 4 values" in r for r in both.report.reasons)
        assert both.report.captures == 4
    else:
        assert both.report.captures == 4
        assert both.report.eager_calls == 4


def test_a_count_that_changes_misses_then_gets_its_own_recording(twin: MakeTwin) -> None:
    def keep_positive(x: Tensor) -> Tensor:
        return (x[x > 0] * 2).sum() + x

    both = twin(lambda: keep_positive)

    def with_positives(draw: Draw) -> Any:
        x = draw(8).abs()
        x[draw.seed % 3 :] *= -1
        return (x,)

    for seed in [0, 0, 0, 1, 1, 1, 2, 2, 2] + [0, 1, 2] * 3:
        both(seed, with_positives)
    assert both.report.captures == 3
    assert both.report.guard_misses > 0
    assert both.report.replays >= 10


def test_a_count_that_is_never_the_same_goes_eager_with_the_reason(twin: MakeTwin) -> None:
    both = twin(lambda: lambda x: x * x.sum().item())
    for seed in range(14):
        both(seed)
    assert both.report.declined is not None
    assert "no two calls agree" in both.report.declined


def test_inference_tensors_as_arguments(twin: MakeTwin) -> None:
    both = twin(lambda: nn.Linear(3, 3))
    both.context = torch.inference_mode

    def inference(draw: Draw) -> Any:
        with torch.inference_mode():
            return (draw(2, 3),)

    for seed in range(5):
        both(seed, inference)
    assert (both.report.captures, both.report.replays) == (1, 3)
