"""A progress bar while buckets are captured, or a word on why none are: rich's, on stderr."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from accel.prefill.graphs import Progress


@contextlib.contextmanager
def bar() -> Iterator[Progress]:
    """A bar, and the function that moves it."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("capturing", total=None)

        def move(done: int, total: int, bucket: int) -> None:
            shown.update(task, completed=done, total=total, description=f"captured {bucket} tokens")

        yield move


def say(line: str) -> None:
    """One line where the bar would be."""
    from rich.console import Console

    Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)
