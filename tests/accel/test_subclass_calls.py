"""Tensor subclasses that come in or go out of a call, or meet a break: eager, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.graph import eager_on_graph
from tests.accel.common import MakeRunner, counts, net, scribble
from tests.accel.quantized_tensor import Int8, Opaque, Tagged, quantize
from tests.accel.same import assert_same


def plain(x: Any) -> Tensor:
    """As a plain tensor."""
    whole: Tensor = x.dequantized() if isinstance(x, Opaque) else x.as_subclass(Tensor)
    return whole


MAKERS: dict[str, Callable[[Tensor], Any]] = {
    "Int8": Int8.of,
    "Opaque": Opaque.of,
    "Tagged": lambda x: x.as_subclass(Tagged),
}


@pytest.mark.parametrize("place", ["argument", "list", "keyword"])
@pytest.mark.parametrize("kind", MAKERS)
def test_an_argument(device: torch.device, runner: MakeRunner, kind: str, place: str) -> None:
    def forward(x: Any, options: Any = None) -> Tensor:
        x = x if options is None else options
        x = x[0] if isinstance(x, list) else x
        return (torch.ones(1, 8, device=device) @ x).as_subclass(Tensor)

    watched = runner(forward)
    with torch.no_grad():
        for seed in range(4):
            plain = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)).to(device)
            x = MAKERS[kind](plain)
            args = {"argument": (x,), "list": ([x],), "keyword": (plain,)}[place]
            options = {"options": x} if place == "keyword" else {}
            assert_same(watched(*args, **options), forward(*args, **options))
    assert counts(watched) == (0, 0, 4)
    assert f"an argument is a {kind}, not a plain tensor" in watched.report.reasons


@pytest.mark.parametrize("kind", MAKERS)
def test_a_result(device: torch.device, runner: MakeRunner, kind: str) -> None:
    def forward(x: Tensor) -> Any:
        return {"plain": x + 1, "other": MAKERS[kind](x * 2)}

    watched = runner(forward)
    with torch.no_grad():
        for turn in range(4):
            x = torch.arange(1.0, 5.0, device=device).reshape(2, 2) + turn
            result, expected = watched(x), forward(x)
            assert type(result["other"]) is type(expected["other"])
            assert_same(result["plain"], expected["plain"])
            assert_same(plain(result["other"]), plain(expected["other"]))
    assert watched.report.replays == 0
    assert "not a plain tensor" in str(watched.report.declined)


def test_a_weight_as_the_result(device: torch.device, runner: MakeRunner) -> None:
    model: Any = quantize(net()).to(device)
    watched = runner(lambda x: (x + 1, model[0].weight), module=model)
    with torch.no_grad():
        for turn in range(4):
            result, weight = watched(torch.full((2,), float(turn), device=device))
            assert result.tolist() == [turn + 1.0] * 2
            assert weight is model[0].weight


def test_one_given_to_a_break(device: torch.device, runner: MakeRunner) -> None:
    model: Any = quantize(net()).to(device)

    @eager_on_graph
    def project(x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.linear(x, weight)

    def forward(x: Tensor) -> Tensor:
        return project(x * 2, model[0].weight) + 1

    watched = runner(forward, module=model)
    with torch.no_grad():
        for turn in range(5):
            x = torch.full((2, 8), float(turn), device=device)
            if turn == 3:
                model[0].weight = nn.Parameter(
                    model[0].weight.each(lambda y: -y), requires_grad=False
                )
                scribble(device, (16, 128))
            assert_same(watched(x), forward(x))
    assert watched.report.declined or watched.report.replays
