"""The soak runs, finds nothing wrong, and would find it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import soak


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "MODELS", ("sd15",))
    monkeypatch.setattr(soak, "DRAWINGS", [d for d in soak.DRAWINGS if d.model == "sd15"][:1])
    some = ("nothing", "LoRA added", "LoRA deleted", "Euler", "weights moved", "patched again")
    monkeypatch.setattr(soak, "CHANGES", {name: soak.CHANGES[name] for name in some})


def test_every_state_is_drawn_as_eager_does(sim: torch.device) -> None:
    result = soak.soak(sim, calls=4 * len(soak.CHANGES), threads=2, seconds=600, laps=1)
    assert (result["wrong"], result["calls"]) == (0, 24)
    assert result["replays"] > 24
    assert result["captures"] > 4


def test_a_wrong_picture_is_found(sim: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(pipe: Any) -> None:
        """Weights of one of the two only."""
        if pipe is not pipes[0]:
            soak._weights(pipe)

    pipes: list[Any] = []
    made = soak.Soak._made
    monkeypatch.setattr(
        soak.Soak, "_made", lambda self, name: pipes.append(made(self, name)) or pipes[-1]
    )
    monkeypatch.setattr(soak, "CHANGES", {"nothing": soak.CHANGES["nothing"], "forgot": forget})
    assert soak.soak(sim, calls=4, threads=2, seconds=600, laps=1)["wrong"] == 2
