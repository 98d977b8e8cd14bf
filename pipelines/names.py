"""Names out of a list: one that is not in it is answered with the nearest that is.

This module knows words only, and imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from accel.pipelines.errors import BadInput

_ALIASES = {"gpu": "cuda"}
"""What people call a thing whose name here is spelt otherwise: by letters another would be near."""


def instead(name: str, known: Iterable[str], otherwise: str) -> str:
    """Which of the `known` names may be meant by `name`; `otherwise` where none is near.

    >>> instead("sd16", ["sd15", "sdxl"], "the zoo has sd15, sdxl")
    'did you mean sd15?'
    """
    names, wanted = [*known], name.lower()
    alias = _ALIASES.get(wanted)
    near = [alias] if alias in names else get_close_matches(wanted, names, n=3)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def refuse_unknown(option: str, name: str, known: Iterable[str]) -> None:
    """Raises `BadInput` unless `name`, which `option` gave, is one of the `known`.

    >>> refuse_unknown("--mode", "warp", ["exact", "off"])
    Traceback (most recent call last):
    ...
    accel.pipelines.errors.BadInput: --mode warp: choose from exact, off
    """
    names = [*known]
    if name not in names:
        choice = f"choose from {', '.join(names)}"
        raise BadInput(f"{option} {name}: {instead(name, names, choice)}")
