"""What every result file in docs/benchmarks says first: command, date, machine, versions."""

from __future__ import annotations

import datetime
import json
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
        "date": datetime.date.today().isoformat(),
        "device": device_name(device),
        "driver": nvidia_driver(),
        "processor": processor(),
        "versions": made_with(),
    }
    return json.dumps(made | facts, indent=1) + "\n"


def write(path: Path, device: torch.device, facts: dict[str, Any]) -> None:
    """Writes them to a file."""
    path.write_text(as_text(device, facts))
