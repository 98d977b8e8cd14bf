"""What every result file in docs/benchmarks says first: command, commit, date, device, versions."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from accel.pipelines.machine import device_name, nvidia_driver, processor
from accel.pipelines.versions import made_with


def as_text(device: torch.device, facts: dict[str, Any]) -> str:
    """`facts`, measured on `device` by the running script, as JSON."""
    made = {
        "command": " ".join(["python", *sys.argv]),
        **commit(),
        "date": datetime.date.today().isoformat(),
        "device": device_name(device),
        "driver": nvidia_driver(),
        "processor": processor(),
        "versions": made_with(),
    }
    return json.dumps(made | facts, indent=1) + "\n"


def write(path: Path | None, device: torch.device, facts: dict[str, Any]) -> None:
    """Writes them to a file, if there is to be one."""
    if path is not None:
        path.write_text(as_text(device, facts))


def commit(file: Path = Path(__file__)) -> dict[str, str]:
    """Under "commit" the short hash of the commit that `file` is of, with "-dirty" where tracked
    files differ from it. Empty where git does not know the file: an exported tree has no commit of
    its own, and may lie in somebody else's repository."""
    if _git(file, "ls-files", "--error-unmatch", file.name) is None:
        return {}
    described = _git(file, "describe", "--always", "--dirty", "--exclude=*")
    return {"commit": described} if described else {}


def _git(file: Path, *arguments: str) -> str | None:
    """What git answers beside `file`; None where it fails or is not installed."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=file.resolve().parent, capture_output=True, text=True
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
