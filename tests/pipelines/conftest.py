"""Tiny saved pipelines and the command line, for the tests of this room."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from accel.pipelines import cli, tiny

Cli = Callable[..., "Outcome"]
HERE = "cuda" if torch.cuda.is_available() else "cpu"
INACTIVE = "accel: nothing is accelerated: "


@dataclass(frozen=True)
class Outcome:
    """What one command line did."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line on stderr; fails where it is not exactly one."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        return lines[0]

    def remarks(self, device: str = HERE) -> list[str]:
        """The lines on stderr without the one that nothing is accelerated; fails where that one is
        not there exactly once for a run on the CPU, or is there for a GPU."""
        lines = self.err.splitlines()
        inactive = [line for line in lines if line.startswith(INACTIVE)]
        assert len(inactive) == (device == "cpu"), self.err
        return [line for line in lines if line not in inactive]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    # Tiny tensors: more threads only wait for each other, worst where tests run side by side.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Saves a tiny pipeline once and gives its folder; do not write into it."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = tiny.save_pipeline(tmp_path_factory.mktemp("saved") / name, name)
        return folders[name]

    return folder


@pytest.fixture
def copied(saved: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a tiny saved pipeline that a test may change."""

    def folder(name: str) -> Path:
        return Path(shutil.copytree(saved(name), tmp_path / f"copy-of-{name}"))

    return folder


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a text into stdin."""

    def pipe(text: str) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    return pipe


@pytest.fixture
def accel_cli(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Cli:
    """Runs a command line in this process, in an empty working folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> Outcome:
        capsys.readouterr()
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run
