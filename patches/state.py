"""What a recording of a module depends on beyond arguments and weights, seen from outside.

Looks at what is, not at who changes it: hooks, processors, adapters and their scales, attention
backends, training flags, every plain attribute of modules that are not torch's own. Knows
diffusers, PEFT and accelerate only by the names of the attributes that they set.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

_OF_TORCH = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_COMMON = frozenset((bool, int, float, str, type(None)))
_BOXES = (list, dict, set, tuple)
_DEPTH = 4
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
        return _attention_backend(), self._state

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
        for config in _configs(vars(module) for module in modules):
            self.values.append(_value(vars(config), _DEPTH, self._kept))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _State) and self.values == other.values

    __hash__ = None  # type: ignore[assignment]


def _state_of(module: nn.Module, kept: list[Any]) -> tuple[Any, ...]:
    attributes = module.__dict__
    hooks = [hook for name in _HOOKS for hook in attributes[name].values()]
    kept.extend(hooks)
    depth = 1 if type(module).__module__.startswith("torch.") else _DEPTH
    own = tuple((k, _value(v, depth, kept)) for k, v in attributes.items() if k not in _OF_TORCH)
    return id(module), module.training, tuple(map(id, hooks)), own


def _watch(modules: list[nn.Module]) -> Callable[[], bool]:
    """A quick test that nothing `_state_of` looks at was touched: no object replaced, no container
    changed. It may err on the side of no; then the state is read again."""
    torchs = [m.__dict__ for m in modules if type(m).__module__.startswith("torch.")]
    owns = [m.__dict__ for m in modules if not type(m).__module__.startswith("torch.")]
    owns += [vars(x) for d in owns for x in d.values() if _is_processor(x)]
    owns += [vars(x) for x in _configs(owns)]
    hooks = [m.__dict__[name] for m in modules for name in _HOOKS]
    registries = [r for d in owns if (r := d.get("_diffusers_hook")) is not None]
    looked_into = (*_BOXES, torch.Tensor)
    boxes = [
        x for d in owns for k, x in d.items() if isinstance(x, looked_into) and k not in _OF_TORCH
    ]
    # Settings of torch's layers: a convolution's padding mode, a norm's epsilon.
    settings = [(d, k, x) for d in torchs for k, x in d.items() if k not in _OF_TORCH]
    layers, names, set_to = zip(*settings, strict=True) if settings else ((), (), ())
    children = [m._modules for m in modules]

    def look() -> tuple[Any, ...]:
        seen: list[Any] = []  # what is watched is held by its owner, or was replaced: then it shows
        return (
            list(map(len, torchs)),
            list(map(operator.itemgetter("training"), torchs)),
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


def _value(x: Any, depth: int, kept: list[Any]) -> Any:
    """Plain values and containers by value, all else by identity (and `kept`); attention
    processors, which carry scales as attributes, by their attributes too."""
    if type(x) in _COMMON or isinstance(x, _PLAIN):
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
    if not depth or isinstance(x, (nn.Module, type)) or not _is_processor(x):
        return id(x)
    return id(x), tuple((key, _value(item, depth - 1, kept)) for key, item in vars(x).items())


def _configs(attributes: Iterable[dict[str, Any]]) -> list[Any]:
    """The configuration objects of transformers among attributes, and those inside them, each once:
    all modules of a model share theirs."""
    found = {id(x): x for own in attributes for x in own.values() if _is_config(x)}
    inner = [vars(config) for config in found.values()]
    return [*found.values(), *_configs(inner)] if inner else []


def _is_config(x: Any) -> bool:
    return type(x).__name__.endswith("Config") and hasattr(x, "to_dict")


def _is_processor(x: Any) -> bool:
    kind = type(x)
    if kind not in _processors:
        _processors[kind] = "Processor" in kind.__name__ and not hasattr(kind, "__slots__")
    return _processors[kind]


_processors: dict[type, bool] = {}


def _hooks_of_registry(x: Any, kept: list[Any]) -> tuple[Any, ...] | None:
    """The hooks in a diffusers registry. An empty one, which `cache_context` leaves behind, is as
    good as none."""
    hooks = getattr(x, "hooks", None)
    if type(x).__name__ != "HookRegistry" or not isinstance(hooks, dict):
        return None
    kept.extend(hooks.values())
    return tuple((name, id(hook)) for name, hook in hooks.items())


def _veto_of(module: nn.Module, is_root: bool) -> str | None:
    attributes = module.__dict__
    hook = attributes.get("_hf_hook")
    if hook is not None and getattr(hook, "offload", type(hook).__name__ == "CpuOffload"):
        return "CPU offload moves the weights around every call"
    for name, registered in getattr(attributes.get("_diffusers_hook"), "hooks", {}).items():
        if name in _MOVING_HOOKS:
            return _MOVING_HOOKS[name]
        if getattr(registered, "_is_stateful", False):
            return f"a cache ({name}) decides on the host what each step computes"
    return None


def _attention_backend() -> Any:
    """The process-wide default of diffusers, which its context manager sets too."""
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    registry = getattr(dispatch, "_AttentionBackendRegistry", None)
    return getattr(registry, "_active_backend", None)
