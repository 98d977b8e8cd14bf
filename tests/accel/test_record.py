"""Which ops break a recording, which do not, and which data comes along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.breaks import GuardMiss
from accel.graph import BreakableGraph, Refused, capture
from accel.memory import Pool
from accel.record import Rule, _rule_for
from tests.accel.same import assert_same

aten = torch.ops.aten


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.arange(6.0).view(2, 3).to(device)


def record(function: Callable[..., Any], *args: Any) -> tuple[BreakableGraph, Any]:
    graph = BreakableGraph(Pool(args[0].device))
    with capture(graph):
        result = function(*args)
    return graph, result


def _set_one(x: Tensor) -> Tensor:
    x = x.clone()
    x[x[:, 0].long() * 0] = 7
    return x


WHOLE: dict[str, Callable[[Tensor], Any]] = {
    "products": lambda x: x @ x.t(),
    "a scalar from Python": lambda x: x * 2.5 + 1,
    "a host scalar tensor": lambda x: x * torch.tensor(2.0),
    "an uploaded list": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=x.device),
    "an uploaded table": lambda x: x + torch.arange(3.0).to(x.device),
    "a new tensor": lambda x: x + x.new_tensor([1.0, 2.0, 3.0]),
    "a host scalar put in": lambda x: x.clone().index_put_((torch.tensor([1]),), torch.tensor(2.0)),
    "a host scalar set": _set_one,
    "host indices": lambda x: x[torch.tensor([1, 0])],
    "a list of indices": lambda x: x[[1, 0]],
    "device indices": lambda x: x[(x[:, 0] * 0).long()],
    "a mask that fills": lambda x: x.masked_fill(x > 2, 0.0),
    "where": lambda x: torch.where(x > 2, x, -x),
    "views": lambda x: x.t().reshape(-1)[1:4].unsqueeze(0).expand(2, 3),
    "copies between device tensors": lambda x: torch.empty_like(x).copy_(x),
    "a host computation on constants": lambda x: x * (torch.tensor([2.0]) + 1).item(),
    "a cast": lambda x: x.to(torch.bfloat16).float(),
    "nothing to copy": lambda x: (x, torch.empty(0).to(x.device))[0] + 1,
}
BROKEN: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x + x.sum().item(),
    "a truth value": lambda x: x + 1 if x.sum() > 0 else x,
    "a copy to the host": lambda x: x.cpu() + 1,
    "nonzero": lambda x: x.nonzero(),
    "a mask as index": lambda x: x[x > 2],
    "a mask to write": lambda x: x.clone().index_put_((x > 2,), x.new_zeros(())),
    "unique": lambda x: x.unique(),
    "counts": lambda x: x.long().flatten().bincount(),
    "repetitions": lambda x: x.repeat_interleave(x[0].long() + 1, dim=1),
    "comparison": lambda x: torch.equal(x, x * 1),
    "masked_select": lambda x: x.masked_select(x > 2),
}


@pytest.mark.parametrize("name", WHOLE)
def test_one_segment_holds(name: str, x: Tensor) -> None:
    graph, _ = record(WHOLE[name], x)
    assert (graph.segments, graph.breaks) == (1, [])
    graph.replay()


@pytest.mark.parametrize("name", BROKEN)
def test_it_breaks_at(name: str, x: Tensor) -> None:
    expected = BROKEN[name](x)
    graph, result = record(BROKEN[name], x)
    assert len(graph.breaks) >= 1
    assert_same(result, expected)
    graph.replay()
    assert_same(result, expected)


DRAWN: dict[str, Callable[[Tensor], Any]] = {
    "random numbers": lambda x: x + torch.rand_like(x),
    "dropout": lambda x: torch.nn.functional.dropout(x * 2),
    "numbers drawn in place": lambda x: x.clone().uniform_(1, 2),
    "numbers drawn into an argument": lambda x: x.normal_() * 2,
}


@pytest.mark.parametrize("name", DRAWN)
def test_random_numbers_are_drawn_anew_where_the_eager_call_would(name: str, x: Tensor) -> None:
    torch.manual_seed(2)
    expected = [DRAWN[name](x.clone()) for _ in range(4)]
    torch.manual_seed(2)
    graph, result = record(DRAWN[name], x)
    assert [b.kind for b in graph.breaks] == ["automatic"]
    assert_same(result, expected[0])
    graph.replay()
    assert_same(result, expected[1])
    assert_same(DRAWN[name](x.clone()), expected[2])
    graph.replay()
    assert_same(result, expected[3])


def test_a_value_that_came_to_the_host_is_guarded(x: Tensor) -> None:
    graph, y = record(lambda x: x + x.sum().item(), x)
    x[0, 0] = 5.0
    with pytest.raises(GuardMiss):
        graph.replay()
    x[0, 0] = 0.0
    graph.replay()
    assert y[0].tolist() == [15.0, 16.0, 17.0]


def test_a_shape_that_depends_on_values_is_guarded(x: Tensor) -> None:
    graph, y = record(lambda x: x[x > 2] * 2, x)
    x[1] += 1
    graph.replay()
    assert y.tolist() == [8.0, 10.0, 12.0]
    x[0, 0] = 9.0
    with pytest.raises(GuardMiss, match="shape"):
        graph.replay()


def test_negative_zero_and_nan_are_told_apart(x: Tensor) -> None:
    graph, _ = record(lambda x: x[0, 0].cpu(), x)
    x[0, 0] = -0.0
    with pytest.raises(GuardMiss):
        graph.replay()
    x[0, 0] = float("nan")
    graph, _ = record(lambda x: x[0, 0].cpu(), x)
    graph.replay()


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "random numbers of the host": (lambda x: x + torch.rand(3).to(x.device), "on the host"),
    "a generator of its own": (
        lambda x: torch.rand(3, generator=torch.Generator()).to(x.device) + x,
        "generator of its own",
    ),
    "a tensor as text": (lambda x: len(f"{x * 2}") + x, "part of a text"),
    "a write to host memory that stays": (lambda x: KEPT.add_(1), "writes a host tensor"),
}
KEPT = torch.zeros(2)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_are(name: str, x: Tensor) -> None:
    function, complaint = REFUSED[name]
    with pytest.raises(Refused, match=complaint):
        record(function, x)


def test_a_default_device_without_a_number_is_known(x: Tensor) -> None:
    torch.set_default_device(x.device.type)
    try:
        graph, y = record(lambda x: x + torch.tensor([1.0, 2.0, 3.0]), x)
    finally:
        torch.set_default_device(None)
    graph.replay()
    assert y[0].tolist() == [1.0, 3.0, 5.0]


def test_torch_learns_no_stand_in_by_heart(x: Tensor) -> None:
    """Which functions take a default device it looks up once a process."""
    torch.utils._device._device_constructors.cache_clear()

    def forward(x: Tensor) -> Tensor:
        with torch.device("cpu"):
            return x * torch.ones(()).item()

    record(forward, x)
    with torch.device("meta"):
        assert torch.tensor([1]).is_meta


def test_a_constant_belongs_to_the_recording(x: Tensor) -> None:
    def forward(x: Tensor) -> Tensor:
        table = torch.tensor([1.0, 2.0, 3.0], device=x.device)
        table += 1
        return x + table

    graph, y = record(forward, x)
    for _ in range(2):
        graph.replay()
        assert y[0].tolist() == [2.0, 4.0, 6.0]


def test_host_memory_that_a_constant_came_from_may_be_reused(x: Tensor) -> None:
    graph, y = record(lambda x: x * torch.tensor([1.0, 2.0, 3.0]).to(x.device), x)
    scribbled = [torch.full((3,), 1e9) for _ in range(64)]
    graph.replay()
    assert len(scribbled) == 64
    assert y[1].tolist() == [3.0, 8.0, 15.0]


def test_ops_are_counted(x: Tensor) -> None:
    graph, _ = record(lambda x: (x + 1) * 2 - 3, x)
    assert graph.operations == 3


class TestRules:
    def test_composite_ops_fall_apart(self) -> None:
        assert _rule_for(aten.linear.default).composite
        assert not _rule_for(aten.addmm.default).composite

    def test_writes_are_read_off_the_schema(self) -> None:
        assert _rule_for(aten.add_.Tensor).writes == (0,)
        assert _rule_for(aten.add.out).writes == ("out",)
        assert _rule_for(aten.add.Tensor).writes == ()
        assert _rule_for(aten.native_batch_norm.default).writes == (3, 4)

    def test_randomness(self) -> None:
        assert _rule_for(aten.rand.default).random
        assert _rule_for(aten.bernoulli_.float).random
        assert not _rule_for(aten.add.Tensor).random

    def test_what_is_no_op_is_looked_at_with_care(self) -> None:
        assert _rule_for(len) == Rule(plain=False)


def test_tensors_are_no_sequences_while_one_records_nor_after(x: Tensor) -> None:
    """To C: `torch.tensor` would ask a number for its length."""
    number = torch.tensor(3)

    def forward(x: Tensor) -> Tensor:
        return x + torch.tensor([number, number, number], device=x.device) + x[[0, 1]]

    _, y = record(forward, x)
    assert_same(y, x + 3 + x)
    assert torch.tensor([number]).tolist() == [3]


def test_numbers_on_the_device_among_data_are_read_under_guard(x: Tensor) -> None:
    graph, y = record(lambda x: x * torch.tensor([x[0, 1], 2.0, 3.0], device=x.device), x)
    assert any(b.guarded for b in graph.breaks)
    expected = y.clone()
    graph.replay()
    assert_same(y, expected)
    x[0, 1] = 7.0
    with pytest.raises(GuardMiss):
        graph.replay()
