"""What a recording of a module depends on beyond arguments and weights, seen from outside.

Looks at what is, not at who changes it: hooks, processors, adapters and their scales, attention
backends, training flags, every plain attribute of modules that are not torch's own. Knows
diffusers, PEFT and accelerate only by the names of the attributes that they set.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules import module as torch_module

from accel.modules import all_modules
from accel.patches.attributes import (
    DEPTH,
    HOOKS,
    REGISTRY,
    Kept,
    of_class,
    state_of,
    value_of,
)
from accel.patches.holders import Holders
from accel.patches.watch import Watch, Weights

_FACTS = ("the identity", "the class", "the forward", "the training flag", "the forward hooks")
"""What `state_of` tells of a module before its attributes, in that order."""
_MOVING_HOOKS = {
    "group_offloading": "group offloading is on",
    "lazy_prefetch_group_offloading": "group offloading is on",
    "layerwise_casting": "layerwise casting is on",
}


class StateProbe:
    """A module's state as a value to compare: equal means that a recording still holds.

    >>> layer = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    >>> probe = StateProbe(layer)
    >>> before = probe()
    >>> _ = layer.eval()
    >>> probe() == before
    False
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._state: Any = None
        self._watch: Watch | None = None
        self._vetoed: tuple[Watch | None, str | None] = None, None

    def __call__(self) -> Any:
        try:
            return self._read()
        except Exception as error:  # of code of the user's: an object that answers no questions
            self._watch = None
            return Unreadable(error)

    def _read(self) -> Any:
        module = self._module()
        if module is None:
            return None
        if self._watch is None or not self._watch.untouched():
            holders = Holders(all_modules(module))
            self._state, self._watch = _State(holders), Watch(holders)
        return Seen(_surroundings(), self._state)

    def remember(self) -> Callable[[], None]:
        """What is to be called to make the module's attributes again what they were when the probe
        was called last.

        >>> class Counting(nn.Module):
        ...     calls = 0
        >>> counting = Counting()
        >>> probe = StateProbe(counting)
        >>> _ = probe()
        >>> put_back = probe.remember()
        >>> counting.calls = 1
        >>> put_back()
        >>> counting.calls
        0
        """
        watch = self._watch
        if watch is None:
            return lambda: None
        weights = Weights(watch.modules)

        def put_back() -> None:
            watch.put_back()
            weights.put_back()

        return put_back

    def veto(self, seen: Seen | Unreadable | None = None) -> str | None:
        """Why nothing may be recorded just now, in words; None if nothing speaks against it. What
        the probe has just `seen` spares another look."""
        if isinstance(seen, Unreadable):
            return seen.reason
        try:
            return self._vetoed_for(seen)
        except Exception as error:
            return Unreadable(error).reason

    def _vetoed_for(self, seen: Seen | None) -> str | None:
        module = self._module()
        if module is None:
            return "the module is gone"
        watch = self._watch
        if watch is None or (seen is None and not watch.untouched()):
            return _veto(all_modules(module))
        if self._vetoed[0] is not watch:  # as long as nothing is touched, the answer is the same
            self._vetoed = watch, _veto(watch.modules)
        return self._vetoed[1]


class Unreadable:
    """In place of a state that could not be read, because of an error: equal to nothing.

    >>> unreadable = Unreadable(ValueError("ask me not"))
    >>> unreadable == unreadable, unreadable.reason
    (False, "the module's state cannot be read: ValueError: ask me not")
    """

    def __init__(self, error: Exception) -> None:
        line = str(error).partition("\n")[0]
        self.reason = f"the module's state cannot be read: {type(error).__name__}: {line}"

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]

    def difference(self, before: object) -> str:
        """What changed since, in words."""
        return self.reason


class Seen(NamedTuple):
    """What a probe saw: equal values mean that a recording still holds.

    >>> layer = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    >>> probe = StateProbe(layer)
    >>> before = probe()
    >>> _ = layer[1].train(False)
    >>> probe().difference(before)
    'the training flag of 1'
    """

    surroundings: Any
    state: _State

    def difference(self, before: Seen) -> str:
        """What changed since, in words."""
        if self.surroundings != before.surroundings:
            return "what is set for the whole process: global hooks, attention backend or function"
        return self.state.difference(before.state)


