"""What a recording of a module depends on beyond arguments and weights, seen from outside.

Looks at what is, not at who changes it: hooks, processors, adapters and their scales, attention
backends, training flags, every plain attribute of modules that are not torch's own. Knows
diffusers, PEFT and accelerate only by the names of the attributes that they set.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from accel.patches.forward import PatchedMethod

_OF_TORCH = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_COMMON = frozenset((bool, int, str, type(None)))
_BOXES = (list, dict, set, tuple)
_DEPTH = 4
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
        self._untouched: Callable[[], bool] = lambda: False

    def __call__(self) -> Any:
        module = self._module()
        if module is None:
            return None
        if not self._untouched():
            modules = list(module.modules())
            self._state = _State(modules)
            self._untouched = _watch(modules)
        return _surroundings(), self._state

    def veto(self) -> str | None:
        """Why nothing may be recorded just now, in words; None if nothing speaks against it."""
        module = self._module()
        if module is None:
            return "the module is gone"
        if len(set(getattr(module, "hf_device_map", {}).values())) > 1:
            return "device_map spreads the module over several devices"
        for child in module.modules():
            if (reason := _veto_of(child, child is module)) is not None:
                return reason
        return None


class _State:
    """The modules' states as values. What they name by identity is kept alive, so that no new
    object can take an old one's place and pass for it."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._kept: list[Any] = list(modules)
        self.values: list[Any] = [_state_of(module, self._kept) for module in modules]
        for helper in _helpers(_of_others(modules)):
            self._kept.append(helper)
            self.values.append((type(helper), _value(vars(helper), _DEPTH, self._kept)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _State) and self.values == other.values

    __hash__ = None  # type: ignore[assignment]


def _state_of(module: nn.Module, kept: list[Any]) -> tuple[Any, ...]:
    attributes = module.__dict__
    hooks = [hook for name in _HOOKS for hook in attributes.get(name, {}).values()]
    kept.extend(hooks)
    depth = 1 if type(module).__module__.startswith("torch.") else _DEPTH
    own = tuple((k, _value(v, depth, kept)) for k, v in attributes.items() if k not in _OF_TORCH)
    kind = type(module)
    return id(module), kind, kind.forward, attributes.get("training"), tuple(map(id, hooks)), own


def _of_others(modules: list[nn.Module]) -> list[dict[str, Any]]:
    """The attributes of the modules that are not torch's own."""
    return [m.__dict__ for m in modules if not type(m).__module__.startswith("torch.")]


def _watch(modules: list[nn.Module]) -> Callable[[], bool]:
    """A quick test that nothing `_state_of` looks at was touched: no object replaced, no container
    changed. It may err on the side of no; then the state is read again."""
    torchs = [m.__dict__ for m in modules if type(m).__module__.startswith("torch.")]
    owns = _of_others(modules)
    helpers = _helpers(owns)
    owns += [vars(x) for x in helpers]
    hooks = [box for m in modules for name in _HOOKS if (box := m.__dict__.get(name)) is not None]
    registries = [r for d in owns if (r := d.get("_diffusers_hook")) is not None]
    boxes = [x for d in owns for k, x in d.items() if _is_box(x) and k not in _OF_TORCH]
    # Settings of torch's layers: a convolution's padding mode, a norm's epsilon.
    settings = [(d, k, x) for d in torchs for k, x in d.items() if k not in _OF_TORCH]
    layers, names, set_to = zip(*settings, strict=True) if settings else ((), (), ())
    children = [m._modules for m in modules]
    kinds = set(map(type, modules))

    def look() -> tuple[Any, ...]:
        seen: list[Any] = []  # what is watched is held by its owner, or was replaced: then it shows
        return (
            list(map(len, torchs)),
            [attributes.get("training") for attributes in torchs],
            list(map(type, modules)),
            list(map(type, helpers)),
            [getattr(kind, "forward", None) for kind in kinds],
            [tuple(hook) for hook in hooks if hook],
            [_hooks_of_registry(registry, seen) for registry in registries],
            [_value(box, _DEPTH, seen) for box in boxes],
            [tuple(map(id, family.values())) for family in children if family],
        )

    before, values = look(), [tuple(own.values()) for own in owns]

    def untouched() -> bool:
        return (
            all(
                len(own) == len(was) and all(map(operator.is_, own.values(), was))
                for own, was in zip(owns, values, strict=True)
            )
            and all(map(operator.is_, map(dict.get, layers, names), set_to))
            and look() == before
        )

    return untouched


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
    if depth and isinstance(x, (list, tuple)):
        return tuple(_value(item, depth - 1, kept) for item in x)
    if depth and isinstance(x, dict):
        return tuple((key, _value(item, depth - 1, kept)) for key, item in x.items())
    if depth and isinstance(x, (set, frozenset)):
        return frozenset(_value(item, 0, kept) for item in x)
    if (hooks := _hooks_of_registry(x, kept)) is not None:
        return hooks
    kept.append(x)
    if isinstance(x, torch.Tensor):  # what lies on the host, Python may have read
        return (id(x), x._version) if x.is_cpu and not x.is_inference() else id(x)
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
            for value in own.values()
            for x in (value if type(value) in (list, tuple) else (value,))
            if _is_helper(x) and id(x) not in found
        }
        found |= news
        level = [vars(x) for x in news.values()]
    return list(found.values())


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
    return tuple((name, id(hook)) for name, hook in hooks.items())


def _hooks(module: nn.Module, name: str) -> Iterable[Any]:
    hooks = module.__dict__.get(name, {})
    return () if name.endswith("_with_kwargs") else hooks.values()


def _is_users(hook: Any) -> bool:
    """Libraries' own hooks only hand tensors on; what a user's does, no one knows."""
    room = getattr(hook, "__module__", None) or type(hook).__module__
    return not room.startswith(("torch.", "transformers.", "diffusers.", "peft.", "accelerate."))


def _veto_of(module: nn.Module, is_root: bool) -> str | None:
    attributes = module.__dict__
    if not is_root and any(_is_users(hook) for name in _HOOKS for hook in _hooks(module, name)):
        return f"a forward hook inside, on a {type(module).__name__}, would not run in a replay"
    hook = attributes.get("_hf_hook")
    if hook is not None and getattr(hook, "offload", type(hook).__name__ == "CpuOffload"):
        return "CPU offload moves the weights around every call"
    for name, registered in getattr(attributes.get("_diffusers_hook"), "hooks", {}).items():
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
