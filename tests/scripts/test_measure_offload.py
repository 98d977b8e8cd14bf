"""The measurement of offload compares the same pictures, and the lifted veto lets graphs live."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from accel.patches import state
from accel.pipelines import tiny

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_every_way_draws_the_same_picture(
    sim: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = importlib.import_module("measure_offload")
    settings = {**tiny.CALLS["sd15"], "num_inference_steps": 5}
    veto = state._veto_of
    rows = script.measure(lambda: tiny.pipeline("sd15"), str(sim), settings, 1, "always")
    assert state._veto_of is veto
    assert [row["bytes equal"] for row in rows] == [True] * 5
    as_it_is, lifted = rows[3:]
    assert as_it_is["recorded"] == 0
    assert any("CPU offload" in reason for reason in as_it_is["reasons"])
    assert lifted["recorded"] >= 2, lifted
    assert lifted["replayed"] > lifted["recorded"], lifted
    assert all(row["loop, s"] < row["picture, s"] for row in rows)
