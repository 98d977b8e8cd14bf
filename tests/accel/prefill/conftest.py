"""Fixtures for the prefill tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from accel.prefill.runner import PrefillRunner
from tests.accel.prefill.tiny import TinyModel


@pytest.fixture
def tiny(device: torch.device) -> TinyModel:
    """A tiny model on the device under test."""
    return TinyModel(device)


@pytest.fixture
def make() -> Iterator[Callable[..., PrefillRunner]]:
    """Makes runners with small buckets, and closes them after the test."""
    made: list[PrefillRunner] = []

    def make(model: TinyModel, **options: Any) -> PrefillRunner:
        defaults: dict[str, Any] = {"max_tokens": 256, "max_requests": 4, "attention": "reference"}
        made.append(PrefillRunner(model, **{**defaults, **options}))
        return made[-1]

    yield make
    for runner in made:
        runner.close()
