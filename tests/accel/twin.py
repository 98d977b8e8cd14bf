"""A function twice, plain and behind a runner: whatever one does, the other has to do too."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from accel.backend import Backend
from accel.memory import Pool
from accel.patches.state import StateProbe
from accel.reporting import PartReport
from accel.runner import GraphRunner
from tests.accel.same import assert_same

Arguments = Callable[["Draw"], Any]


def watching(module: nn.Module | None) -> dict[str, Any]:
    """Options with which a runner sees a module's state."""
    if module is None:
        return {}
    probe = StateProbe(module)
    return {"probe": probe, "remember": probe.remember}


class Draw:
    """Reproducible tensors of the device under test, drawn on the host."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Normal numbers of `shape`."""
        return torch.randn(shape, generator=self._generator).to(self.device, dtype)

    def host(self, *shape: int) -> torch.Tensor:
        """Normal numbers of `shape` on the host."""
        return torch.randn(shape, generator=self._generator)


class Twin:
    """Calls a function and its twin behind a runner with equal arguments, from equal states of the
    random generators, and fails unless result or exception, the arguments as they are left, the
    generators, the weights and the counters of calls agree.

    `build` is called twice, from the same seed; modules are put on the device and watched.
    """

    def __init__(
        self, build: Callable[[], Any], device: torch.device, backend: Backend, **options: Any
    ) -> None:
        self.device, self._backend = device, backend
        self.plain, self.watched = self._built(build), self._built(build)
        self.context: Callable[[], Any] = torch.no_grad
        module = self.watched if isinstance(self.watched, nn.Module) else None
        options = watching(module) | options
        options = {"pool": Pool(device), "capture": "always", "module": module, **options}
        self.runner = GraphRunner(self.watched, **options)
        self._random = {"plain": self._random_state(), "watched": self._random_state()}
        self.calls = 0

    @property
    def report(self) -> PartReport:
        """What the runner counted."""
        return self.runner.report

    def _built(self, build: Callable[[], Any]) -> Any:
        torch.manual_seed(0)
        built = build()
        return built.to(self.device) if isinstance(built, nn.Module) else built

    def __call__(self, seed: int, arguments: Arguments = lambda draw: (draw(2, 3),)) -> Any:
        """One call of both, with `arguments(Draw(seed, device))`: a tuple, or a dict of keywords.
        Returns what the function returned (or raised)."""
        expected, left = self._run("plain", self.plain, seed, arguments)
        result, left_behind = self._run("watched", self.runner, seed, arguments)
        self.calls += 1
        assert_same(result, expected)
        assert_same(left_behind, left, "the arguments")
        for one, other in zip(*self._random.values(), strict=True):
            assert_same(one, other, "the random generators")
        if isinstance(self.plain, nn.Module):
            assert_same(dict(self.watched.state_dict()), dict(self.plain.state_dict()), "weights")
        report = self.report
        assert report.captures + report.replays + report.eager_calls == self.calls
        return expected

    def _run(self, side: str, function: Any, seed: int, arguments: Arguments) -> tuple[Any, Any]:
        call = arguments(Draw(seed, self.device))
        args, kwargs = ((), call) if isinstance(call, dict) else (call, {})
        self._restore(self._random[side])
        with self.context():
            try:
                outcome = function(*args, **kwargs)
            except Exception as error:
                outcome = (type(error), str(error))
        self._random[side] = self._random_state()
        return outcome, call

    def _random_state(self) -> tuple[Any, ...]:
        legacy: Any = np.random.get_state()
        return (
            self._backend.rng_state(self.device),
            torch.default_generator.get_state(),
            random.getstate(),
            (legacy[1].tolist(), legacy[2]),
        )

    def _restore(self, state: tuple[Any, ...]) -> None:
        self._backend.set_rng_state(self.device, state[0])
        torch.default_generator.set_state(state[1])
        random.setstate(state[2])
        np.random.set_state(("MT19937", np.array(state[3][0], dtype=np.uint32), state[3][1]))
