"""README's Python runs as it stands, on a machine without a GPU too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[2] / "README.md"


def test_the_python_in_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["image"].size == (256, 256)
    assert capsys.readouterr().out.strip()  # the report
    assert "forward" not in vars(names["pipe"].unet)
