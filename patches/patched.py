"""What is patched on one object: its parts, found again when a component is replaced.

Knows what diffusers calls the components of a pipeline, and which objects share a module. Does not
know how a part is recorded.

Threads: `_lock` comes before the locks of pools. What runs after a call, or when an object dies,
never waits for a lock: its thread may hold others.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from accel.backend import backend_for
from accel.memory import Pool
from accel.patches.part import Options, Part
from accel.patches.schedulers import SyncFreeSchedulers

_COMPILED = "_compiled_call_impl"
_NEVER = ("safety_checker",)
_log = logging.getLogger("accel")

_lock = threading.RLock()
_all: weakref.WeakSet[Patched] = weakref.WeakSet()
_parts: weakref.WeakKeyDictionary[nn.Module, dict[str, weakref.ref[Part]]]
_parts = weakref.WeakKeyDictionary()
"""The part of every patched method of a module: objects that share the module share the part."""
_encoders: weakref.WeakSet[Part] = weakref.WeakSet()
"""Parts that are called for hidden states only."""


class Patched:
    """An object's parts and their options, until `take_off` or the object's death. Does not keep
    the object alive: a part of a pipeline is held, that of a bare module lives with the module.

    >>> layer = nn.Linear(2, 2)
    >>> [part.name for part in Patched(layer, Options()).parts] in ([], ["module"])
    True
    """

    def __init__(self, obj: Any, options: Options) -> None:
        self.options = options
        self._obj = weakref.ref(obj)
        self._targets: dict[str, tuple[weakref.ref[nn.Module], str]] = {}
        self._held: list[Part] = []
        self._components: dict[str, weakref.ref[nn.Module]] = {}
        self._leaving: list[Part] = []
        self._logged = self._is_off = False
        with _lock:
            _all.add(self)
            self.find_parts(take_over=True)
            self._schedulers = SyncFreeSchedulers(obj) if self._targets else None
            if not isinstance(obj, nn.Module):
                weakref.finalize(obj, self.take_off, wait=False).atexit = False

    @property
    def named_parts(self) -> dict[str, Part]:
        """The parts whose modules still live, by the names that the object has for them."""
        found = {name: _part_of(ref(), method) for name, (ref, method) in self._targets.items()}
        return {name: part for name, part in found.items() if part is not None}

    @property
    def parts(self) -> list[Part]:
        """The parts whose modules still live."""
        return list(self.named_parts.values())

    @property
    def had_parts(self) -> bool:
        """Whether anything was patched, even if nothing is left of it."""
        return bool(self._targets)

    @property
    def pools(self) -> list[Pool]:
        """The pools that the parts record into: those of a shared part may be another's."""
        return _pools(part.options for part in self.parts)

    def has(self, module: nn.Module | None) -> bool:
        """Whether a module is one of those patched here."""
        return any(ref() is module for ref, _ in self._targets.values())

    def find_parts(self, take_over: bool = False) -> None:
        """Patches every module that the object has now. A part of those that it no longer has goes
        with its graphs, unless others have it. `take_over`: a part that has other options, because
        it was patched with another object, gets these."""
        obj = self._obj()
        with _lock:
            if obj is None or self._is_off:
                return
            before, components = self.parts, _components(obj)
            for name, (module, method) in (found := _found(obj, self.options)).items():
                self._part(name, module, method, take_over)
            self._targets = {n: (weakref.ref(m), method) for n, (m, method) in found.items()}
            self._components = components
            for patched in list(_all):
                patched._hold()
            leaving = [part for part in before + self._leaving if not _is_wanted(part)]
            self._leaving = [] if _take_off(leaving, wait=take_over) else leaving

    def _has_changed(self) -> bool:
        """Whether components were assigned, or compiled, since they were looked for."""
        obj = self._obj()
        return any(
            getattr(obj, name, None) is not ref() for name, ref in self._components.items()
        ) or any(
            method in ("forward", _COMPILED)
            and (module := ref()) is not None
            and _method(module) != method
            for ref, method in self._targets.values()
        )

    def _part(self, name: str, module: nn.Module, method: str, take_over: bool) -> None:
        known, is_module = _part_of(module, method), module is self._obj()
        is_encoder = "encoder" in name and not is_module
        if known is not None and known.is_on:
            fits = known.options.same_as(self.options) and (known in _encoders or not is_encoder)
            if fits or not take_over:
                if not is_module:  # not "module", as a patch of the module alone calls it
                    known.name = known.report.name = name
                return
            _take_off([known], wait=True)
        after = functools.partial(_look_around, weakref.ref(module))
        part = Part(name, module, method, self.options, after, is_encoder)
        if is_encoder:
            _encoders.add(part)
        _parts.setdefault(module, {})[method] = weakref.ref(part)

    def _hold(self) -> None:
        """A hook older than a patch takes it off the module when it goes; it is put on again."""
        self._held = [] if isinstance(self._obj(), nn.Module) else self.parts

    def take_off(self, wait: bool = True) -> None:
        """Restores modules and schedulers and gives the graphs up. Parts that other patched objects
        share stay, or are made anew with their options. `wait`: for calls in other threads; else
        what they use stays as it is."""
        with _lock:
            if self._is_off:
                return
            self._is_off = True
            _all.discard(self)
            mine = [part for part in self.parts if part.options is self.options]
            _take_off(mine, wait)
            self._held, self._leaving, self._targets = [], [], {}
            if self._schedulers is not None:
                self._schedulers.take_off()
            for patched in list(_all):
                patched.find_parts()

    def look_around(self) -> None:
        """Run after each part's call: a component assigned since is patched, a patch that went
        away with someone's hook is put on again, and that nothing gains is said once."""
        if self._schedulers is not None:
            self._schedulers.refresh()
        if self._leaving or self._has_changed():
            self.find_parts()
        parts = self.parts
        for part in parts:
            if not part.is_on:
                with _idle(part.options.pools.values(), wait=False) as idle:
                    if idle:
                        part.stay_installed()
        if not self._logged and parts and all(part.settled_without_gain for part in parts):
            self._logged = True
            reasons = {part.name: part.report.reasons.most_common(1)[0][0] for part in parts}
            words = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            _log.warning("accel: everything runs eagerly. %s", words)


