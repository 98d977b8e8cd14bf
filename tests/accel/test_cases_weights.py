"""Weights that move or fill, and gradients: what users of similar tools ran into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.accel.common import MakeRunner, MakeTwin, counts, net, scribble
from tests.accel.same import assert_same
from tests.accel.twin import Twin


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class TestWeights:
    """peft#2611 and its kin: adapters that move, replace or fill weights."""

    @pytest.fixture
    def both(self, twin: MakeTwin) -> Twin:
        both = twin(net)
        for seed in range(3):
            both(seed, lambda draw: (draw(4, 8),))
        assert counts(both.runner) == (1, 1, 1)
        return both

    def call(self, both: Twin, seed: int) -> None:
        both(seed, lambda draw: (draw(4, 8),))

    def test_values_copied_in_place_are_not_seen(self, both: Twin) -> None:
        for model in (both.plain, both.watched):
            with torch.no_grad():
                model[0].weight.mul_(-2)
        self.call(both, 3)
        assert counts(both.runner) == (1, 2, 1)

    def test_weights_that_moved_are_still_read_at_the_old_place(self, both: Twin) -> None:
        for model in (both.plain, both.watched):
            model[0].weight.data = model[0].weight.data.clone().mul_(-2)
        scribble(both.device)
        self.call(both, 3)
        self.call(both, 4)
        assert counts(both.runner) == (2, 2, 1)
        assert both.report.recaptures == 1

    def test_weights_swapped_while_the_old_ones_stay_alive(self, both: Twin) -> None:
        olds = [model[0].weight.data for model in (both.plain, both.watched)]
        for model in (both.plain, both.watched):
            model[0].weight.data = model[0].weight.data * -2
        self.call(both, 3)
        for model, old in zip((both.plain, both.watched), olds, strict=True):
            model[0].weight.data = old
        self.call(both, 4)
        self.call(both, 5)
        assert both.report.eager_calls == 1

    def test_a_layer_replaced_by_another(self, both: Twin) -> None:
        for model in (both.plain, both.watched):
            torch.manual_seed(5)
            model[2] = nn.Linear(16, 8).to(both.device)
        self.call(both, 3)
        self.call(both, 4)
        assert counts(both.runner) == (2, 2, 1)

    def test_an_exception_in_the_middle_of_a_swap(self, both: Twin) -> None:
        for model in (both.plain, both.watched):
            with pytest.raises(ValueError, match="size mismatch"):
                self.swap(model)
        scribble(both.device)
        self.call(both, 3)
        self.call(both, 4)
        assert both.report.captures == 2

    def swap(self, model: Any) -> None:
        for layer in (model[0], model[2]):
            if layer is model[2]:
                raise ValueError("size mismatch")
            layer.weight.data = layer.weight.data + 1

    def test_a_module_moved_away_and_back(self, both: Twin) -> None:
        for model in (both.plain, both.watched):
            model.to("cpu")
            scribble(both.device)
            model.to(both.device)
        self.call(both, 3)
        self.call(both, 4)

    def test_another_dtype(self, both: Twin) -> None:
        for model in (both.plain, both.watched):
            model.to(torch.float64)
        for seed in range(3):
            both(seed, lambda draw: (draw(4, 8, dtype=torch.float64),))
        assert both.report.captures == 2

    def test_weights_that_move_at_every_call_are_not_recorded_for_ever(
        self, twin: MakeTwin
    ) -> None:
        both = twin(net)
        for seed in range(20):
            for model in (both.plain, both.watched):
                model[0].weight.data = model[0].weight.data.clone()
            self.call(both, seed)
        assert both.report.captures <= 6
        assert both.report.declined == "the weights move at every call"


class TestGradients:
    """pytorch#116848."""

    @pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
    def test_without_gradients_it_is_recorded(self, context: Any, twin: MakeTwin) -> None:
        both = twin(net)
        both.context = context
        for seed in range(5):
            both(seed, lambda draw: (draw(4, 8),))
        assert counts(both.runner) == (1, 3, 1)

    def test_the_modes_share_one_recording(self, twin: MakeTwin) -> None:
        both = twin(net)
        for seed, context in enumerate([torch.no_grad, torch.inference_mode] * 4):
            both.context = context
            both(seed, lambda draw: (draw(4, 8),))
        assert counts(both.runner) == (1, 6, 1)

    def test_training_through_a_recording_loses_the_gradients(
        self, device: torch.device, runner: MakeRunner
    ) -> None:
        plain, watched = net().to(device), net().to(device)
        watched.load_state_dict(plain.state_dict())
        run = runner(watched, module=watched)
        for seed in range(3):
            x = torch.randn(4, 8, generator=_seeded(seed)).to(device)
            with torch.no_grad():
                assert_same(run(x), plain(x))
        for seed in range(3):
            x = torch.randn(4, 8, generator=_seeded(seed)).to(device)
            plain(x).square().mean().backward()
            run(x).square().mean().backward()
        for mine, theirs in zip(watched.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            assert_same(mine.grad, theirs.grad)
        assert counts(run) == (1, 1, 4)
        assert run.report.reasons["gradients are enabled: call under torch.no_grad()"] == 3

    def test_frozen_weights_are_recorded_with_gradients_enabled(
        self, device: torch.device, runner: MakeRunner
    ) -> None:
        model = net().to(device).requires_grad_(False)
        run = runner(model, module=model)
        for seed in range(4):
            x = torch.randn(4, 8, generator=_seeded(seed)).to(device)
            assert_same(run(x), model(x))
        assert counts(run) == (1, 2, 1)
