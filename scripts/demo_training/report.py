"""What is left of a run: a log, contact sheets, results, the model in a tar."""

from __future__ import annotations

import json
import tarfile
import time
from pathlib import Path
from typing import Any


class Report:
    """A folder of papers; its clock starts when it is made."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.begin = folder, time.monotonic()
        self._log = (folder / "log.txt").open("w")

    def log(self, line: str) -> None:
        """Prints a line with the seconds since the beginning, and keeps it."""
        stamped = f"[{time.monotonic() - self.begin:6.1f} s] {line}"
        print(stamped, flush=True)
        self._log.write(stamped + "\n")
        self._log.flush()

    def write(self, name: str, results: dict[str, Any]) -> None:
        """Puts results into a JSON file."""
        (self.folder / name).write_text(json.dumps(results, indent=1))

    def pack(self, model: Path) -> None:
        """Puts the saved pipeline into `model.tar`, complete or not at all."""
        part = self.folder / "model.tar.writing"
        with tarfile.open(part, "w") as archive:
            archive.add(model, arcname="model")
        part.replace(self.folder / "model.tar")
