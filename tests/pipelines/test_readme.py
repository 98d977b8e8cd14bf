"""The Python of README and of the page on prefill runs as it stands, without a GPU too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.pipelines.demo import DEFAULT_STEPS

ROOT = Path(__file__).parents[2]


def _run(page: str) -> dict[str, Any]:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    return names


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps every picture of the demo model takes."""
    from diffusers import DPMSolverMultistepScheduler as Scheduler

    taken: list[int] = []
    plain = Scheduler.set_timesteps

    def set_timesteps(self: Any, steps: int, *arguments: Any, **options: Any) -> None:
        taken.append(steps)
        plain(self, steps, *arguments, **options)

    monkeypatch.setattr(Scheduler, "set_timesteps", set_timesteps)
    return taken


def test_the_python_in_readme_runs(capsys: pytest.CaptureFixture[str], steps: list[int]) -> None:
    names = _run("README.md")
    assert set(steps) == {DEFAULT_STEPS}
    assert names["image"].size == (256, 256)
    assert capsys.readouterr().out.strip()  # the report
    assert "forward" not in vars(names["pipe"].unet)


def test_the_python_on_prefill_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = _run("docs/prefill.md")
    assert capsys.readouterr().out.strip()  # the report
    own = names["model"](torch.tensor(names["prompts"][:1])).logits[0, -1]
    assert names["result"].logits[0].argmax() == own.argmax()
