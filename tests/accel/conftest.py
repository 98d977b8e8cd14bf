"""Fixtures for the engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from accel.backend import Backend
from accel.memory import Pool
from accel.runner import GraphRunner
from tests.accel.twin import Twin, watching


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny tensors on few cores: more threads only make them slower."""
    torch.set_num_threads(1)


@pytest.fixture
def pool(device: torch.device) -> Pool:
    """A new pool of the device under test."""
    return Pool(device)


@pytest.fixture
def runner(pool: Pool) -> Callable[..., GraphRunner]:
    """Makes a runner that records whatever it can: `runner(function, module=...)`. A module is
    watched as `patch` has it watched."""

    def make(function: Callable[..., Any], **options: Any) -> GraphRunner:
        if (module := options.get("module")) is not None:
            options = watching(module) | options
        return GraphRunner(function, **{"pool": pool, "capture": "always", **options})

    return make


@pytest.fixture
def twin(device: torch.device, backend: Backend) -> Callable[..., Twin]:
    """Makes a function twice, plain and behind a runner: `twin(make)(seed, arguments)`."""

    def make(build: Callable[[], Any], **options: Any) -> Twin:
        return Twin(build, device, backend, **options)

    return make
