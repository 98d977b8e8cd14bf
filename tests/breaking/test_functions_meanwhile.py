"""Functions of torch are the same objects for everyone: what others make of them meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import pytest
import torch
import torch._dynamo.trace_rules
from torch import Tensor

from accel.graph import BreakableGraph, capture
from accel.memory import Pool
from tests.accel.same import assert_same


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.arange(6.0).view(2, 3).to(device)


def _joined(x: Tensor) -> Tensor:
    return torch.cat([torch.stack([x, x]).mean(0), torch.rsqrt(x)])


@pytest.fixture
def meanwhile(device: torch.device) -> Iterator[Executor]:
    """Another thread, while this one records."""
    with capture(BreakableGraph(Pool(device))), ThreadPoolExecutor(1) as other:
        yield other


def test_they_compile_to_torchscript(meanwhile: Executor) -> None:
    compiled = meanwhile.submit(torch.jit.script, _joined).result()
    assert compiled.code.count("torch.cat") == 1


@pytest.mark.parametrize("asked", ["get_torch_obj_rule_map", "get_tensor_method"])
def test_what_a_compiler_asks_meanwhile_is_asked_again(asked: str, x: Tensor) -> None:
    rules = torch._dynamo.trace_rules
    rules.clear_lru_cache()
    with capture(BreakableGraph(Pool(x.device))):
        getattr(rules, asked)()
    known = getattr(rules, asked)()
    assert (torch.cat if asked == "get_torch_obj_rule_map" else Tensor.to) in known


def test_what_is_put_in_place_of_one_stays(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Tensor.to
    monkeypatch.setattr(Tensor, "to", original)
    with capture(BreakableGraph(Pool(x.device))):
        kept = Tensor.to
        Tensor.to = lambda *args, **kwargs: kept(*args, **kwargs) + 1  # type: ignore[method-assign, assignment]
    assert_same(x.to(torch.float64), original(x, torch.float64) + 1)


def test_what_was_in_place_of_one_goes_meanwhile(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Tensor.to
    monkeypatch.setattr(Tensor, "to", lambda *args, **kwargs: 1)
    with capture(BreakableGraph(Pool(x.device))):
        monkeypatch.undo()
    assert Tensor.to is before
