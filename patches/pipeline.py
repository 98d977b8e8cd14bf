"""patch(), unpatch() and report() on a pipeline or a module: what a user calls.

Knows which objects are patched and with what options. Which parts an object has is patched.py's.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, TypeVar

from accel.patches.overview import Report
from accel.patches.part import Capture, Options
from accel.patches.patched import Patched, is_patchable
from accel.reporting import PartReport

T = TypeVar("T")

_patches: weakref.WeakKeyDictionary[Any, Patched] = weakref.WeakKeyDictionary()


def patch(
    obj: T,
    *,
    mode: str = "exact",
    capture: Capture = "auto",
    memory_limit: int | str | None = None,
    text_encoder: bool = True,
    vae: bool = True,
) -> T:
    """Makes a pipeline's denoisers, text encoders and VAE decode run as CUDA graphs, in place, and
    its schedulers' steps without waiting for the device.

    `obj` is a diffusers pipeline, classic or modular, or a module; it is returned. Results stay the
    same bit for bit. Calling it again changes the options. Without CUDA nothing is changed, and
    `report(obj)` says so.

    What matters: `memory_limit`, bytes or a string such as "2GiB", what all graphs together may
    take (default: half of what is free after the first call). To tinker with: `capture`, "auto"
    (record what gains from it) or "always"; `text_encoder`, `vae`: whether these parts take part;
    `mode`, "exact" for now.

    Raises ValueError for an option that does not exist, TypeError for an object that is neither
    pipeline nor module.

    >>> layer = patch(nn.Linear(2, 2))
    >>> print(report(layer))  # doctest: +SKIP
    >>> _ = unpatch(layer)
    """
    if not is_patchable(obj):
        raise TypeError(f"patch() takes a diffusers pipeline or a module, not {type(obj).__name__}")
    if mode != "exact":
        raise ValueError(f'mode={mode!r}: patch() knows mode="exact"')
    options = Options(capture, memory_limit, text_encoder, vae)
    earlier = _patches.get(obj)
    if earlier is not None:
        if earlier.options.same_as(options):
            earlier.find_parts()
            return obj
        unpatch(obj)
    _patches[obj] = Patched(obj, options)
    return obj


def unpatch(obj: T) -> T:
    """Takes off what `patch` put on, exactly, and gives the graphs' memory back; returns `obj`.

    >>> layer = unpatch(patch(nn.Linear(2, 2)))
    >>> "forward" in vars(layer)
    False
    """
    patched = _patches.pop(obj, None)
    if patched is not None:
        patched.take_off()
    return obj


_NO_DEVICE = "no CUDA device: everything runs eagerly"
_GONE = (
    "a hook older than the patch was removed, and took the patch off the module with it: "
    "call accel.patch() again"
)


def report(obj: Any) -> Report:
    """What was captured, replayed, broken and declined on a patched object, and why.

    Raises ValueError if `obj` is not patched.

    >>> layer = patch(nn.Linear(2, 2))
    >>> report(layer).inactive in (None, "no CUDA device: everything runs eagerly")
    True
    """
    patched = _patches.get(obj)
    if patched is None:
        raise ValueError(
            f"this {type(obj).__name__} is not patched: call accel.patch() on it first"
        )
    pools, parts = patched.pools, patched.named_parts.items()
    inactive = None if parts else _GONE if patched.had_parts else _NO_DEVICE
    limits = [pool.limit for pool in pools if pool.limit is not None]
    return Report(
        [_named(name, part.report) for name, part in parts],
        sum(pool.bytes() for pool in pools),
        max(limits, default=None),
        inactive,
    )


def _named(name: str, known: PartReport) -> PartReport:
    """A part's report, under the name that the object has for a part that it shares."""
    return known if known.name == name else replace(known, name=name)
