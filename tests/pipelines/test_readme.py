"""The Python of README and of the page on prefill runs as it stands, without a GPU too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


def _run(page: str) -> dict[str, Any]:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    return names


def test_the_python_in_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = _run("README.md")
    assert names["image"].size == (256, 256)
    assert capsys.readouterr().out.strip()  # the report
    assert "forward" not in vars(names["pipe"].unet)


def test_the_python_on_prefill_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = _run("docs/prefill.md")
    assert capsys.readouterr().out.strip()  # the report
    own = names["model"](torch.tensor(names["prompts"][:1])).logits[0, -1]
    assert names["result"].logits[0].argmax() == own.argmax()
