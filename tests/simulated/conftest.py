"""Fixtures for the simulated device's own tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

Recorder = Callable[..., tuple[Any, Any]]


@pytest.fixture
def backend(sim: torch.device) -> Any:
    """The simulated backend itself, with what only tests use."""
    from accel.backend import backend_for

    return backend_for(sim)


@pytest.fixture
def pool(backend: Any) -> Any:
    return backend.new_pool()


@pytest.fixture
def stream(backend: Any, sim: torch.device) -> Any:
    """A stream that may record: its handles are made."""
    made = backend.new_stream(sim)
    with backend.on_stream(made):
        backend.warm_libraries(sim)
    return made


@pytest.fixture
def record(backend: Any, pool: Any, stream: Any) -> Iterator[Recorder]:
    """`record(f, *args)` returns a segment that holds f's work, and what f returned."""
    kept = []

    def run(function: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
        segment = backend.segment(pool)
        kept.append(segment)
        with torch.no_grad(), backend.on_stream(stream):
            segment.begin()
            try:
                result = function(*args)
            finally:
                segment.end()
        return segment, result

    yield run
    kept.clear()
