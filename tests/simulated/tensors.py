"""Tensors of the simulated device: real torch tensors whose storages lie in the arena.

A tensor of device "sim" is a plain `torch.Tensor` with the dispatch key of a third-party device,
over a storage at a real host address. So views, autograd, parameters, inference mode and data
pointers are torch's own. What operators compute on are CPU tensors over the same bytes, also made
here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.simulated.arena import Arena, Pool
from tests.simulated.module import SimModule

NAME = "sim"
module = SimModule()
_setup_privateuseone_for_python_backend(NAME, backend_module=module)

SIM = torch.device(NAME, 0)
CPU = torch.device("cpu")
CPU_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
TOTAL_BYTES = 8 << 30

arena = Arena(TOTAL_BYTES)
_BASE, _END = arena.space.base, arena.space.end

_storage_at: Any = torch._C._construct_storage_from_data_pointer
_empty: Any = torch._C._acc.create_empty_tensor
_set: Any = torch.ops.aten.set_.source_Storage_storage_offset.redispatch
_as_strided = torch.as_strided
_POISON = {torch.bool: True, torch.uint8: 0x7B, torch.int8: 0x7B, torch.int16: 0x7B7B}
_POISON |= {torch.int32: 0x7B7B7B7B, torch.int64: 0x7B7B7B7B7B7B7B7B}


class _Typed(dict[torch.dtype, tuple[torch.Tensor, int]]):
    """The whole address space as a flat CPU tensor of each dtype, and the dtype's size."""

    def __missing__(self, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        with quiet(), torch.inference_mode(False):
            self[dtype] = arena.space.bytes.view(dtype), dtype.itemsize
        return self[dtype]


@contextmanager
def quiet() -> Iterator[None]:
    """No mode, no subclass and no autograd sees what runs in here: the device's own affairs."""
    with (
        torch._C._DisableTorchDispatch(),
        torch._C.DisableTorchFunction(),
        torch._C._AutoDispatchBelowADInplaceOrView(),
    ):
        yield


_typed = _Typed()


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the bytes of `tensor`, which it does not keep alive."""
    pointer = tensor.data_ptr()
    if pointer == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=CPU)
    flat, itemsize = _typed[tensor.dtype]
    view = _as_strided(flat, tensor.size(), tensor.stride(), (pointer - _BASE) // itemsize)
    if view.is_complex() and tensor.is_conj():
        return torch._conj(view)
    return view


def fenced_host_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same, for operators that may resize what they write: growing it is an error."""
    storage = tensor.untyped_storage()
    if storage.data_ptr() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=CPU)
    bytes_ = _storage_at(storage.data_ptr(), CPU, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=CPU)
    _set(CPU_KEY, empty, bytes_, tensor.storage_offset(), tensor.size(), tensor.stride())
    return empty


def bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """The bytes of a block as a flat CPU tensor."""
    return _as_strided(arena.space.bytes, (nbytes,), (1,), address - _BASE)


def in_arena(tensor: torch.Tensor) -> bool:
    """Whether a CPU tensor lies over the device's memory."""
    return _BASE <= tensor.data_ptr() < _END


def on_storage(
    storage: torch.UntypedStorage, dtype: torch.dtype, size: Any, stride: Any, offset: Any = 0
) -> torch.Tensor:
    """A tensor of the device over `storage`."""
    tensor: torch.Tensor = _set(CPU_KEY, _empty((0,), dtype), storage, offset, size, stride)
    return tensor


def restride(tensor: torch.Tensor, storage: torch.UntypedStorage, like: torch.Tensor) -> None:
    """Gives `tensor` another storage, and the size and strides of `like`."""
    _set(CPU_KEY, tensor, storage, 0, like.size(), like.stride())


def new_storage(pool: Pool, nbytes: int) -> torch.UntypedStorage:
    """A storage that owns a block of `pool`; empty ones own nothing, at address 0, as on CUDA."""
    if nbytes == 0:
        return unowned_storage(0, 0)
    address = arena.allocate(pool, nbytes)
    storage = unowned_storage(address, nbytes)
    arena.own(storage, pool, address)
    return storage


def unowned_storage(address: int, nbytes: int) -> torch.UntypedStorage:
    """A storage over bytes that it does not keep from being freed."""
    storage: torch.UntypedStorage = _storage_at(address, SIM, nbytes)
    return storage


def new_tensor(pool: Pool, dtype: torch.dtype, size: Any, stride: Any) -> torch.Tensor:
    """An uninitialised tensor of the device with a block of its own in `pool`."""
    return on_storage(new_storage(pool, span(size, stride) * dtype.itemsize), dtype, size, stride)


def span(size: Any, stride: Any) -> int:
    """Elements of memory between the first and the last element of a strided tensor, inclusive."""
    reach = 1
    for extent, step in zip(size, stride, strict=True):
        if extent == 0:
            return 0
        reach += (extent - 1) * step
    return reach


def view_of(owners: list[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
    """`result`, a CPU tensor over the bytes of one of `owners`, as a tensor of the device."""
    pointer = result.data_ptr()
    for owner in owners:
        storage = owner.untyped_storage()
        offset = pointer - storage.data_ptr()
        if 0 <= offset < storage.nbytes():
            offset //= result.dtype.itemsize
            return on_storage(storage, result.dtype, result.size(), result.stride(), offset)
    raise AssertionError("an operator returned a view of memory that none of its arguments holds")


def poison(view: torch.Tensor) -> None:
    """Fills a host view with what no computation should ever see."""
    if view.is_floating_point() or view.is_complex():
        view.fill_(float("nan"))
    else:
        view.fill_(_POISON.get(view.dtype, 1))
