"""Submodules by the bits of what they return, eagerly and in a recording."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from accel.patches.part import Options, Part
from accel.patches.taps import Taps, first_not_finite, first_to_differ
from accel.patches.witness import in_its_place


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x))


def test_inner_ones_come_first_and_repeated_calls_apart() -> None:
    net = Twice()
    taps = Taps(net)
    with taps.open():
        taps.listening(net.forward)(torch.ones(1, 4))
    names = ["inner.0", "inner.1", "inner"]
    assert list(taps.calls[0]) == [*names, *(f"{name} (2)" for name in names)]
    assert all("forward" not in vars(child) for child in net.modules())


def test_replays_show_the_sums_of_their_own_arguments(device: torch.device) -> None:
    net = Twice().to(device)
    part, taps = Part("net", net, "forward", Options(capture="always")), Taps(net)
    inputs = [torch.full((2, 4), float(i), device=device) for i in range(4)]
    with torch.no_grad(), taps.open():
        with in_its_place(part, lambda usual: taps.eagerly):
            for x in inputs:
                net(x)
        expected, taps.calls = taps.calls, []
        with taps.replaying(part) as run, in_its_place(part, lambda usual: run):
            for x in inputs:
                net(x)
    assert taps.calls == expected
    assert len({calls["inner.0"] for calls in expected}) == len(inputs)
    assert first_to_differ(expected, taps.calls) is None
    assert first_to_differ(expected[1:], taps.calls) == "inner.0"


def test_numbers_that_are_none_are_counted() -> None:
    net = nn.Sequential(nn.Identity(), nn.LogSigmoid(), nn.Identity())
    taps = Taps(net)
    with taps.open():
        taps.listening(net.forward)(torch.tensor([-torch.inf, 1.0]).log())
    assert first_not_finite(taps.calls) == "0"
    assert first_not_finite([{"0": (1, 1, 1, 0)}]) is None


def test_sums_see_what_a_plain_sum_does_not() -> None:
    net = nn.Sequential(nn.Identity())
    taps = Taps(net)
    with taps.open():
        for values in ([1.0, 2.0, 3.0], [2.0, 1.0, 3.0]):
            taps.listening(net.forward)(torch.tensor(values))
    assert first_to_differ(taps.calls[:1], taps.calls[1:]) == "0"
