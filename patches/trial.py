"""Trials: does one function compute what another does, on the host, in two precisions?

Knows how near two results have to be, and that nobody may see the trial. Does not know what is
tried (norms.py, rotary.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps}
"""Differences, of numbers near one, that another order of sums and roundings explains."""


@contextlib.contextmanager
def out_of_sight() -> Iterator[None]:
    """While open, no recorder sees what is tried: it would take it for a part of the forward.

    >>> with out_of_sight():
    ...     torch.is_grad_enabled()
    False
    """
    with _disable_current_modes(), torch.no_grad():
        yield
