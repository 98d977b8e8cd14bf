"""One recording of one call: what it takes in, gives back, and undoes when it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.breaks import GuardMiss
from accel.graph import Refused, eager_on_graph
from accel.guard import WeightGuard
from accel.memory import Pool
from accel.recorded import Recorded
from accel.signature import signature
from tests.accel.same import assert_same
from tests.accel.twin import Twin

MakeTwin = Callable[..., Twin]


@pytest.fixture
def record(pool: Pool) -> Callable[..., Recorded]:
    def make(function: Callable[..., Any], *args: Any, **options: Any) -> Recorded:
        call = (args, {})
        guard = WeightGuard(None, pool.backend)
        return Recorded(function, call, signature(call, pool.backend), pool, guard, **options)

    return make


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.arange(4.0).to(device)


def test_the_first_result_is_the_calls(record: Any, x: Tensor) -> None:
    recorded = record(lambda x: x * 2, x)
    assert recorded.first_result.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert recorded.replay([x + 1]).tolist() == [2.0, 4.0, 6.0, 8.0]
    assert recorded.report.replays == 1
    assert not recorded.commits


def test_a_replay_on_another_stream_waits_for_the_last_one(sim: torch.device) -> None:
    pool, x = Pool(sim), torch.ones(2, device=sim)
    guard, call = WeightGuard(None, pool.backend), ((x,), {})
    recorded = Recorded(lambda x: x * 2, call, signature(call, pool.backend), pool, guard)
    first, second = pool.backend.new_stream(sim), pool.backend.new_stream(sim)
    with pool.backend.on_stream(first):
        first.time = 5.0
        recorded.replay([x])
    with pool.backend.on_stream(second):
        recorded.replay([x])
    assert second.time > first.time > 5.0


def test_writes_and_randomness_commit(record: Any, x: Tensor) -> None:
    outside = torch.zeros_like(x)
    assert record(lambda x: outside.add_(x) * 1, x).commits
    assert record(lambda x: x + torch.rand_like(x), x).commits


def test_an_objection_takes_everything_back(record: Any, x: Tensor, pool: Pool) -> None:
    outside = torch.zeros_like(x)
    random = pool.backend.rng_state(pool.device)

    def forward(x: Tensor) -> Tensor:
        outside.add_(x)
        return x + torch.rand_like(x)

    with pytest.raises(Refused, match="not today"):
        record(forward, x, objection=lambda: "not today")
    assert outside.tolist() == [0.0] * 4
    assert_same(pool.backend.rng_state(pool.device), random)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda x: {x.sum(): 1}.keys(), "returns a dict_keys"),
        (lambda x: object(), "returns a object"),
        (lambda x: (x, [iter([])]), "returns a list_iterator"),
    ],
)
def test_results_that_may_hold_anything_are_refused(
    make: Any, complaint: str, record: Any, x: Tensor
) -> None:
    with pytest.raises(Refused, match=complaint):
        record(make, x)


def test_an_empty_result_is_not_taken_for_an_empty_argument(record: Any, x: Tensor) -> None:
    recorded = record(lambda empty, x: (empty, x[:0] * 2, x), x.long()[:0], x)
    for result in (recorded.first_result, recorded.replay([x.long()[:0], x])):
        assert [y.dtype for y in result] == [torch.int64, torch.float32, torch.float32]


def test_results_are_no_views(record: Any, x: Tensor) -> None:
    """Else they could not be changed in place where gradients are enabled."""
    with torch.no_grad():
        recorded = record(lambda x: (x * 2, (x + 1)[1:].expand(2, 3)), x)
        for result in (*recorded.first_result, *recorded.replay([x])):
            assert result._base is None
    assert result.stride() == (0, 1)


def test_views_of_other_dtypes_in_one_storage_are_refused(record: Any, x: Tensor) -> None:
    def forward(x: Tensor) -> Any:
        y = x * 2
        return y, y.view(torch.int32)

    with pytest.raises(Refused, match="different dtypes"):
        record(forward, x)


def test_a_missed_guard_puts_the_generator_back(record: Any, x: Tensor, pool: Pool) -> None:
    recorded = record(lambda x: torch.rand_like(x) + x.sum().item(), x)
    before = pool.backend.rng_state(pool.device)
    with pytest.raises(GuardMiss):
        recorded.replay([x + 1])
    assert_same(pool.backend.rng_state(pool.device), before)


def test_random_numbers_go_on_where_eager_would(record: Any, x: Tensor) -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + torch.rand_like(x) * 2

    torch.manual_seed(1)
    expected = [noisy(x) for _ in range(4)]
    torch.manual_seed(1)
    recorded = record(noisy, x)
    results = [recorded.first_result, recorded.replay([x]), noisy(x), recorded.replay([x])]
    assert_same(results, expected)


# What follows are whole calls, plain and recorded.


class Prints(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        print(y)
        return y + 1


def test_a_forward_that_prints_a_tensor(twin: MakeTwin, capsys: pytest.CaptureFixture[str]) -> None:
    both = twin(Prints)
    for seed in range(5):
        both(seed)
        printed = capsys.readouterr().out
        lines = printed.strip().split("tensor")[1:]
        assert len({line.strip() for line in lines}) == 1


def test_a_view_that_a_break_returns_is_still_a_view(twin: MakeTwin) -> None:
    @eager_on_graph
    def first_row(x: Tensor) -> Tensor:
        return x[0]

    def forward(x: Tensor) -> Tensor:
        y = x * 2
        first_row(y).add_(1)
        return y

    both = twin(lambda: forward)
    for seed in range(4):
        both(seed)


def test_a_break_that_is_given_a_view_of_anothers_result(twin: MakeTwin) -> None:
    """The view keeps the tensor that it is a view of; the model does not."""
    both = twin(lambda: lambda x: x.nonzero().view(-1).unique() + 1)
    for seed in range(4):
        both(seed, lambda draw: (draw(6).abs() + 1,))
    assert both.report.replays == 2, both.report
