"""Ranks under watch: each notes how far it is, and if they take too long all of them are ended.

Knows processes and their notes, nothing of models. A rank that waits for the device or for another
rank cannot tell so itself: its last note and its stack do.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ASK = signal.SIGUSR1
"""A rank answers it with its stack, also while it waits in a library."""
ANSWER, GRACE = 2.0, 5.0
"""Seconds for a stack to be written, and for a launcher to end its ranks."""


class Note:
    """What one rank is at: a file in `folder` that others may read at any time."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank-{rank}.json"
        self._facts: dict[str, Any] = {"rank": rank, "pid": os.getpid(), "step": 0}
        self._stack = (folder / f"rank-{rank}.stack").open("w", encoding="utf-8")
        faulthandler.register(ASK, file=self._stack, all_threads=False)
        self()

    def begin(self, phase: str, **facts: Any) -> None:
        """The next phase begins; what only the last one knew goes."""
        kept = {key: self._facts[key] for key in ("rank", "pid")}
        self._facts = kept | {"step": self._facts["step"] + 1, "phase": phase}
        self(**facts)

    def __call__(self, **facts: Any) -> None:
        """Adds to the note, or replaces in it."""
        self._facts |= facts
        partial = self._path.with_suffix(".part")
        partial.write_text(json.dumps(self._facts), encoding="utf-8")
        partial.replace(self._path)


def notes(folder: Path) -> list[dict[str, Any]]:
    """Every rank's last note, and its stack if it was asked for one."""
    found = []
    for path in sorted(folder.glob("rank-*.json")):
        note: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        stack = path.with_suffix(".stack").read_text(encoding="utf-8")
        found.append(note | ({"stack": stack.splitlines()} if stack else {}))
    return found


@dataclass(frozen=True)
class End:
    """How it ended: in words, `finished` if all is well, and every rank's note."""

    words: str
    ranks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def well(self) -> bool:
        """Whether all ranks came to their end by themselves."""
        return self.words == "finished"


def watch(command: Sequence[str], folder: Path, limit: float) -> End:
    """Runs `command`, whose ranks leave notes in `folder`, for at most `limit` seconds. What it
    started has ended when this returns or raises."""
    launcher = subprocess.Popen(command, start_new_session=True)
    try:
        code = launcher.wait(limit)
    except subprocess.TimeoutExpired:
        _ask_for_stacks(folder)
        ranks = notes(folder)
        return End(_where_it_hung(ranks), ranks)
    finally:
        _end(launcher, folder)
    if code == 0:
        return End("finished")
    ranks = notes(folder)
    return End(_why_it_failed(ranks, code), ranks)


def _where_it_hung(ranks: Sequence[dict[str, Any]]) -> str:
    """`hung after batch 3 in mode full`: of the rank that is behind."""
    started = [note for note in ranks if "phase" in note]
    if not started:
        return "hung while starting"
    behind = min(started, key=lambda note: (note["step"], note.get("batch", 0)))
    if "mode" not in behind:
        return f"hung in {behind['phase']}"
    return f"hung after batch {behind['batch']} in mode {behind['mode']} ({behind['phase']})"


def _why_it_failed(ranks: Sequence[dict[str, Any]], code: int) -> str:
    whys = [f"rank {note['rank']}: {note['failed']}" for note in ranks if "failed" in note]
    return "failed: " + ("; ".join(whys) or f"a rank or its launcher ended with status {code}")


def _ask_for_stacks(folder: Path) -> None:
    for note in notes(folder):
        _signal(note["pid"], ASK)
    _until(lambda: all("stack" in note for note in notes(folder)), ANSWER)
    time.sleep(0.05)  # a stack has begun: its lines come one by one


def _end(launcher: subprocess.Popen[bytes], folder: Path) -> None:
    """Ends what is left: the launcher first, which ends its ranks, then those by their notes.
    Nothing is left of a launcher that has ended by itself."""
    if launcher.poll() is not None:
        return
    launcher.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(GRACE)
    ranks = [note["pid"] for note in notes(folder)]
    for pid in ranks:
        _signal(pid, signal.SIGKILL)
    launcher.kill()
    launcher.wait()
    _until(lambda: not any(_signal(pid, 0) for pid in ranks), GRACE)


def _signal(pid: int, number: int) -> bool:
    """Whether there was a process to take it; 0 only asks."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _until(happened: Callable[[], bool], seconds: float) -> None:
    """Waits for something, but not for ever."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not happened():
        time.sleep(0.02)
