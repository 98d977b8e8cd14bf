"""What may change under a graph: weight addresses, held memory, torch's own switches.

Knows modules only as owners of parameters and buffers, and torch's process- and thread-wide flags.
What diffusers adds to that (hooks, adapters, attention processors) comes in through a runner's
probe.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from accel.backend import Backend

_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
)
"""Thread- or process-wide switches that a forward may turn around a break: (read, write)."""

_PROCESS_WIDE: tuple[Callable[[], Any], ...] = (
    torch.get_float32_matmul_precision,
    torch.are_deterministic_algorithms_enabled,
    torch._C._get_cudnn_enabled,
    torch._C._get_cudnn_benchmark,
    torch._C._get_cudnn_deterministic,
    torch._C._get_cudnn_allow_tf32,
    torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
)
"""Switches that choose kernels: part of every key, never turned by us."""


class Ambient:
    """The switches around a call: autocast, SDPA backends, default dtype and device.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     inside = Ambient("cpu")
    >>> with inside.restored():
    ...     torch.is_autocast_enabled("cpu")
    True
    >>> torch.is_autocast_enabled("cpu")
    False
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.autocast = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {device_type, "cpu"}
            if torch._C._is_autocast_available(kind)
        )
        self.flags = tuple(_frozen(read()) for read, _ in _FLAGS)
        self.device = torch.get_default_device()

    @property
    def key(self) -> tuple[Any, ...]:
        """The switches as a hashable value, with the process-wide ones that choose kernels."""
        return (self.autocast, self.flags, self.device, *(read() for read in _PROCESS_WIDE))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Sets these switches for the length of the context, if they are not set already."""
        now = Ambient(self.device_type)
        if now.autocast == self.autocast and now.flags == self.flags and now.device == self.device:
            yield
            return
        self._set()
        try:
            if now.device == self.device:
                yield
            else:
                with self.device:
                    yield
        finally:
            now._set()

    def _set(self) -> None:
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        for (_, write), value in zip(_FLAGS, self.flags, strict=True):
            write(list(value) if isinstance(value, tuple) else value)


def _frozen(value: Any) -> Any:
    return tuple(int(v) for v in value) if isinstance(value, list) else value


class WeightGuard:
    """Watches where a module's parameters and buffers lie.

    `version` changes when any of them moves, appears, disappears or changes shape, stride or dtype;
    a graph is good for the version that it was recorded with. Values may change in place: a graph
    reads them where they are. The weights themselves are not kept alive.

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

    def __init__(self, module: nn.Module, backend: Backend) -> None:
        self._module = weakref.ref(module)
        self._backend = backend
        self.version = 0
        self._take_stock()

    @property
    def module(self) -> nn.Module | None:
        """The watched module, None if it is gone."""
        return self._module()

    def check_alive(self) -> int:
        """The current version, after a check that no weight's memory was freed: what makes a replay
        safe to launch. Costs nothing, since storages tell of their death."""
        return self.check() if self._deaths else self.version

    def check(self) -> int:
        """The current version, after a look at every weight: address, shape, stride, dtype, and the
        structure of the module (about 0.4 µs a weight)."""
        try:
            changed = bool(self._deaths) or self._stock != self._take()
        except (KeyError, TypeError):
            changed = True
        if changed:
            self._take_stock()
            self.version += 1
        return self.version

    def requires_grad(self) -> bool:
        """Whether any parameter asks for a gradient."""
        module = self._module()
        return module is not None and any(p.requires_grad for p in module.parameters())

    def _take_stock(self) -> None:
        module = self._module()
        modules = [] if module is None else list(module.modules())
        self._owners: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._boxes = [box for m in modules for box in (m._modules, m._parameters, m._buffers)]
        self._families = [(m._modules, tuple(m._modules.values())) for m in modules if m._modules]
        self.storages: set[int] = set()
        self._deaths: list[Any] = []
        self._watches: list[weakref.ref[torch.UntypedStorage]] = []
        for m in modules:
            for owner in (m._parameters, m._buffers):
                for name, tensor in owner.items():
                    if tensor is not None:
                        self._watch(owner, name, tensor)
        self._stock = self._take()

    def _watch(self, owner: dict[str, Any], name: str, tensor: torch.Tensor) -> None:
        if hasattr(tensor, "__tensor_flatten__") and type(tensor) not in self._backend.tensor_types:
            for inner in tensor.__tensor_flatten__()[0]:
                self._watch(tensor.__dict__, inner, getattr(tensor, inner))
            return
        if tensor.device.type == self._backend.device_type:
            storage = self._backend.storage(tensor)
            self.storages.add(storage.data_ptr())
            self._watches.append(weakref.ref(storage, self._deaths.append))
        self._owners.append(owner)
        self._names.append(name)

    def _take(self) -> tuple[Any, ...]:
        tensors = list(map(operator.getitem, self._owners, self._names))
        return (
            list(map(self._backend.address, tensors)),
            list(map(len, self._boxes)),
            [tuple(box.values()) == children for box, children in self._families],
            list(map(torch.Tensor.size, tensors)),
            list(map(torch.Tensor.stride, tensors)),
            [t.dtype for t in tensors],
        )


class Held:
    """Memory outside a graph that its recorded work reads and no module owns as a weight.

    Kept alive, so that a table evicted from a cache stays readable. `stale` says in words what
    happened when the graph is the last one that does so: the model has replaced the table.
    Host tensors, whose values are baked in, are also compared by version.
    """

    def __init__(self) -> None:
        self._device: dict[int, torch.UntypedStorage] = {}
        self._host: dict[int, tuple[torch.Tensor, int]] = {}

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Keeps a device storage alive."""
        self._device[storage.data_ptr()] = storage

    def hold_host(self, tensor: torch.Tensor) -> None:
        """Keeps a host tensor alive whose present values were baked in."""
        # An alias of our own: the model's tensor object then counts as a second holder.
        alias = tensor.detach()
        self._host.setdefault(tensor.data_ptr(), (alias, _version(alias)))

    def stale(self) -> str | None:
        """Why the recorded work may no longer be what the model would do, or None."""
        for storage in self._device.values():
            if torch._C._storage_Use_Count(storage._cdata) <= 1:
                return "the model has replaced a tensor that the recording reads"
        for tensor, version in self._host.values():
            if _version(tensor) != version:
                return "a host tensor that the recording reads has changed"
            # Our alias and the handle that asks: two.
            if torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= 2:
                return "the model has replaced a host tensor that the recording reads"
        return None


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
