"""docs/models.md is what the engine does now with every tiny family."""

from __future__ import annotations

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accel.pipelines.tiny import FAMILIES, FLEX_FAMILIES
from accel.pipelines.versions import installed

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
SCRIPT = ROOT / "scripts" / "list_models.py"
COMMAND = "python scripts/list_models.py --output docs/models.md"
ALL = {**FAMILIES, **FLEX_FAMILIES}


def listed(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--output", str(page), *options]
    return subprocess.run(command, capture_output=True, text=True)


def undated(page: Path) -> list[str]:
    lines = page.read_text("utf-8").splitlines()
    return [line for line in lines if not line.startswith("Made on ")]


def rows(page: Path, number: int = 0) -> list[list[str]]:
    """The cells of the rows of one of the two tables, without its head."""
    lines = undated(page)
    half = lines.index("## Shims")
    lines = lines[half:] if number else lines[:half]
    table = [line for line in lines if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def test_it_is_up_to_date(tmp_path: Path) -> None:
    made_with = dict(re.findall(r"(diffusers|torch) ([\d.]+)", PAGE.read_text("utf-8")))
    here = {name: (installed(name) or "").partition("+")[0] for name in made_with}
    if made_with != here:
        pytest.skip(f"the page was made with {made_with}, here are {here}")
    done = listed(tmp_path / "models.md")
    assert done.returncode == 0, done.stderr
    changed = set(undated(tmp_path / "models.md")) ^ set(undated(PAGE))
    assert not changed, f"the engine does something else now: run {COMMAND}, look at it, commit"


def test_it_has_a_row_for_every_family_in_order() -> None:
    assert [(row[0], row[1]) for row in rows(PAGE)] == [
        (name, f"`{family.kind}`") for name, family in ALL.items()
    ]


def test_a_family_that_is_not_recorded_has_a_remark() -> None:
    for name, _, segments, _, recorded, _, _, remark in rows(PAGE):
        assert (segments == "-") == (recorded in ("0", "-")), name
        assert segments != "-" or remark != "-", name


def test_shims_only_save() -> None:
    known, saved = {row[0] for row in rows(PAGE)}, rows(PAGE, 1)
    assert len(saved) >= 8
    for name, _, breaks, replayed in saved:
        assert name in known
        without, now = breaks.split(" → ")
        assert without == "-" or int(now) < int(without), name
        before, after = map(int, replayed.split(" → "))
        assert after > before or without != "-", name


def test_breaks_name_lines_of_diffusers() -> None:
    places = re.findall(r" at `([^`]+)`", PAGE.read_text("utf-8"))
    assert len(places) > 10
    known = re.compile(r"models/[\w/]+\.py:\d+|patches/shims\.py")
    assert [place for place in places if not known.fullmatch(place)] == []


def test_an_unknown_family_is_named(tmp_path: Path) -> None:
    done = listed(tmp_path / "models.md", "--only", "flux", "nothing")
    assert done.returncode == 1
    assert "'nothing'" in done.stderr
    assert not (tmp_path / "models.md").exists()


def test_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    failed, tried = doctest.testmod(importlib.import_module("list_models"))
    assert tried
    assert not failed
