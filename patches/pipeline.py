"""patch(), unpatch() and report() on a pipeline or a module: which parts, in which order.

Knows what diffusers calls the components of a pipeline. It does not know how a part is recorded.
"""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

import torch
from torch import nn

from accel.backend import backend_for
from accel.memory import bytes_from
from accel.patches.part import Capture, Options, Part
from accel.reporting import Report

T = TypeVar("T")

_NEVER = ("safety_checker",)


class _Patch:
    """What is patched on one object: its parts and their options. A part lives with its module."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._parts: list[weakref.ref[Part]] = []

    def add(self, part: Part) -> None:
        self._parts.append(weakref.ref(part))

    @property
    def parts(self) -> list[Part]:
        return [part for ref in self._parts if (part := ref()) is not None]


_patches: weakref.WeakKeyDictionary[Any, _Patch] = weakref.WeakKeyDictionary()
_parts: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Part]] = weakref.WeakKeyDictionary()


def patch(
    obj: T,
    *,
    mode: str = "exact",
    capture: Capture = "auto",
    memory_limit: int | str | None = None,
    text_encoder: bool = True,
    vae: bool = True,
) -> T:
    """Makes a pipeline's denoisers, text encoders and VAE decode run as CUDA graphs, in place.

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
    if mode != "exact":
        raise ValueError(f'mode={mode!r}: patch() knows mode="exact"')
    if capture not in ("auto", "always"):
        raise ValueError(f'capture={capture!r}: patch() knows capture="auto" and "always"')
    if memory_limit is not None:
        bytes_from(memory_limit)
    found = _methods(obj, text_encoder, vae)
    patched = _Patch(Options(capture, memory_limit, text_encoder, vae))
    earlier = _patches.get(obj)
    if earlier is not None:
        if _same(earlier.options, patched.options):
            patched.options = earlier.options
        else:
            unpatch(obj)
    for name, (module, method) in found.items():
        if _can_ever_record(module):
            patched.add(_part(name, module, method, patched.options))
    _patches[obj] = patched
    return obj


def unpatch(obj: T) -> T:
    """Takes off what `patch` put on, exactly, and gives the graphs' memory back; returns `obj`.

    >>> layer = unpatch(patch(nn.Linear(2, 2)))
    >>> "forward" in vars(layer)
    False
    """
    patched = _patches.pop(obj, None)
    if patched is None:
        return obj
    for part in patched.parts:
        if not any(part in other.parts for other in _patches.values()):
            part.take_off()
            _parts.pop(part.module, None)
    if not any(patched.options is other.options for other in _patches.values()):
        for pool in patched.options.pools.values():
            pool.retire()
            pool.close()
    return obj


def report(obj: Any) -> Report:
    """What was captured, replayed, broken and declined on a patched object, and why.

    Raises ValueError if `obj` is not patched.

    >>> layer = patch(nn.Linear(2, 2))
    >>> report(layer).inactive is None or report(layer).inactive
    'no CUDA device: everything runs eagerly'
    """
    patched = _patches.get(obj)
    if patched is None:
        raise ValueError(
            f"this {type(obj).__name__} is not patched: call accel.patch() on it first"
        )
    pools = patched.options.pools.values()
    parts = [part.report for part in patched.parts]
    inactive = None if parts else "no CUDA device: everything runs eagerly"
    limits = [pool.limit for pool in pools if pool.limit is not None]
    return Report(parts, sum(p.bytes() for p in pools), max(limits, default=None), inactive)


def _methods(obj: Any, text_encoder: bool, vae: bool) -> dict[str, tuple[nn.Module, str]]:
    """Which method of which module is patched, by the component's name."""
    if isinstance(obj, nn.Module):
        return {"module": (obj, "forward")}
    components = getattr(obj, "components", None)
    if not isinstance(components, dict):
        raise TypeError(f"patch() takes a diffusers pipeline or a module, not {type(obj).__name__}")
    found: dict[str, tuple[nn.Module, str]] = {}
    for name, component in components.items():
        if not isinstance(component, nn.Module) or name in _NEVER:
            continue
        if hasattr(component, "decode"):
            if vae:
                found[name] = (component, "decode")
        elif "encoder" not in name or text_encoder:
            for suffix, module in _inner(component):
                found[name + suffix] = (module, "forward")
    return found


def _inner(component: nn.Module) -> list[tuple[str, nn.Module]]:
    """Several ControlNets in one are patched one by one: their loop is host work."""
    nets = getattr(component, "nets", None)
    if isinstance(nets, nn.ModuleList):
        return [(f"[{i}]", net) for i, net in enumerate(nets)]
    return [("", component)]


def _part(name: str, module: nn.Module, method: str, options: Options) -> Part:
    """The module's part: a module that several pipelines share has one."""
    known = _parts[module]() if module in _parts else None
    if known is None:
        known = Part(name, module, method, options)
        _parts[module] = weakref.ref(known)
    return known


def _can_ever_record(module: nn.Module) -> bool:
    """CUDA is there, or the module already is on a device that can record."""
    first = next(module.parameters(), None)
    return torch.cuda.is_available() or (
        first is not None and backend_for(first.device) is not None
    )


def _same(a: Options, b: Options) -> bool:
    return (a.capture, a.memory_limit, a.text_encoder, a.vae) == (
        b.capture,
        b.memory_limit,
        b.text_encoder,
        b.vae,
    )
