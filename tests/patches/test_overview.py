"""Reports: numbers and reasons, as text and as plain data."""

from __future__ import annotations

import json

import pytest

from accel.patches.overview import Report
from accel.reporting import BreakReport, GraphReport, PartReport


@pytest.fixture
def report() -> Report:
    part = PartReport("unet", "UNet2DConditionModel", captures=1, replays=7, declined="too quick")
    part.eager("first call of the module")
    part.eager("no room")
    part.eager("no room")
    graph = GraphReport("2x4x8x8", 2, 120, 0.25, 4096, replays=7)
    graph.breaks.append(BreakReport("model.py:7", "aten::nonzero", "automatic", True))
    part.graphs.append(graph)
    return Report([part, PartReport("vae", "AutoencoderKL")], pool_bytes=4096, memory_limit=1 << 30)


def test_the_text_says_what_and_why(report: Report) -> None:
    assert str(report).splitlines() == [
        "unet (UNet2DConditionModel): 1 captured, 7 replayed, 3 eager",
        "  declined: too quick",
        "  graph 2x4x8x8: 2 segments, 120 ops, 250 ms, 7 replays",
        "    automatic break at model.py:7: aten::nonzero",
        "  eager x2: no room",
        "  eager x1: first call of the module",
        "vae (AutoencoderKL): 0 captured, 0 replayed, 0 eager",
    ]


def test_the_data_is_json(report: Report) -> None:
    data = json.loads(json.dumps(report.to_dict()))
    assert data["parts"][0]["reasons"] == {"first call of the module": 1, "no room": 2}
    assert data["parts"][0]["graphs"][0]["breaks"][0]["guarded"] is True
    assert data["memory_limit"] == 1 << 30


def test_parts_are_found_by_name(report: Report) -> None:
    assert report["vae"].kind == "AutoencoderKL"
    with pytest.raises(KeyError, match="no patched part named 'clip'; patched parts: unet, vae"):
        report["clip"]


def test_an_inactive_report_says_why() -> None:
    assert str(Report(inactive="no CUDA device")) == "accel is inactive: no CUDA device"
    assert str(Report()) == "nothing patched"
