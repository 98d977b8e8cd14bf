"""How a command ends is told by its exit code: in a process of its own, as a shell sees it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel.pipelines.models import ZOO

Cli = Callable[..., Any]
COMMAND = [sys.executable, "-m", "accel.pipelines.cli"]
PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
CODES = {0, 1, 2, 130}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--version",), 0),
        (("-h",), 0),
        (("doctor",), 0),
        (("generate",), 2),
        (("fly",), 2),
        (("bench", "demo", "--repeats", "none"), 2),
        (("generate", "x", "--from", "missing.png"), 2),
    ],
)
def test_done_is_0_and_input_that_cannot_be_served_is_2(
    arguments: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    done = subprocess.run([*COMMAND, *arguments], cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == code
    assert (done.stderr != b"") == (code == 2)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is full")
def test_what_fails_on_the_way_is_1() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*COMMAND, "doctor"], stdout=full, stderr=subprocess.PIPE, timeout=120, text=True
        )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "No space left on device" in line


def _stopped(running: subprocess.Popen[str], sent: signal.Signals) -> str:
    """What it says when it is stopped. One Ctrl-C may get lost: Python ignores what is raised in a
    finalizer, and libraries are still being imported. Whoever waits presses it again."""
    for _ in range(6):
        running.send_signal(sent)
        try:
            return running.communicate(timeout=30)[1]
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("it goes on")


def _as_in_a_terminal() -> None:
    """What runs in the background has Ctrl-C ignored, and so have its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("sent", "code", "said"),
    [(signal.SIGINT, 130, "accel: interrupted\n"), (signal.SIGTERM, -signal.SIGTERM, "")],
    ids=["Ctrl-C", "killed"],
)
def test_what_is_stopped_says_by_what(
    sent: signal.Signals, code: int, said: str, tmp_path: Path
) -> None:
    line = ("generate", "a red circle", "--steps", "9999", "--device", "cpu", "-o", "x.png")
    with subprocess.Popen(
        [*COMMAND, *line],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_as_in_a_terminal,
    ) as running:
        assert running.stderr is not None
        try:
            assert running.stderr.readline().startswith("accel: nothing is accelerated")
            err = _stopped(running, sent)
        finally:
            running.kill()
    assert running.returncode == code
    assert err.endswith(said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command", ["", "generate", "bench", "verify", "explain", "prefill", "doctor"]
)
def test_a_short_option_asks_for_help_too(accel_cli: Cli, command: str) -> None:
    given = (command,) if command else ()
    short, long = (accel_cli(*given, option) for option in ("-h", "--help"))
    assert short == long
    assert (short.code, short.err) == (0, "")
    assert "--json" in short.out or not command


def test_help_and_the_page_name_every_code(accel_cli: Cli) -> None:
    told = accel_cli("--help").out.partition("Exit codes:")[2]
    assert set(map(int, re.findall(r"\d+", told))) == CODES
    table = PAGE.read_text(encoding="utf-8").partition("## Exit codes")[2].partition("##")[0]
    assert set(map(int, re.findall(r"^\| (\d+) \|", table, re.MULTILINE))) == CODES


def test_the_page_names_the_whole_zoo() -> None:
    assert f"weights: {', '.join(ZOO)}." in PAGE.read_text(encoding="utf-8")
