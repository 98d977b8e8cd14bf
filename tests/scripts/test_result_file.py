"""A result file says which commit it was measured at, wherever that can be known."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("result_file")


def _git(folder: Path, *arguments: str) -> str:
    known = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    command = ["git", *known, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    """A file in a repository of its own, committed."""
    file = tmp_path / "script.py"
    file.write_text("1\n", encoding="utf-8")
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", "script.py")
    _git(tmp_path, "commit", "-q", "-m", "first")
    _git(tmp_path, "tag", "-a", "v1", "-m", "a release")
    return file


def test_the_commit_is_named_by_its_short_hash(script: Any, committed: Path) -> None:
    head = _git(committed.parent, "rev-parse", "--short", "HEAD").strip()
    assert script.commit(committed) == {"commit": head}


def test_a_tree_that_differs_is_told_and_a_new_file_is_no_difference(
    script: Any, committed: Path
) -> None:
    clean = script.commit(committed)["commit"]
    (committed.parent / "result.json").write_text("{}", encoding="utf-8")
    assert script.commit(committed)["commit"] == clean
    committed.write_text("2\n", encoding="utf-8")
    assert script.commit(committed)["commit"] == f"{clean}-dirty"


def test_an_exported_tree_has_no_commit(script: Any, committed: Path) -> None:
    exported = committed.parent / "exported" / "script.py"
    exported.parent.mkdir()
    exported.write_text("1\n", encoding="utf-8")
    assert script.commit(exported) == {}  # inside a repository that does not know it


def test_without_git_there_is_no_commit(
    script: Any, committed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert script.commit(committed) == {}


def test_the_commit_stands_in_the_file(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "commit", lambda: {"commit": "abc1234-dirty"})
    script.write(tmp_path / "result.json", torch.device("cpu"), {"answer": 42})
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert (result["commit"], result["answer"]) == ("abc1234-dirty", 42)
    monkeypatch.setattr(script, "commit", dict)
    assert "commit" not in json.loads(script.as_text(torch.device("cpu"), {}))
