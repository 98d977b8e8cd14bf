"""Prompts from the command line, a file or stdin, and the settings that come of them."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel.pipelines.arguments import refuse_reserved
from accel.pipelines.errors import BadInput, first_line
from accel.pipelines.settings import Settings

SEEDS = 2**32


def read_prompts(arguments: Sequence[str], file: str | None) -> list[str]:
    """The prompts given as arguments, or those in `file`: one a line, `-` is stdin, empty lines are
    skipped."""
    if file is None:
        for prompt in arguments:
            refuse_broken(prompt, "the prompt")
            refuse_file(prompt)
        return list(arguments)
    if arguments:
        raise BadInput("prompts come as arguments or from --prompts, not both")
    try:
        text = _stdin() if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"--prompts {file}: not a text file (UTF-8)") from error
    except OSError as error:
        raise BadInput(f"--prompts {file}: cannot be read: {first_line(error)}") from error
    # Some editors begin a file with a mark; other separators than newlines belong to a prompt.
    lines = text.removeprefix("\ufeff").split("\n")
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise BadInput(f"--prompts {file}: no prompt in it")
    return prompts


def _stdin() -> str:
    """What stands in stdin, as UTF-8 whatever the locale: like a file."""
    if sys.stdin is None:
        raise BadInput("--prompts -: stdin is closed")
    return sys.stdin.buffer.read().decode("utf-8")


def refuse_file(prompt: str) -> None:
    """Raises `BadInput` for a prompt that is the name of a text file: its lines are meant."""
    if prompt.endswith(".txt") and os.path.isfile(prompt):  # no error where a name is too long
        raise BadInput(f"{prompt} is a file: --prompts {prompt} reads its lines as prompts")


def refuse_broken(text: str, what: str) -> None:
    """Raises `BadInput` for text that came as other bytes than UTF-8: no file could hold it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = text.encode(errors="replace").decode()
        raise BadInput(f"{what} {shown!r} holds bytes that are no UTF-8") from error


def parse_extra(pairs: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` pairs; a value is JSON where it can be read so, else text. Raises `BadInput` for
    a pair without a name, for a name that is not to be set so, for a list or an object that is
    not closed, and for numbers that are none.

    >>> parse_extra(["clip_skip=1", "sigmas=[1.0, 0.5]"])
    {'clip_skip': 1, 'sigmas': [1.0, 0.5]}
    """
    extra: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise BadInput(f"--set {pair}: write it as NAME=VALUE")
        refuse_reserved(name)
        extra[name] = _parsed(pair, value)
    return extra


def _parsed(pair: str, value: str) -> Any:
    def refuse(number: str) -> None:
        raise BadInput(f"--set {pair}: {number} is no finite number")

    try:
        return json.loads(value, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        if value.lstrip().startswith(("[", "{", '"')):
            raise BadInput(f"--set {pair}: the value is no JSON: {first_line(error)}") from error
        return value


def settings_for(
    base: Settings, prompts: Sequence[str], number: int, seed: int | None
) -> list[Settings]:
    """`number` pictures for every prompt, with seeds that count up from `seed` (None: random).
    Every prompt gets the same seeds, so that prompts can be compared."""
    first = random.SystemRandom().randrange(SEEDS) if seed is None else seed
    return [
        replace(base, prompt=prompt, seed=(first + offset) % SEEDS)
        for prompt in (prompts or [base.prompt])
        for offset in range(number)
    ]
