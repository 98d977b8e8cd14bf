"""The figures in docs/ are what the engine does now, drawn the same way every time."""

from __future__ import annotations

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"
COMMAND = "python scripts/draw_figures.py"


@pytest.fixture(scope="module")
def redrawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The figures, drawn anew by a process of their own."""
    folder = tmp_path_factory.mktemp("figures")
    script = ROOT / "scripts" / "draw_figures.py"
    command = [sys.executable, str(script), "--output", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_they_are_up_to_date(redrawn: Path) -> None:
    names = sorted(path.name for path in FIGURES.iterdir())
    assert names == sorted(path.name for path in redrawn.iterdir())
    changed = [n for n in names if (FIGURES / n).read_bytes() != (redrawn / n).read_bytes()]
    assert not changed, f"the engine does something else now: run {COMMAND}, look at them, commit"


def test_every_one_is_shown() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    shown = re.findall(r"!\[[^\]]+\]\(figures/([\w.]+)\)", page)
    assert sorted(shown) == sorted(path.name for path in FIGURES.iterdir())


@pytest.mark.parametrize("path", sorted(FIGURES.glob("*.svg")), ids=lambda path: path.stem)
def test_they_are_pictures_with_a_title(path: Path) -> None:
    picture = ElementTree.parse(path).getroot()
    assert picture.tag.endswith("}svg")
    title = picture.find("{http://www.w3.org/2000/svg}title")
    assert title is not None and title.text


@pytest.mark.parametrize("name", ["canvas", "tiles"])
def test_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    module = importlib.import_module(f"figures.{name}")
    failed, tried = doctest.testmod(module)
    assert tried
    assert not failed
