"""Whatever a call is given, and whatever the forward does to it, is as with the plain forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.accel.twin import Arguments, Draw, Twin

MakeTwin = Callable[..., Twin]


@dataclass
class Output:
    sample: Tensor
    note: str = "fine"


class Opaque:
    def __init__(self, value: float) -> None:
        self.value = value


def tensors(draw: Draw) -> Any:
    return ([draw(2, 3), draw(2, 3)],)


def pops(xs: list[Tensor]) -> Tensor:
    return xs.pop() * 2 + xs[0]


def pops_from_a_dict(x: Tensor, extras: dict[str, Any]) -> Tensor:
    return x + extras.pop("a") * len(extras)


def puts_in(x: Tensor, extras: dict[str, Any]) -> Tensor:
    extras["seen"] = x * 2
    return x + 1


def counts_in_its_argument(x: Tensor, extras: dict[str, Any]) -> Tensor:
    extras["n"] += 1
    return x * extras["n"]


def one_and(make: Callable[[Draw], Any]) -> Arguments:
    return lambda draw: (draw(2, 3), make(draw))


ARGUMENTS: dict[str, tuple[Callable[..., Any], Arguments]] = {
    "popping from a list": (pops, tensors),
    "popping from a dict": (
        pops_from_a_dict,
        one_and(lambda draw: {"a": draw(2, 3), "b": 1}),
    ),
    "a list twice": (
        lambda x, xs, same: x * len(xs) + same[0],
        lambda draw: (draw(2, 3), ys := [draw(2, 3), draw(2, 3)], ys),
    ),
    "popping from a list that is there twice": (
        lambda xs, same: xs.pop() * 2 + sum(same),
        lambda draw: (ys := [draw(2, 3), draw(2, 3)], ys),
    ),
    "popping from a dict that is there twice, deeper": (
        lambda x, tree: x + tree["a"].pop("b") * len(tree["list"][0]),
        lambda draw: (draw(2, 3), {"a": (d := {"b": draw(2, 3), "c": 1}), "list": [d]}),
    ),
    "a list that is there once or twice": (
        lambda x, xs, other: x * xs.pop() + len(other),
        lambda draw: (draw(2, 3), ys := [draw(2, 3)] * 2, ys if draw.seed % 2 else list(ys)),
    ),
    "putting into a dict": (puts_in, one_and(lambda draw: {"a": 1})),
    "counting in a dict": (counts_in_its_argument, one_and(lambda draw: {"n": 1})),
    "changing one in place": (lambda x: x.add_(1) * 2, lambda draw: (draw(2, 3),)),
    "changing a view in place": (lambda x: x[0].zero_() + x, lambda draw: (draw(2, 3),)),
    "changing one by out=": (
        lambda x, out: torch.add(x, 1, out=out) * 2,
        one_and(lambda draw: draw(2, 3)),
    ),
    "changing one in place late": (
        lambda x: (x + x.sum().item(), x.mul_(2))[0],
        lambda draw: (draw(2, 3),),
    ),
    "resizing one": (lambda x: x.resize_(3, 2) * 2, lambda draw: (draw(2, 3),)),
    "moving one": (lambda x: x.t_() * 2, lambda draw: (draw(2, 3),)),
    "setting one's data": (
        lambda x: (setattr(x, "data", x.data * 2), x + 1)[1],
        lambda draw: (draw(2, 3),),
    ),
    "an opaque object": (
        lambda x, opaque: x * opaque.value,
        one_and(lambda draw: Opaque(draw.seed + 0.5)),
    ),
    "a set": (lambda x, names: x * len(names), one_and(lambda draw: {"a", "b"})),
    "a numpy array": (
        lambda x, array: x * float(array[0]),
        one_and(lambda draw: np.array([draw.seed + 0.5])),
    ),
    "a generator": (
        lambda x, g: x + torch.rand(2, 3, generator=g).to(x.device),
        one_and(lambda draw: torch.Generator().manual_seed(draw.seed)),
    ),
    "a function": (lambda x, f: f(x), one_and(lambda draw: torch.nn.functional.gelu)),
    "a partial": (lambda x, f: f(x), one_and(lambda draw: functools.partial(torch.add, 2))),
    "a dataclass": (
        lambda x, extra: Output(extra.sample + x, extra.note),
        one_and(lambda draw: Output(draw(2, 3), "given")),
    ),
    "a small host tensor": (
        lambda x, host: x * host.sum().item(),
        one_and(lambda draw: torch.tensor([1.0, 2.0])),
    ),
    "a small host tensor that changes": (
        lambda x, host: x * host.to(x.device),
        one_and(lambda draw: draw.host(3)),
    ),
    "a host tensor changed in place": (
        lambda x, host: x * host.add_(1).to(x.device),
        one_and(lambda draw: torch.ones(3)),
    ),
    "a large host tensor": (
        lambda x, host: x + host.to(x.device).sum(),
        one_and(lambda draw: draw.host(10, 10)),
    ),
    "a float timestep": (lambda x, t: x * t, one_and(lambda draw: draw.seed / 10)),
    "an int timestep": (lambda x, t: x * t, one_and(lambda draw: draw.seed)),
    "a tensor timestep": (
        lambda x, t: x * t,
        one_and(lambda draw: torch.arange(9.0).to(draw.device)[draw.seed]),
    ),
    "an expanded timestep": (
        lambda x, t: x * t[:, None],
        one_and(lambda draw: torch.arange(9.0).to(draw.device)[draw.seed].expand(2)),
    ),
    "one tensor twice": (lambda x, y: x.add(1) * y, lambda draw: (x := draw(2, 3), x)),
    "one tensor twice, changed": (
        lambda x, y: (x.add_(1), y * 2)[1],
        lambda draw: (x := draw(2, 3), x),
    ),
    "overlapping views": (
        lambda x, y: x[:, 0] + y,
        lambda draw: (x := draw(2, 3), x[:, 1]),
    ),
    "overlapping views, changed": (
        lambda x, y: (y.add_(1), x * 2)[1],
        lambda draw: (x := draw(2, 3), x[:, 1]),
    ),
    "a tensor that overlaps itself": (
        lambda x: x * 2,
        lambda draw: (draw(8).as_strided((3, 4), (2, 1)),),
    ),
    "a transposed tensor": (lambda x: x.view(3, 2).t() + x.t(), lambda draw: (draw(3, 2),)),
    "an unaligned tensor": (lambda x: x @ x, lambda draw: (draw(17)[1:].view(4, 4),)),
    "an empty tensor": (lambda x: x.sum() + 1, lambda draw: (draw(0, 3),)),
    "a scalar tensor": (lambda x: x + 1, lambda draw: (draw(),)),
    "a mask": (lambda x, m: x.masked_fill(m, 0.0), one_and(lambda draw: draw(2, 3) > 0)),
    "a mask to index with": (lambda x, m: x[m], one_and(lambda draw: draw(2, 3) > 0)),
    "a mask to write with": (
        lambda x, m: x.clone().masked_scatter_(m, x * 2),
        one_and(lambda draw: draw(2, 3) > 0),
    ),
    "a slice": (lambda x, s: x[:, s], one_and(lambda draw: slice(0, 2))),
    "complex numbers": (
        lambda x: x * 2j,
        lambda draw: (torch.complex(draw(2, 3), draw(2, 3)),),
    ),
    "a conjugate": (lambda x: x * 2, lambda draw: (torch.complex(draw(2), draw(2)).conj(),)),
    "keywords": (lambda *, a, b=None: a + 1, lambda draw: {"a": draw(2, 3), "b": None}),
    "nothing": (lambda: torch.zeros(3), lambda draw: ()),
    "one that asks for gradients": (
        lambda x: (x * 2 if x.requires_grad else x * 3, x),
        lambda draw: (draw(2, 3).requires_grad_(),),
    ),
    "a tensor with an attribute": (
        lambda x: x * getattr(x, "scale", 1),
        lambda draw: (x := draw(2, 3), setattr(x, "scale", draw.seed))[:1],
    ),
    "a sparse tensor": (
        lambda x: x.to_dense() * 2,
        lambda draw: (torch.eye(3).to_sparse(),),
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str, twin: MakeTwin) -> None:
    function, arguments = ARGUMENTS[name]
    both = twin(lambda: function)
    for seed in (1, 1, 1, 2, 3, 4, 5, 6, 1, 2):
        both(seed, arguments)


class PopsAndMultiplies(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, xs: list[Tensor]) -> Tensor:
        return super().forward(xs.pop()) + xs[0]


def test_an_abandoned_replay_leaves_the_arguments_as_they_were(twin: MakeTwin) -> None:
    both = twin(PopsAndMultiplies)
    three: Arguments = lambda draw: ([draw(2, 3), draw(2, 3), draw(2, 3)],)  # noqa: E731
    for seed in range(3):
        both(seed, three)
    olds = [model.weight.data for model in (both.plain, both.watched)]
    for model in (both.plain, both.watched):  # found out after the launch: the old ones are alive
        model.weight.data = model.weight.data * 2
    both(3, three)
    assert both.report.guard_misses == 1
    assert len(olds) == 2
