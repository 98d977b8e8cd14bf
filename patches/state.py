"""What a recording of a module depends on beyond arguments and weights, seen from outside.

Looks at what is, not at who changes it: hooks, processors, adapters and their scales, attention
backends, training flags, every plain attribute of modules that are not torch's own. Knows
diffusers, PEFT and accelerate only by the names of the attributes that they set.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from accel.guard import all_modules
from accel.patches.forward import PatchedMethod
from accel.signature import identities

_OF_TORCH = frozenset(nn.Module().__dict__) - {"training"}
_REGISTRY = "_diffusers_hook"
"""Where diffusers keeps a module's hooks. An empty one, left by a pipeline, is as good as none."""
_TENSORS_AND_LAYERS = ("_parameters", "_buffers", "_modules")
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)
_FACTS = ("the identity", "the class", "the forward", "the training flag", "the forward hooks")
"""What `_state_of` tells of a module before its attributes, in that order."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
_COMMON = frozenset((bool, int, str, type(None)))
_BOXES = (list, dict, set, tuple, deque, bytearray)
_KEPT_BOXES = (list, dict, set, deque)
_DEPTH = 8
_HELPER_DEPTH = 3
_SMALL_ARRAY = 4096
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
        self._watch: _Watch | None = None

    def __call__(self) -> Any:
        module = self._module()
        if module is None:
            return None
        if self._watch is None or not self._watch.untouched():
            modules = all_modules(module)
            self._state, self._watch = _State(modules), _Watch(modules)
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
        weights = _Weights(watch.modules)

        def put_back() -> None:
            watch.put_back()
            weights.put_back()

        return put_back

    def veto(self) -> str | None:
        """Why nothing may be recorded just now, in words; None if nothing speaks against it."""
        module = self._module()
        if module is None:
            return "the module is gone"
        if len(set(getattr(module, "hf_device_map", {}).values())) > 1:
            return "device_map spreads the module over several devices"
        for child in all_modules(module):
            if (reason := _veto_of(child, child is module)) is not None:
                return reason
        return None


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

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules, self._kept = modules, list[Any](modules)
        self.values: list[Any] = [_state_of(module, self._kept) for module in modules]
        for helper in _helpers(_of_others(modules)):
            self._kept.append(helper)
            self.values.append((type(helper), _value(vars(helper), _DEPTH, self._kept)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _State) and self.values == other.values

    __hash__ = None  # type: ignore[assignment]

    def difference(self, before: _State) -> str:
        """The first thing that is not what it was, in words."""
        if list(map(id, self._modules)) != list(map(id, before._modules)):
            return "modules were added, removed or replaced"
        names = {child: name for name, child in self._modules[0].named_modules()}
        for module, now, was in zip(self._modules, self.values, before.values, strict=False):
            if now != was:
                name = names.get(module) or "the module itself"
                return f"{_difference(now, was)} of {name}"
        return "an object that modules share: a processor, a configuration, a controller"


def _difference(now: tuple[Any, ...], was: tuple[Any, ...]) -> str:
    """What differs between two of `_state_of`, in words."""
    *facts, own = now
    for what, fact, earlier in zip(_FACTS, facts, was, strict=False):
        if fact != earlier:
            return what
    before, after = dict(was[-1]), dict(own)
    found = [k for k in after | before if before.get(k, ...) != after.get(k, ...)]
    return f"attribute {found[0]!r}" if found else "the order of attributes"


def _state_of(module: nn.Module, kept: list[Any]) -> tuple[Any, ...]:
    attributes = module.__dict__
    hooks = [hook for name in _HOOKS for hook in list(attributes.get(name, {}).values())]
    kept.extend(hooks)
    depth = 1 if type(module).__module__.startswith("torch.") else _DEPTH
    names = [name for name in list(attributes) if name not in _OF_TORCH and name != _REGISTRY]
    own = tuple((name, _value(attributes.get(name), depth, kept)) for name in names)
    own += ((_REGISTRY, _hooks_of_registry(attributes.get(_REGISTRY), kept) or ()),)
    kind = type(module)
    return id(module), kind, kind.forward, attributes.get("training"), tuple(map(id, hooks)), own


def _of_others(modules: list[nn.Module]) -> list[dict[str, Any]]:
    """The attributes of the modules that are not torch's own."""
    return [m.__dict__ for m in modules if not type(m).__module__.startswith("torch.")]


