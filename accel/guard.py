"""What may change under a graph: weight addresses, held memory, torch's own switches.

Knows modules only as owners of parameters and buffers, and torch's process- and thread-wide flags.
What diffusers adds to that (hooks, adapters, attention processors) comes in through a runner's
probe.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.backends import mha as _mha
from torch.backends import opt_einsum as _einsum

from accel.backend import Backend
from accel.layout import bytes_of
from accel.modules import all_modules

_KERNEL_CHOICES = (
    "_get_float32_matmul_precision",
    "_get_deterministic_algorithms",
    "_get_deterministic_algorithms_warn_only",
    "_get_cudnn_enabled",
    "_get_cudnn_benchmark",
    "_get_cudnn_deterministic",
    "_get_cudnn_allow_tf32",
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction",
    "_get_cublas_allow_fp16_accumulation",
    "_get_math_sdp_allow_fp16_bf16_reduction",
    "_get_fa3_sdp_enabled",
    "_get_blas_preferred_backend",
    "_get_linalg_preferred_backend",
)
"""Switches of the whole process that choose kernels: part of every key, never turned by us."""


@functools.cache
def _readers() -> list[Callable[[], Any]]:
    """Those that this version of torch has, and its float32 precisions by operation."""
    precision = torch._C._get_fp32_precision_getter
    fill = functools.partial(getattr, torch.utils.deterministic, "fill_uninitialized_memory")
    known = [getattr(torch._C, name) for name in _KERNEL_CHOICES if hasattr(torch._C, name)]
    layers = [functools.partial(precision, "cuda", layer) for layer in ("conv", "rnn")]
    paths = [_mha.get_fastpath_enabled, functools.partial(getattr, _einsum, "enabled")]
    return [*known, *layers, *paths, _matmul_precision, fill]


def _matmul_precision() -> str:
    """What "none" stands for: the precision of everything, by default full."""
    precision = torch._C._get_fp32_precision_getter
    own, general = precision("cuda", "matmul"), precision("generic", "all")
    return str(next((x for x in (own, general) if x != "none"), "ieee"))


def _setting(read: Callable[[], Any]) -> Any:
    """A switch's setting; old switches refuse to answer once the new interface has set another."""
    try:
        return read()
    except RuntimeError:
        return "set by another interface"


