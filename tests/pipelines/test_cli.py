import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel.pipelines import versions

Cli = Callable[..., Any]


def test_help_names_every_command(accel_cli: Cli) -> None:
    for arguments in ((), ("--help",)):
        done = accel_cli(*arguments)
        assert (done.code, done.err) == (0, "")
        assert all(
            name in done.out
            for name in ("generate", "bench", "verify", "explain", "prefill", "doctor")
        )


@pytest.mark.parametrize("command", ["generate", "bench", "verify", "explain", "prefill", "doctor"])
def test_every_command_has_help(accel_cli: Cli, command: str) -> None:
    done = accel_cli(command, "--help")
    assert (done.code, done.err) == (0, "")
    assert "--json" in done.out


@pytest.mark.parametrize(
    ("given", "then"),
    [
        ({}, "10000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, None),
    ],
)
def test_threads_that_wait_spin_briefly_unless_told_otherwise(
    given: dict[str, str], then: str | None, accel_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # so that what the command sets is taken back
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert accel_cli("--version").code == 0
    assert os.environ.get("GOMP_SPINCOUNT") == then


def test_that_is_said_before_torch_is_loaded() -> None:
    program = "import sys; from accel.pipelines import cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n"


def test_the_version_is_told(accel_cli: Cli) -> None:
    import accel

    assert accel_cli("--version").out == f"accel {accel.__version__}\n"
    assert versions.installed(versions.DISTRIBUTION) == accel.__version__


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fly",), "No such command 'fly'"),
        (("verify",), "Missing argument"),
        (("bench", "x", "--repeats", "none"), "--repeats"),
        (("bench", "x", "--size", "none"), "a size is 512 or 768x512"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    accel_cli: Cli, arguments: tuple[str, ...], words: str
) -> None:
    done = accel_cli(*arguments)
    assert (done.code, done.out) == (2, "")
    assert words in done.complaint


@pytest.mark.parametrize("command", [("generate", "x"), ("prefill", "x"), ("doctor",)])
def test_a_folder_that_is_gone_is_one_line(
    accel_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    done = accel_cli(*command)
    monkeypatch.chdir(tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.complaint == "accel: the current folder is gone: change to one that is there"


def test_help_and_mistakes_are_answered_without_loading_torch() -> None:
    lines = [["--help"], ["generate", "--help"], ["generate", "x", "--model", "./nowhere"]]
    lines += [["generate", "x", "--wrong"], ["generate"], ["bench", "x", "--size", "y"]]
    lines += [["generate", "x", "--dtype", "int8"], ["generate", "x", "--lora", "nowhere"]]
    lines += [["bench", "nosuch"], ["verify", "nosuch"], ["explain", "nosuch"]]
    lines += [["generate", "x", "--set", "seed=1"], ["generate", "x", "--size", "64"]]
    lines += [["prefill", "x", "--model", "nowhere"], ["prefill", ""], ["prefill"]]
    lines += [["prefill", "x", "--mode", "fast"], ["prefill", "x", "--attention", "y"]]
    script = (
        "import json, sys\n"
        "from accel.pipelines.cli import main\n"
        "codes = [main(line) for line in json.loads(sys.argv[1])]\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "print(json.dumps([codes, sorted(heavy)]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(lines)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [[0, 0] + [2] * 16, []]


def test_the_installed_command_ends_with_the_exit_code() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "accel.pipelines.cli", "generate", "x", "--model", "./nowhere"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "accel: no such model folder: ./nowhere (a model is demo, a folder or a hub id, "
        "owner/name)\n"
    )
