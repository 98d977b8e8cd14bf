"""Whether anything can be recorded where a command runs, and the one line that says so if not.

This module knows devices and words; patching is `accel.patches`' matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.pipelines.console import note

if TYPE_CHECKING:
    import torch


def missing(device: torch.device) -> str | None:
    """Why nothing is accelerated on `device`, and what changes that; None where graphs can be
    recorded."""
    import torch

    from accel.backend import backend_for

    if backend_for(device) is not None:
        return None
    if torch.cuda.is_available():
        return f"it runs on the {device.type}; --device cuda takes the GPU"
    return "no CUDA GPU here, so everything runs eagerly; accel doctor says more"


def tell_missing(device: torch.device, still: str | None = None) -> None:
    """Says on stderr why nothing is accelerated on `device`, and what is done `still`; silent where
    graphs can be recorded."""
    why = missing(device)
    if why is not None:
        note(f"nothing is accelerated: {why}" + (f"; {still}" if still else ""))
