"""Modules in which guards keep missing run as Python on every replay; the rest is recorded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from accel.entry import VARIANTS
from accel.pipelines.tiny import FAMILIES
from tests.accel.common import MakeTwin
from tests.accel.test_families import moved


class Experts(nn.Module):
    """Sends every row to the expert it asks for: how many rows each gets is read on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, :3].argmax(-1)
        order = chosen.argsort(stable=True)
        loads = torch.stack([(chosen == i).sum() for i in range(3)]).tolist()
        rows = x[order].split(loads)
        done = torch.cat([f(part) for f, part in zip(self.experts, rows, strict=True)])
        result = torch.empty_like(done)
        result[order] = done
        return result


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), Experts(), nn.Linear(8, 8), Experts()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


class Alone(Routed):
    """The guards are in the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts()]).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x * len((x > 0).sum().cpu().reshape(1).tolist()) + (x > 0).sum().item()


def test_experts_become_breaks_and_the_rest_is_replayed(twin: MakeTwin) -> None:
    both = twin(Routed)
    for seed in range(24):
        both(seed, lambda draw: (draw(16, 8),))
    (graph,) = both.report.graphs
    assert {(b.kind, b.what, b.guarded) for b in graph.breaks} == {
        ("module", "Experts.forward", False)
    }
    assert graph.segments == 3
    misses = both.report.guard_misses
    assert misses <= 2 * VARIANTS
    for seed in range(100, 110):
        both(seed, lambda draw: (draw(16, 8),))
    assert both.report.guard_misses == misses
    assert both.report.replays >= 20


def test_nothing_stays_on_the_modules(twin: MakeTwin) -> None:
    both = twin(Routed)
    for seed in range(20):
        both(seed, lambda draw: (draw(16, 8),))
    assert all("forward" not in vars(child) for child in both.watched.modules())


def test_weights_of_a_module_that_breaks_are_followed(twin: MakeTwin) -> None:
    both = twin(Routed)
    for seed in range(16):
        both(seed, lambda draw: (draw(16, 8),))
    for model in (both.plain, both.watched):
        model.layers[1].experts[0].weight.data.mul_(3)
        model.layers[3].experts[1] = nn.Linear(8, 8, bias=False).to(both.device)
        nn.init.constant_(model.layers[3].experts[1].weight, 0.1)
    for seed in range(30, 40):
        both(seed, lambda draw: (draw(16, 8),))


class Counting(Experts):
    """Experts that count their calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


def test_modules_that_may_write_buffers_stay_as_they_are(twin: MakeTwin) -> None:
    def build() -> nn.Module:
        model = Routed()
        model.layers[3] = Counting()
        return model

    both = twin(build)
    for seed in range(30):
        both(seed, lambda draw: (draw(16, 8),))
    whole = {b.what for g in both.report.graphs for b in g.breaks if b.kind == "module"}
    assert whole <= {"Experts.forward"}


def test_the_module_itself_is_declined_and_not_broken(twin: MakeTwin) -> None:
    both = twin(Alone)
    for seed in range(24):
        both(seed, lambda draw: (draw(16, 8),))
    assert not any(b.kind == "module" for g in both.report.graphs for b in g.breaks)
    assert both.report.declined is not None
    assert "no two calls agree" in both.report.declined


@pytest.mark.parametrize("name", ["hidream"])
def test_a_denoiser_with_experts_is_replayed(name: str, twin: MakeTwin) -> None:
    family = FAMILIES[name]
    both = twin(lambda: family.make(seed=0))
    for seed in range(2 * VARIANTS + 8):
        both(seed, lambda draw: moved(family.inputs(draw.seed, 0), draw.device))
    assert both.report.replays >= 4
    assert any(b.kind == "module" for g in both.report.graphs for b in g.breaks)
