"""Whether the model hub can be asked: said at once, and known within seconds.

This module knows the hub's client and its one question; downloading is `models`' and `loading`'s
matter. Importing it brings in nothing heavy.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from accel.pipelines.console import note
from accel.pipelines.errors import AccelError, BadInput, first_line

PATIENCE = 8.0
"""Seconds after which a hub counts as out of reach: its client alone would try for half a minute,
address by address."""


def unreachable(name: str, option: str) -> str | None:
    """Why the hub cannot be asked for `name`, in words; None if it has that repository. What is
    looked up is said first, and `option` is what named it. Raises `BadInput` if the hub knows no
    such repository."""
    from huggingface_hub import constants

    note(f"{option} {name}: no such folder here, looking on the hub")
    failures: list[Exception] = []
    # The client bounds each attempt, not their sum, and finding the address not at all.
    asking = threading.Thread(target=_ask, args=(name, failures), daemon=True)
    asking.start()
    asking.join(PATIENCE)
    where = f"the hub ({constants.ENDPOINT})"
    if asking.is_alive():
        return f"{where} did not answer within {PATIENCE:.0f} s"
    if not failures:
        return None
    if _is_a_refusal(failures[0]):
        raise BadInput(
            f"{option} {name}: neither on disk nor on {where}, or not for everyone (then log in "
            "with hf auth login); check the spelling or give a folder"
        ) from failures[0]
    return f"{where} cannot be reached: {first_line(failures[0])}"


def fetched(
    name: str, option: str, download: Callable[[bool], Path], unreachable: str | None
) -> Path:
    """What `download` gets of `name`: with True from the cache alone, as where the hub is
    `unreachable`. Raises `BadInput` in one line where there is nothing to be had."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        return download(unreachable is not None)
    except AccelError:
        raise
    except Exception as error:  # the hub, its client and the libraries raise a dozen types
        if unreachable is not None:
            raise missing(name, option, unreachable) from error
        raise BadInput(
            f"no folder {name} here, and the hub did not give that model: {first_line(error)}"
        ) from error


def tell_cached(name: str, reason: str | None) -> None:
    """Says that `name` comes from the hub's cache, unasked, if the hub is out of reach."""
    if reason is not None:
        note(f"{reason}; taking {name} from the cache")


def missing(name: str, option: str, reason: str) -> BadInput:
    """The error for what is neither on disk nor in the cache while the hub is out of reach."""
    return BadInput(
        f"{option} {name}: neither on disk ({Path.cwd() / name}) nor in the hub's cache, and "
        f"{reason}; give a folder, or download it where there is a network"
    )


def _ask(name: str, failures: list[Exception]) -> None:
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(name, timeout=PATIENCE)
    except Exception as error:  # the client's own, those of two HTTP libraries, and the system's
        failures.append(error)


def _is_a_refusal(error: Exception) -> bool:
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    return isinstance(error, HFValidationError | RepositoryNotFoundError)
