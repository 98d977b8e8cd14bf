"""Where pictures go: output files and patterns, checked before anything is generated.

This module knows paths only. A pattern may hold {index}, {seed}, {prompt} and {model}.
"""

from __future__ import annotations

import contextlib
import os
import re
import string
import tempfile
from collections.abc import Sequence
from pathlib import Path

from accel.pipelines.errors import BadInput
from accel.pipelines.names import instead
from accel.pipelines.settings import Settings

FIELDS = ("index", "seed", "prompt", "model")


def paths_for(pattern: str | None, pictures: Sequence[Settings]) -> list[Path]:
    """One path a picture. Without a `pattern`, names from prompt and seed in the working folder; a
    folder as pattern takes the same names. Raises `BadInput` for a pattern that is wrong, that
    would write two pictures to one path, or whose paths cannot be written.
    """
    pattern = _with_file_name(pattern, many=len(pictures) > 1)
    _check(pattern)
    paths = [Path(_filled(pattern, i, settings)) for i, settings in enumerate(pictures)]
    seen: set[Path] = set()
    for path in paths:
        if path in seen:
            raise BadInput(
                f"--output {pattern}: {len(paths)} pictures, but two of them would be {path}; "
                "put {index} into the name"
            )
        seen.add(path)
    for path in paths:
        refuse_unwritable(path)
    return paths


def refuse_unwritable(path: Path, option: str = "--output") -> None:
    """Raises `BadInput` if no file could be written at `path`. Missing folders are made later."""
    if os.path.isdir(path):
        raise BadInput(f"{option} {path}: that is a folder")
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise BadInput(f"{option} {path}: the file is there and may not be overwritten")
    new = [path.absolute()]
    while not os.path.exists(new[-1].parent):
        new.append(new[-1].parent)
    folder = new[-1].parent
    try:
        for entry in new:
            _refuse_name(folder / entry.name)
        # Asking for permission bits is not enough: a read-only disk has them too.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInput(f"{option} {path}: cannot write in {folder}: {error.strerror}") from error


def _refuse_name(path: Path) -> None:
    """Raises `OSError` where no file or folder can have that name, too long for its disk."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(path)


def slug(text: str, length: int = 40) -> str:
    """`text` as a piece of a file name.

    >>> slug("A red circle, on blue!")
    'a-red-circle-on-blue'
    """
    words = re.sub(r"[^\w]+", "-", text.lower()).strip("-")
    return words[:length].rstrip("-") or "picture"


def _with_file_name(pattern: str | None, *, many: bool) -> str:
    name = "{index}-{prompt}-{seed}.png" if many else "{prompt}-{seed}.png"
    if pattern is None:
        return name
    if not pattern:  # a shell's variable that is empty, say
        raise BadInput(
            '--output "": a .png, a folder or a pattern is wanted; leave it out for names from '
            "prompt and seed"
        )
    if pattern.endswith(("/", os.sep)) or os.path.isdir(pattern):
        return os.path.join(pattern.replace("{", "{{").replace("}", "}}"), name)
    return pattern


def _check(pattern: str) -> None:
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(pattern) if name is not None}
    except ValueError as error:
        raise BadInput(f"--output {pattern}: {error}") from error
    unknown = sorted(names - set(FIELDS))
    if unknown:
        wrong, known = f"{{{unknown[0]}}}", [f"{{{name}}}" for name in FIELDS]
        meant = instead(wrong, known, f"a pattern may hold {', '.join(known)}")
        raise BadInput(f"--output {pattern}: no {wrong} here; {meant}")
    if not pattern.lower().endswith(".png"):
        raise BadInput(
            f"--output {pattern}: pictures are PNG files, so name it {Path(pattern).stem}.png, or "
            f"write {pattern}/ for a folder"
        )


def _filled(pattern: str, index: int, settings: Settings) -> str:
    try:
        return pattern.format(
            index=index,
            seed=settings.seed,
            prompt=slug(settings.prompt),
            model=slug(settings.model),
        )
    except ValueError as error:
        raise BadInput(f"--output {pattern}: {error}") from error
