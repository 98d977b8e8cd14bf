"""Listening to a model's layers, and feeding them."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from accel.prefill.attention import Unsupported
from accel.prefill.stages import Heard, fed, heard


class Two(nn.Module):
    """Two layers, the second one called with the hidden states by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layers
        result: torch.Tensor = second(input=first(x))
        return result


@pytest.fixture
def model() -> Two:
    torch.manual_seed(0)
    return Two()


def test_what_is_fed_stands_in_for_what_comes_in_and_rows_behind_it_stay(model: Two) -> None:
    x, y = torch.randn(1, 4, 3), torch.randn(1, 2, 3)
    with torch.no_grad():
        with heard(model.layers) as calls:
            model(x)
        seen: dict[int, torch.Tensor] = {}
        with fed([Heard(model.layers[0], y), Heard(model.layers[1], -y)], seen.__setitem__):
            result = model(x)
        first, second = model.layers
        rest = first(x)[:, 2:]
        assert torch.equal(seen[0], x[:, :2])
        assert torch.equal(seen[1], first(torch.cat([y, x[:, 2:]], 1))[:, :2])
        assert torch.equal(result, second(torch.cat([-y, rest], 1)))
        assert torch.equal(calls[1].hidden, first(x))
        assert torch.equal(model(x), second(first(x)))  # no hook was left behind
    assert not any(layer._forward_pre_hooks for layer in model.layers)


@pytest.mark.parametrize(("order", "says"), [((1, 0), "other layers"), ((0, 1, 0), "fewer")])
def test_stages_that_are_called_otherwise_are_refused(
    order: tuple[int, ...], says: str, model: Two
) -> None:
    given = [Heard(model.layers[i], torch.zeros(1, 2, 3)) for i in order]
    with pytest.raises(Unsupported, match=says), fed(given, lambda number, hidden: None):
        model(torch.zeros(1, 2, 3))
    assert not any(layer._forward_pre_hooks for layer in model.layers)


def test_another_thread_runs_the_model_for_itself(model: Two) -> None:
    x = torch.randn(1, 2, 3)
    plain, results = model(x), []
    other = threading.Thread(target=lambda: results.append(model(x)))
    with heard(model.layers) as calls, fed([], lambda number, hidden: None):
        other.start()
        other.join()
    assert not calls and torch.equal(results[0], plain)
