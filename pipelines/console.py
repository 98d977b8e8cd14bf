"""What goes to the terminal: one JSON document on stdout, everything else on stderr.

This module knows rich and JSON. It knows no model and no picture.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

OnStep = Callable[[int], None]
OnPicture = Callable[[str], None]
OnCapture = Callable[[int, int, int], None]
OnKernel = Callable[[int, int, str], None]

_notes_are_held = ContextVar("_notes_are_held", default=False)


def unheard(what: str) -> None:
    """For callers that need not hear what runs next."""


def print_json(content: Any) -> None:
    """Writes `content` as one JSON document to stdout. JSON has no word for NaN and the infinities:
    they are null."""
    print(json.dumps(_finite(content), indent=2, default=str, allow_nan=False))


def _finite(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, dict):
        return {name: _finite(x) for name, x in content.items()}
    return [_finite(x) for x in content] if isinstance(content, (list, tuple)) else content


def escape_what_stdout_cannot_encode() -> None:
    """From now on a letter that stdout has no code for is written as its number, where it would end
    the program: file names and prompts may hold any."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def note(text: str) -> None:
    """Says one line on stderr."""
    if not _notes_are_held.get():
        print(f"accel: {text}", file=sys.stderr)


@contextlib.contextmanager
def notes_held(held: bool) -> Iterator[None]:
    """While open (and `held`), notes are not said: of several processes one says them."""
    before = _notes_are_held.set(held)
    try:
        yield
    finally:
        _notes_are_held.reset(before)


@contextlib.contextmanager
def stdout_kept_clean(kept: bool) -> Iterator[None]:
    """While open (and `kept`), what libraries print goes to stderr: stdout belongs to the JSON."""
    if not kept:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def steps_shown(
    pictures: int, steps: int | None, *, shown: bool = True
) -> Iterator[Callable[[int], OnStep]]:
    """A progress bar on stderr over the steps of each picture. Yields a function that gives, for a
    picture's index, what is told the number of finished steps. Draws nothing where stderr is no
    terminal, or unless `shown`."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    hidden = not (shown and console.is_terminal)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=hidden) as bar:
        task = bar.add_task("picture", total=steps)

        def for_picture(index: int) -> OnStep:
            words = f"picture {index + 1} of {pictures}" if pictures > 1 else "picture"
            bar.reset(task, description=words, total=steps)
            return lambda done: bar.update(task, completed=done)

        yield for_picture


@contextlib.contextmanager
def captures_shown() -> Iterator[OnCapture]:
    """A progress bar on stderr over graphs that are captured. Yields what is told (graphs done,
    graphs to do, the bucket just captured). Draws nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("capturing", total=None)

        def on_capture(done: int, total: int, bucket: int) -> None:
            words = f"captured {bucket:,} tokens"
            bar.update(task, description=words, total=total, completed=done)

        yield on_capture


@contextlib.contextmanager
def kernels_shown() -> Iterator[OnKernel]:
    """A progress bar on stderr over kernels that are compiled, with the time it takes: a kernel is
    minutes. Yields what is told (kernels done, kernels in all, the one just done). One line per
    kernel where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    hidden = not console.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=hidden) as bar:
        task = bar.add_task("compiling kernels", total=None)

        def on_kernel(done: int, total: int, kernel: str) -> None:
            bar.update(task, total=total, completed=done)
            if hidden and done:
                note(f"compiled {kernel} ({done} of {total})")

        yield on_kernel


@contextlib.contextmanager
def status_shown() -> Iterator[OnPicture]:
    """A line on stderr with what is going on, replaced by the next; nothing where stderr is no
    terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield unheard
        return
    with console.status("starting") as status:
        yield status.update
