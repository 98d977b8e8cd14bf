"""In the folder that holds a clone called accel, Python takes the clone for the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ("-c", "import accel\nfrom accel.pipelines.demo import load_demo"),
        ("-m", "accel.pipelines.cli", "doctor"),
    ],
    ids=["import", "command"],
)
def test_a_clone_taken_for_the_package_is_named(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "accel").symlink_to(ROOT, target_is_directory=True)
    # Without site-packages, as if the installation were an editable one: those come last.
    line = [sys.executable, "-S", *arguments]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: Python took the folder {tmp_path / 'accel'} for the package accel: "
        "run this in that folder, or in any other that holds no folder called accel"
    )