def _look_around(module: weakref.ref[nn.Module]) -> None:
    """What is run after each call of a patched module. If another thread is at it, that will do."""
    if torch.compiler.is_compiling() or not _lock.acquire(blocking=False):
        return
    try:
        called = module()
        for patched in list(_all):
            if patched.has(called):
                patched.look_around()
    finally:
        _lock.release()


def _part_of(module: nn.Module | None, method: str) -> Part | None:
    ref = _parts.get(module, {}).get(method) if module is not None else None
    return None if ref is None else ref()


def _is_wanted(part: Part) -> bool:
    return any(part is other for patched in _all for other in patched.parts)


def _take_off(parts: list[Part], wait: bool) -> bool:
    """Restores modules, and gives their graphs up; False, and nothing done, if these are in use."""
    with _idle(_pools(part.options for part in parts), wait) as idle:
        for part in parts if idle else []:
            part.take_off()
        if wait:  # else this may be the middle of anything; pools empty themselves when they die
            used = _pools(p.options for patched in _all for p in patched.parts if p.is_on)
            for pool in _pools(part.options for part in parts):
                if pool not in used:
                    pool.retire()
                    pool.close()
        return idle


def _pools(options: Iterable[Options]) -> list[Pool]:
    return list({id(p): p for option in options for p in list(option.pools.values())}.values())


@contextlib.contextmanager
def _idle(pools: Iterable[Pool], wait: bool) -> Iterator[bool]:
    """Keeps other threads from recording into pools and replaying; False if they are at it, and
    this one must not `wait`."""
    with contextlib.ExitStack() as stack:
        for pool in pools:
            if not pool.lock.acquire(blocking=wait):
                yield False
                return
            stack.callback(pool.lock.release)
        yield True


def is_patchable(obj: Any) -> bool:
    """Whether `obj` is a module or something that has components, as pipelines do.

    >>> is_patchable(nn.Linear(2, 2)), is_patchable("a folder")
    (True, False)
    """
    return isinstance(obj, nn.Module) or isinstance(getattr(obj, "components", None), dict)


def _components(obj: Any) -> dict[str, weakref.ref[nn.Module]]:
    components = {} if isinstance(obj, nn.Module) else getattr(obj, "components", {})
    return {n: weakref.ref(c) for n, c in components.items() if isinstance(c, nn.Module)}


def _found(obj: Any, options: Options) -> dict[str, tuple[nn.Module, str]]:
    """Which method of which module is to be patched now, by the component's name."""
    known = _methods(obj, options).items()
    return {name: (module, method) for name, (module, method) in known if _can_ever_record(module)}


def _methods(obj: Any, options: Options) -> dict[str, tuple[nn.Module, str]]:
    if isinstance(obj, nn.Module):
        return {"module": (obj, _method(obj))}
    found: dict[str, tuple[nn.Module, str]] = {}
    for name, component in obj.components.items():
        if not isinstance(component, nn.Module) or name in _NEVER:
            continue
        if hasattr(component, "decode"):
            if options.vae:
                found[name] = (component, "decode")
        elif "encoder" not in name or options.text_encoder:
            for suffix, module in _inner(component):
                found[name + suffix] = (module, _method(module))
    return found


def _method(module: nn.Module) -> str:
    """What calls of a module go through: after `module.compile()` that is the compiled call, and
    `forward` is but what the compiler reads."""
    return "forward" if module._compiled_call_impl is None else _COMPILED


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
