"""Fixtures for the patches' tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from accel.patches import gated, norms, rotary
from tests.patches.counting_kernels import CountingKernels
from tests.patches.pair import Pair


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny tensors on few cores: more threads only make them slower."""
    torch.set_num_threads(1)


@pytest.fixture
def pair(device: torch.device) -> Callable[..., Pair]:
    """Makes a tiny pipeline twice, plain and patched: `pair("sd15")`."""
    return lambda name, **options: Pair(name, device, **options)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> CountingKernels:
    """What all devices have for kernels."""
    counting = CountingKernels()
    for user in (gated, norms, rotary):
        monkeypatch.setattr(user, "kernels_for", lambda device: counting)
    return counting