class _Watch:
    """Where `_state_of` looks, as it is now: a quick test that nothing there was touched, and the
    means to put everything back."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self._torchs = [m.__dict__ for m in modules if type(m).__module__.startswith("torch.")]
        owns = _of_others(modules)
        self._helpers = _helpers(owns)
        owns += [vars(x) for x in self._helpers]
        self._owns = [(own, dict(own)) for own in owns]
        hooks = [m.__dict__.get(name) for m in modules for name in _HOOKS]
        self._hooks = [box for box in hooks if box is not None]
        self._registries = [r for d in owns if (r := d.get(_REGISTRY)) is not None]
        found = [item for _, own in self._owns for item in own.items()]
        self._boxes = [x for name, x in found if _is_box(x) and name not in _OF_TORCH]
        own = [m.__dict__[k] for m in modules for k in _TENSORS_AND_LAYERS]
        self._insides = [(box, copy.copy(box)) for box in (*own, *_containers(self._boxes))]
        # Settings of torch's layers: a convolution's padding mode, a norm's epsilon.
        items = [(own, name, x) for own in self._torchs for name, x in list(own.items())]
        settings = [item for item in items if item[1] not in _OF_TORCH]
        self._settings = tuple(zip(*settings, strict=True)) if settings else ((), (), ())
        self._children = [m._modules for m in modules]
        self._kinds = set(map(type, modules))
        self._seen = self._look()

    def _look(self) -> tuple[Any, ...]:
        seen: list[Any] = []  # what is watched is held by its owner, or was replaced: then it shows
        return (
            list(map(len, self._torchs)),
            [attributes.get("training") for attributes in self._torchs],
            list(map(type, self.modules)),
            list(map(type, self._helpers)),
            [getattr(kind, "forward", None) for kind in self._kinds],
            [tuple(hook) for hook in self._hooks if hook],
            [_hooks_of_registry(registry, seen) for registry in self._registries],
            [_value(box, _DEPTH, seen) for box in self._boxes],
            [tuple(map(id, family.values())) for family in self._children if family],
        )

    def untouched(self) -> bool:
        """Whether no object was replaced, no container changed. It may err on the side of no; then
        the state is read again."""
        layers, names, set_to = self._settings
        return (
            all(
                len(own) == len(was) and all(map(operator.is_, own.values(), was.values()))
                for own, was in self._owns
            )
            and all(map(operator.is_, map(dict.get, layers, names), set_to))
            and self._look() == self._seen
        )

    def put_back(self) -> None:
        """Makes attributes, and containers in them, what they were: a call that did not count has
        changed them, and is going to be made again."""
        for box, before in [*self._owns, *self._insides]:
            if identities(box) != identities(before):
                if _patches_in(box) != _patches_in(before):  # patched or unpatched meanwhile
                    before = _plain(before) | _patches_in(box)
                box.clear()
                (box.extend if isinstance(box, (list, deque)) else box.update)(before)
        for layer, name, setting in zip(*self._settings, strict=True):
            now = layer.get(name)
            if now is not setting and not isinstance(now or setting, PatchedMethod):
                layer[name] = setting


class _Weights:
    """Where weights lie and what hangs on them (a quantizer's scales, until the first call)."""

    def __init__(self, modules: list[nn.Module]) -> None:
        found = [x for m in modules for x in (*m._parameters.values(), *m._buffers.values())]
        self._weights = [(x, x.data, dict(vars(x))) for x in found if x is not None]

    def put_back(self) -> None:
        for weight, data, own in self._weights:
            if identities(vars(weight)) != identities(own):
                vars(weight).clear()
                vars(weight).update(own)
            if weight.data_ptr() != data.data_ptr():
                weight.data = data


def _patches_in(box: Any) -> dict[str, Any]:
    named = list(box.items()) if isinstance(box, dict) else []
    return {name: x for name, x in named if isinstance(x, PatchedMethod)}


def _plain(box: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in box.items() if not isinstance(x, PatchedMethod)}


def _containers(boxes: Iterable[Any], depth: int = _DEPTH) -> list[Any]:
    """The lists, dicts and sets among `boxes` and in them, each once."""
    found: dict[int, Any] = {}
    level = list(boxes)
    for _ in range(depth):
        news = {id(x): x for x in level if isinstance(x, _KEPT_BOXES) and id(x) not in found}
        found |= news
        inside = (x.values() if isinstance(x, dict) else x for x in news.values())
        level = list(itertools.chain.from_iterable(inside))
    return list(found.values())


def _is_box(x: Any) -> bool:
    """Whether `x` can change and stay the same object."""
    return isinstance(x, (*_BOXES, torch.Tensor)) or type(x).__name__ == "ndarray"


def _value(x: Any, depth: int, kept: list[Any]) -> Any:
    """Plain values and containers by value, all else by identity (and `kept`)."""
    if type(x) in _COMMON:
        return x
    if isinstance(x, float):  # not 2 for 2.0, which gives another dtype, nor 0 for -0
        return x.hex()
    if isinstance(x, _PLAIN):
        return x
    if depth and isinstance(x, (list, tuple, deque)):
        return tuple(_value(item, depth - 1, kept) for item in list(x))
    if isinstance(x, bytearray):
        return bytes(x)
    if depth and isinstance(x, dict):
        return tuple((key, _value(item, depth - 1, kept)) for key, item in list(x.items()))
    if depth and isinstance(x, (set, frozenset)):
        return frozenset(_value(item, 0, kept) for item in list(x))
    if (hooks := _hooks_of_registry(x, kept)) is not None:
        return hooks
    kept.append(x)
    if isinstance(x, torch.Tensor):  # what lies on the host, Python may have read
        own = id(x), x._version if x.is_cpu and not x.is_inference() else 0
        # Others (quantized tables) carry tensors and settings of their own.
        return own if type(x) in _PLAIN_TENSORS else (own, _value(vars(x), depth, kept))
    if type(x).__name__ == "ndarray" and x.nbytes <= _SMALL_ARRAY:
        return id(x), x.tobytes()
    return id(x)


def _helpers(attributes: list[dict[str, Any]]) -> list[Any]:
    """Objects among attributes that are no modules but carry settings (attention processors,
    configurations, controllers), each once, and those that they have in turn."""
    found: dict[int, Any] = {}
    level = attributes
    for _ in range(_HELPER_DEPTH):
        news = {
            id(x): x
            for own in level
            for name, value in list(own.items())
            if name not in _OF_TORCH
            for x in _inside(value)
            if _is_helper(x) and id(x) not in found
        }
        found |= news
        level = [vars(x) for x in news.values()]
    return list(found.values())


def _inside(x: Any, depth: int = _HELPER_DEPTH) -> Iterable[Any]:
    """What is in a container and in those in it; anything else is in itself."""
    if type(x) not in (list, tuple, dict, deque) or not depth:
        return (x,)
    items = list(x.values() if type(x) is dict else x)
    return itertools.chain.from_iterable(_inside(item, depth - 1) for item in items)


def _is_helper(x: Any) -> bool:
    kind = type(x)
    if kind not in _helper_kinds:
        whole = (
            torch.Tensor,
            nn.Module,
            type,
            types.ModuleType,
            types.FunctionType,
            functools.partial,
        )
        _helper_kinds[kind] = (
            isinstance(getattr(x, "__dict__", None), dict)
            and not isinstance(x, (*whole, types.MethodType, PatchedMethod))
            and kind.__name__ != "HookRegistry"
        )
    return _helper_kinds[kind]


_helper_kinds: dict[type, bool] = {}


def _hooks_of_registry(x: Any, kept: list[Any]) -> tuple[Any, ...] | None:
    """The hooks in a diffusers registry. An empty one, which `cache_context` leaves behind, is as
    good as none."""
    hooks = getattr(x, "hooks", None)
    if type(x).__name__ != "HookRegistry" or not isinstance(hooks, dict):
        return None
    kept.extend(hooks.values())
    return tuple((name, id(hook)) for name, hook in list(hooks.items()))


def _hooks(module: nn.Module, name: str) -> Iterable[Any]:
    hooks = module.__dict__.get(name, {})
    return () if name.endswith("_with_kwargs") else list(hooks.values())


def _is_users(hook: Any) -> bool:
    """Libraries' own hooks only hand tensors on; what a user's does, no one knows."""
    room = getattr(hook, "__module__", None) or type(hook).__module__
    return not room.startswith(("torch.", "transformers.", "diffusers.", "peft.", "accelerate."))


def _veto_of(module: nn.Module, is_root: bool) -> str | None:
    attributes = module.__dict__
    hooked = not is_root and any(map(attributes.get, _HOOKS))  # asked of thousands: in C
    if hooked and any(_is_users(hook) for name in _HOOKS for hook in _hooks(module, name)):
        return f"a forward hook inside, on a {type(module).__name__}, would not run in a replay"
    hook = attributes.get("_hf_hook")
    if hook is not None and getattr(hook, "offload", type(hook).__name__ == "CpuOffload"):
        return "CPU offload moves the weights around every call"
    registry = attributes.get(_REGISTRY)
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