class Ambient:
    """The switches around a call: gradients, autocast, SDPA backends, default dtype and device.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     inside = Ambient("cpu")
    >>> with inside.restored():
    ...     torch.is_autocast_enabled("cpu")
    True
    >>> torch.is_autocast_enabled("cpu")
    False
    """

    def __init__(self, device_type: str) -> None:
        self._switches = _switches(device_type)
        self._settings = [read() for read, _ in self._switches]
        self._device = torch.get_default_device()

    @property
    def key(self) -> tuple[Any, ...]:
        """The switches as a hashable value, with the process-wide ones that choose kernels."""
        return (self._device, *self._settings, *map(_setting, _readers()))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Sets these switches for the length of the context, those that are not set already."""
        with contextlib.ExitStack() as stack:
            for (read, write), setting in zip(self._switches, self._settings, strict=True):
                if (now := read()) != setting:
                    stack.callback(write, now)
                    write(setting)
            if torch.get_default_device() != self._device:
                stack.enter_context(self._device)
            yield


@functools.cache
def _switches(device_type: str) -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """What a forward may turn around a break, by thread or process: (read, write)."""
    autocast = (
        (torch.is_autocast_enabled, torch.set_autocast_enabled),
        (torch.get_autocast_dtype, torch.set_autocast_dtype),
    )
    kinds = {device_type, "cpu"}
    return [
        (functools.partial(read, kind), functools.partial(write, kind))
        for kind in filter(torch._C._is_autocast_available, kinds)
        for read, write in autocast
    ] + [
        (torch.is_grad_enabled, torch._C._set_grad_enabled),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
        (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
        (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
        (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
        (_attention_order, torch._C._set_sdp_priority_order),
    ]


def _attention_order() -> tuple[int, ...]:
    return tuple(map(int, torch._C._get_sdp_priority_order()))


class WeightGuard:
    """Watches where a module's parameters and buffers lie.

    `version` changes when any of them moves, appears, disappears or changes shape, stride or dtype;
    a graph is good for the version that it was recorded with. Values may change in place: a graph
    reads them where they are. The weights themselves are not kept alive. `storages` are the
    addresses that they lie at, those `on` one device if it is given.

    >>> layer = torch.nn.Linear(2, 2, device=device)
    >>> guard = WeightGuard(layer, backend)
    >>> before = guard.check()
    >>> _ = layer.weight.data.zero_()
    >>> guard.check() == before
    True
    >>> layer.weight.data = layer.weight.data.clone()
    >>> guard.check() == before
    False
    """

    def __init__(self, module: nn.Module | None, backend: Backend, on: Any = None) -> None:
        self.module: Callable[[], nn.Module | None]
        """Gives the watched module; None if there is none, or no longer."""
        self.module = (lambda: None) if module is None else weakref.ref(module)
        self._backend, self._on = backend, on
        self.version = 0
        self._take_stock()

    def check_alive(self) -> int:
        """The current version, after a check that no weight's memory was freed: what makes a replay
        safe to launch. Costs nothing, since storages tell of their death."""
        return self.check() if self._deaths else self.version

    def check(self) -> int:
        """The current version, after a look at every weight: address, shape, stride, dtype, and the
        structure of the module (about 0.4 µs a weight)."""
        if self._deaths or self._stock != self._take():
            self._take_stock()
            self.version += 1
        return self.version

    def requires_grad(self) -> bool:
        """Whether any parameter asks for a gradient."""
        module = self.module()
        return module is not None and any(p.requires_grad for p in module.parameters())

    def _take_stock(self) -> None:
        module = self.module()
        modules = [] if module is None else all_modules(module)
        self._boxes = [box for m in modules for box in (m._modules, m._parameters, m._buffers)]
        self._families = [m._modules for m in modules if m._modules]
        self._owners: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._subclasses: list[tuple[dict[str, Any], str, Callable[[Any], Any], int]] = []
        self.opaque: str | None = None
        """Why the watch cannot be kept, in words: a weight hides what it is made of."""
        self.storages: set[int] = set()
        self._deaths: list[Any] = []
        self._watches: list[Any] = []
        for m in modules:
            for owner in (m._parameters, m._buffers):
                for name, tensor in owner.items():
                    self._watch(owner, name, tensor)
        self._stock = self._take()

    def _watch(self, owner: dict[str, Any], name: str, tensor: Any) -> None:
        plain = tensor is None or type(tensor) in self._backend.tensor_types
        if plain or not hasattr(tensor, "__tensor_flatten__"):
            self._owners.append(owner)
            self._names.append(name)
            self._watch_memory(tensor)
        if not plain:
            self._look_inside(owner, name, tensor)

    def _look_inside(self, owner: dict[str, Any], name: str, tensor: torch.Tensor) -> None:
        """Watches what a subclass holds, by the way from the module: replaced ones may live on."""
        inner = _inner_tensors(tensor)
        plain = {way for way, x in inner.items() if type(x) in self._backend.tensor_types}
        own = [f"{way}.__dict__".lstrip(".") for way in inner if way not in plain]
        watched = [way for way, x in inner.items() if way and not hasattr(x, "__tensor_flatten__")]
        look = operator.attrgetter("__class__", *own, *watched)
        self._subclasses.append((owner, name, look, len(own)))
        for way in watched:
            self._watch_memory(inner[way])
        for x in (x for way, x in inner.items() if way not in plain):
            self._keep_apart([y for y in [*vars(x).values()] if not isinstance(y, torch.Tensor)])

    def _keep_apart(self, settings: list[Any]) -> None:
        """Nothing new may take the identity of one: they are kept, or tell of their death."""
        for setting in settings:
            try:
                self._watches.append(weakref.ref(setting, self._deaths.append))
            except TypeError:  # a number, a list
                self._watches.append(setting)

    def _watch_memory(self, tensor: torch.Tensor | None) -> None:
        if tensor is None or tensor.device.type != self._backend.device_type:
            return
        if tensor.numel() and not self._backend.address(tensor):
            self.opaque = f"a weight is a {type(tensor).__name__}, which hides what it wraps"
            return
        storage = self._backend.storage(tensor)
        if self._on in (None, tensor.device):
            self.storages.add(storage.data_ptr())
        self._watches.append(weakref.ref(storage, self._deaths.append))

    def _take(self) -> tuple[Any, ...]:
        with torch._C.DisableTorchFunctionSubclass():  # GGUF's answer all questions in Python
            inside, settings = self._insides()
            watched = (*map(dict.get, self._owners, self._names), *inside)
            tensors: list[torch.Tensor] = [x for x in watched if x is not None]
            return (
                list(map(len, self._boxes)),
                list(map(id, itertools.chain.from_iterable(map(dict.values, self._families)))),
                list(map(self._backend.address, tensors)),
                list(map(torch.Tensor.size, tensors)),
                list(map(torch.Tensor.stride, tensors)),
                [x.dtype for x in tensors],
                settings,
            )

    def _insides(self) -> tuple[list[Any], list[Any]]:
        """The tensors in subclasses, and what else these carry (a block size, say) by identity."""
        inside: list[Any] = []
        settings: list[Any] = []
        for owner, name, look, count in self._subclasses:
            try:
                kind, *found = look(owner.get(name))
            except AttributeError:  # something else has taken its place
                kind, found = None, []
            settings += [kind, *(tuple(map(id, own.values())) for own in found[:count])]
            inside += found[count:]
        return inside, settings


def _inner_tensors(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A subclass, and the tensors in it and in these, each once, by the dotted way there."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    ahead: list[tuple[str, Any]] = [("", tensor)]
    while ahead:
        way, x = ahead.pop()
        if isinstance(x, torch.Tensor) and id(x) not in found:
            found[id(x)] = way, x
            names = x.__tensor_flatten__()[0] if hasattr(x, "__tensor_flatten__") else ()
            inner = [(name, getattr(x, name)) for name in {*names, *vars(x)}]
            ahead += [(f"{way}.{name}".lstrip("."), y) for name, y in inner]
    return dict(found.values())


COMPARED_BYTES = 2**16
"""Up to here a host tensor that a recording reads is compared by value, at every call."""

_aliases: weakref.WeakKeyDictionary[torch.UntypedStorage, set[int]] = weakref.WeakKeyDictionary()
"""Which tensors over a host storage are recordings' own, so that these do not take each other for
the model."""


class Held:
    """Memory outside a graph that its recorded work reads and no module owns as a weight.

    Kept alive, so that a table evicted from a cache stays readable. `stale` says in words what
    happened when the graph is the last one that does so: the model has replaced the table.
    Host tensors, whose values are baked in, are also compared: by value, the largest by version.

    >>> held, table = Held(), torch.ones(2, device=device)
    >>> held.hold(backend.storage(table))
    >>> held.stale() is None
    True
    >>> del table
    >>> held.stale()
    'the model has replaced a tensor that the recording reads'
    """

    def __init__(self) -> None:
        self._device: dict[int, torch.UntypedStorage] = {}
        self._host: dict[Any, tuple[torch.Tensor, Any, set[int]]] = {}

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Keeps a device storage alive."""
        self._device[storage.data_ptr()] = storage

    def hold_host(self, tensor: torch.Tensor) -> None:
        """Keeps a host tensor alive whose present values were baked in."""
        place = tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.dtype
        if place in self._host:
            return
        # An alias of our own: the model's tensor object then counts as a second holder. One made
        # below autograd, where the recorder sees tensors, would count its own changes only.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            alias = tensor.detach()
        ours = _aliases.setdefault(alias.untyped_storage(), set())
        ours.add(id(alias))
        weakref.finalize(alias, ours.discard, id(alias))
        self._host[place] = alias, _content(alias), ours

    def stale(self) -> str | None:
        """Why the recorded work may no longer be what the model would do, or None."""
        for storage in self._device.values():
            if torch._C._storage_Use_Count(storage._cdata) <= 1:
                return "the model has replaced a tensor that the recording reads"
        for tensor, content, ours in self._host.values():
            if not torch.equal(_content(tensor), content):
                return "a host tensor that the recording reads has changed"
            # All recordings' aliases, and the handle that asks.
            if torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= len(ours) + 1:
                return "the model has replaced a host tensor that the recording reads"
        return None


def _content(tensor: torch.Tensor) -> torch.Tensor:
    """Versions do not see what is written through `.data` or numpy, nor tensors of inference mode
    anything: only of what is too large to be compared at every call are they asked."""
    if tensor.nbytes <= COMPARED_BYTES:
        return bytes_of(tensor)
    return torch.tensor(0 if tensor.is_inference() else tensor._version, device="cpu")
