"""What is patched on one object: its parts, found again when a component is replaced.

Knows what diffusers calls the components of a pipeline. Does not know how a part is recorded.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import nn

from accel.backend import backend_for
from accel.patches.part import Options, Part
from accel.patches.schedulers import SyncFreeSchedulers

_NEVER = ("safety_checker",)
_log = logging.getLogger("accel")

_parts: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Part]] = weakref.WeakKeyDictionary()
"""The part of every patched module: a module that several pipelines share has one."""


class Patched:
    """An object's parts and their options. Does not keep the object alive: a part of a pipeline is
    held, that of a bare module lives with the module.

    >>> layer = nn.Linear(2, 2)
    >>> [part.name for part in Patched(layer, Options()).parts] in ([], ["module"])
    True
    """

    def __init__(self, obj: Any, options: Options) -> None:
        self.options = options
        self._obj = weakref.ref(obj)
        self._parts: list[weakref.ref[Part]] = []
        self._held: list[Part] = []
        self._components: dict[str, weakref.ref[nn.Module]] = {}
        self._logged = False
        self.find_parts()
        self._schedulers = SyncFreeSchedulers(obj) if self._parts else None

    @property
    def parts(self) -> list[Part]:
        """The parts whose modules still live."""
        return [part for ref in self._parts if (part := ref()) is not None]

    def find_parts(self) -> None:
        """Patches every module that the object has now; those it no longer has are left alone."""
        obj = self._obj()
        if obj is None:
            return
        self._components = _components(obj)
        parts = [
            self._part(name, module, method)
            for name, (module, method) in _methods(obj, self.options).items()
            if _can_ever_record(module)
        ]
        self._parts = [weakref.ref(part) for part in parts]
        # A hook older than a patch takes it off the module when it goes; it is put on again.
        self._held = [] if isinstance(obj, nn.Module) else parts

    def _part(self, name: str, module: nn.Module, method: str) -> Part:
        known = _parts[module]() if module in _parts else None
        if known is None or not known.is_on:
            is_encoder = "encoder" in name
            known = Part(name, module, method, self.options, self.look_around, is_encoder)
            _parts[module] = weakref.ref(known)
        return known

    def take_off(self, shared: list[Part]) -> None:
        """Restores the modules and schedulers, except parts that others share."""
        for part in self.parts:
            if part not in shared:
                part.take_off()
        if self._schedulers is not None:
            self._schedulers.take_off()

    def look_around(self) -> None:
        """Run after each part's call: a component assigned since is patched, a patch that went
        away with someone's hook is put on again, and that nothing gains is said once."""
        obj = self._obj()
        if self._schedulers is not None:
            self._schedulers.refresh()
        for name, module in self._components.items():
            if getattr(obj, name, None) is not module():
                self.find_parts()
                break
        parts = self.parts
        for part in parts:
            part.stay_installed()
        if not self._logged and parts and all(part.settled_without_gain for part in parts):
            self._logged = True
            reasons = {part.name: part.report.reasons.most_common(1)[0][0] for part in parts}
            words = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            _log.warning("accel: everything runs eagerly. %s", words)


def is_patchable(obj: Any) -> bool:
    """Whether `obj` is a module or something that has components, as pipelines do.

    >>> is_patchable(nn.Linear(2, 2)), is_patchable("a folder")
    (True, False)
    """
    return isinstance(obj, nn.Module) or isinstance(getattr(obj, "components", None), dict)


def _components(obj: Any) -> dict[str, weakref.ref[nn.Module]]:
    components = {} if isinstance(obj, nn.Module) else getattr(obj, "components", {})
    return {n: weakref.ref(c) for n, c in components.items() if isinstance(c, nn.Module)}


def _methods(obj: Any, options: Options) -> dict[str, tuple[nn.Module, str]]:
    """Which method of which module is patched, by the component's name."""
    if isinstance(obj, nn.Module):
        return {"module": (obj, "forward")}
    found: dict[str, tuple[nn.Module, str]] = {}
    for name, component in obj.components.items():
        if not isinstance(component, nn.Module) or name in _NEVER:
            continue
        if hasattr(component, "decode"):
            if options.vae:
                found[name] = (component, "decode")
        elif "encoder" not in name or options.text_encoder:
            for suffix, module in _inner(component):
                found[name + suffix] = (module, "forward")
    return found


def _inner(component: nn.Module) -> list[tuple[str, nn.Module]]:
    """Several ControlNets in one are patched one by one: their loop is host work."""
    nets = getattr(component, "nets", None)
    if isinstance(nets, nn.ModuleList):
        return [(f"[{i}]", net) for i, net in enumerate(nets)]
    return [("", component)]


def _can_ever_record(module: nn.Module) -> bool:
    """CUDA is there, or the module already is on a device that can record."""
    first = next(module.parameters(), None)
    return torch.cuda.is_available() or (
        first is not None and backend_for(first.device) is not None
    )
