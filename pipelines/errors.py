"""What goes wrong for a person, in one line: the exception of this room and how others are put.

This module knows exit codes and words. It imports nothing heavy, so that a wrong argument is
answered at once.
"""

from __future__ import annotations

import re
import sys
from pathlib import PurePath
from types import TracebackType
from typing import Any


class AccelError(Exception):
    """Something failed while working. The message is one line: what, where, why, what helps."""

    exit_code = 1


class BadInput(AccelError):
    """The arguments cannot be served. Exit code 2, as for a misspelt option."""

    exit_code = 2


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its type's name where it has none; of an error of
    the system what it says, without number and path.

    >>> first_line(FileNotFoundError(2, "No such file or directory", "a.txt"))
    'No such file or directory'
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def explained(error: Exception) -> AccelError:
    """`error` as an `AccelError`: out of memory and a refused size in their own words, others as
    type and message.

    >>> str(explained(KeyError("unet")))
    "KeyError: 'unet' (--debug shows the traceback)"
    """
    if isinstance(error, AccelError):
        return error
    if is_out_of_memory(error):
        return AccelError(
            f"out of memory ({first_line(error)}): lower --size, take a smaller --dtype, "
            "or free the memory of the graphs with --mode off"
        )
    if isinstance(error, ValueError) and _raised_by_a_pipeline(error.__traceback__):
        said = " ".join(str(error).split())
        if (sides := _ODD_SIZE.search(said)) is not None:
            return _odd_size(*map(int, sides.groups()))
        option = "; --size sets it" if is_about_size(error) else ""
        return BadInput(f"the model cannot take this: {said.rstrip('.')}{option}")
    return AccelError(f"{type(error).__name__}: {first_line(error)} (--debug shows the traceback)")


_ODD_SIZE = re.compile(r"`height` and `width` have to be divisible by (\d+)\D* (\d+) and (\d+)")
"""What most pipelines say of a size that they refuse."""


def _odd_size(step: int, height: int, width: int) -> BadInput:
    """The same with width first, as `--size` takes it, and the nearest size that fits.

    >>> str(_odd_size(8, 256, 250))
    '--size 250x256: width and height have to be multiples of 8: 248x256, say'
    """
    fitting = "x".join(str(max(1, round(side / step)) * step) for side in (width, height))
    wanted = f"width and height have to be multiples of {step}: {fitting}, say"
    return BadInput(f"--size {width}x{height}: {wanted}")


_WANTED = {
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "int_parsing": "a whole number",
    "float_parsing": "a number",
}
"""What an option takes, by the kind of pydantic's error: typer reads values with pydantic."""


def misread(error: Exception) -> str | None:
    """What typer complains of, in one line (an unknown option, a value that an option does not
    take), or None for an error that is not typer's."""
    complaint = getattr(error, "format_message", None)
    if complaint is None:
        return None
    said: str = complaint()
    found: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    options = getattr(getattr(error, "param", None), "opts", None)
    if found and options and found[0]["type"] in _WANTED:
        wanted = _WANTED[found[0]["type"]].format(**found[0].get("ctx", {}))
        said = f"{options[0]} {found[0]['input']}: this has to be {wanted}"
    return " ".join(said.split()) or "an argument is missing: see --help"


def is_about_size(error: BaseException) -> bool:
    """Whether a pipeline's own code refused the size that it was called with."""
    named = re.search(r"\b(height|width)\b", str(error), re.IGNORECASE) is not None
    return isinstance(error, ValueError) and named and _raised_by_a_pipeline(error.__traceback__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host ran out of memory."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    # The CPU allocator has no exception of its own.
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def _raised_by_a_pipeline(traceback: TracebackType | None) -> bool:
    """Whether the innermost frame is a pipeline's own code: that is where sizes and prompts are
    checked (`check_inputs`, and the first lines of some calls)."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    path = PurePath(traceback.tb_frame.f_code.co_filename)
    return "diffusers" in path.parts and (
        path.name.startswith("pipeline_") or "modular_pipelines" in path.parts
    )