class _State:
    """The modules' states as values. What they name by identity is kept alive, so that no new
    object can take an old one's place and pass for it."""

    def __init__(self, holders: Holders) -> None:
        self._holders, self._kept = holders, Kept(holders.modules)
        self.values: list[Any] = [state_of(module, self._kept) for module in holders.modules]
        for helper in holders.helpers:
            self._kept.append(helper)
            self.values.append((type(helper), value_of(vars(helper), DEPTH, self._kept)))
        self._of_classes = [of_class(kind, self._kept) for kind in holders.classes]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _State) and self._compared() == other._compared()

    def _compared(self) -> tuple[Any, ...]:
        classes, globals_ = self._holders.classes, self._holders.globals.values
        return self.values, classes, self._of_classes, globals_

    __hash__ = None  # type: ignore[assignment]

    def difference(self, before: _State) -> str:
        """The first thing that is not what it was, in words."""
        modules = self._holders.modules
        if list(map(id, modules)) != list(map(id, before._holders.modules)):
            return "modules were added, removed or replaced"
        names = {id(child): name for name, child in modules[0].named_modules()}
        things = [*modules, *self._holders.helpers]
        for thing, now, was in zip(things, self.values, before.values, strict=False):
            if now != was:
                beside = f"a {type(thing).__name__} that modules or their functions share"
                name = names.get(id(thing), beside) or "the module itself"
                return f"{_difference(now, was)} of {name}"
        if self._of_classes != before._of_classes:
            return "a method or an attribute of a class"
        globals_, earlier = self._holders.globals.values, before._holders.globals.values
        others = [n for n in earlier | globals_ if earlier.get(n) != globals_.get(n)]
        return f"a global, {others[0][1]}" if others else "the objects that modules share"


def _difference(now: tuple[Any, ...], was: tuple[Any, ...]) -> str:
    """What differs between two of `state_of`, or of an object's class and attributes, in words."""
    *facts, own = now
    if len(facts) > 1:
        for what, fact, earlier in zip(_FACTS, facts, was, strict=False):
            if fact != earlier:
                return what
    before, after = dict(was[-1]), dict(own)
    found = [k for k in after | before if before.get(k, ...) != after.get(k, ...)]
    return f"attribute {found[0]!r}" if found else "the order of attributes"


def _hooks(module: nn.Module, name: str) -> Iterable[Any]:
    hooks = module.__dict__.get(name, {})
    return () if name.endswith("_with_kwargs") else list(hooks.values())


def _is_users(hook: Any) -> bool:
    """Libraries' own hooks only hand tensors on, and ours; what a user's does, no one knows."""
    room = getattr(hook, "__module__", None) or type(hook).__module__
    known = "torch.", "transformers.", "diffusers.", "peft.", "accelerate.", "accel."
    return not room.startswith(known)


def _veto(modules: list[nn.Module]) -> str | None:
    if len(set(getattr(modules[0], "hf_device_map", {}).values())) > 1:
        return "device_map spreads the module over several devices"
    hooks = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
    if any(_is_users(hook) for box in hooks for hook in list(box.values())):
        return "a forward hook on all modules would not run in a replay"
    reasons = (_veto_of(module, module is modules[0]) for module in modules)
    return next((reason for reason in reasons if reason is not None), None)


def _veto_of(module: nn.Module, is_root: bool) -> str | None:
    attributes = module.__dict__
    hooked = not is_root and any(map(attributes.get, HOOKS))  # asked of thousands: in C
    if hooked and any(_is_users(hook) for name in HOOKS for hook in _hooks(module, name)):
        return f"a forward hook inside, on a {type(module).__name__}, would not run in a replay"
    hook = attributes.get("_hf_hook")
    if hook is not None and getattr(hook, "offload", type(hook).__name__ == "CpuOffload"):
        return "CPU offload moves the weights around every call"
    registry = attributes.get(REGISTRY)
    kept = {} if registry is None else getattr(registry, "hooks", {})
    for name, registered in kept.copy().items():
        if name in _MOVING_HOOKS:
            return _MOVING_HOOKS[name]
        if getattr(registered, "_is_stateful", False):
            return f"a cache ({name}) decides on the host what each step computes"
    return None


def _surroundings() -> Any:
    """What is set for the whole process and changes what a module computes: hooks on all modules,
    the attention function (some put another in its place), and diffusers' default backend, which
    its context manager sets too."""
    hooks = (*torch_module._global_forward_hooks, *torch_module._global_forward_pre_hooks)
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    registry = getattr(dispatch, "_AttentionBackendRegistry", None)
    backend = getattr(registry, "_active_backend", None)
    return hooks, nn.functional.scaled_dot_product_attention, backend
