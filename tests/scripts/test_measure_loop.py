"""How long the GPU worked, from a profiler's events."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from measure_loop import busy_ms


def event(begin: float, duration: float, launch: int, cat: str = "kernel") -> dict[str, Any]:
    return {"cat": cat, "ts": begin, "dur": duration, "args": {"correlation": launch}}


def test_overlapping_work_counts_once_and_gaps_do_not_count() -> None:
    events = [event(0, 4, 1), event(2, 4, 2), event(8, 2, 3), {"cat": "cpu_op", "ts": 0}]
    assert busy_ms(events) == pytest.approx(8e-3)


def test_a_graph_is_busy_ms_between_its_kernels() -> None:
    events = [event(0, 1, 1), event(5, 1, 1), event(6, 2, 2, "gpu_memcpy")]
    assert busy_ms(events) == pytest.approx(8e-3)
