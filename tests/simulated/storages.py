"""Storages of the simulated device under `copy.deepcopy`, `pickle`, `torch.save` and `torch.load`.

torch makes a storage of a device through that device's allocator, which a device in Python cannot
register (asking for one ends the process). So the four methods that copying and saving go through
are led to the arena here for storages of the device, and left alone for all others.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from tests.simulated.tensors import CPU, SIM, arena, bytes_at, new_storage, quiet

Storage = torch.UntypedStorage
_to: Any = Storage.to
_cpu: Any = Storage.cpu
_clone: Any = Storage.clone


def install() -> None:
    """Teaches torch's storages about the device."""
    Storage.to = _to_device  # type: ignore[assignment,method-assign]
    Storage.cpu = _to_host  # type: ignore[assignment,method-assign]
    Storage.clone = _cloned  # type: ignore[assignment,method-assign]


def _of_sim(storage: Storage) -> bool:
    return storage.device.type == SIM.type


def _bytes(storage: Storage) -> torch.Tensor:
    if _of_sim(storage) and storage.nbytes():
        return bytes_at(storage.data_ptr(), storage.nbytes())
    if _of_sim(storage):
        return torch.empty(0, dtype=torch.uint8, device=CPU)
    return torch.empty(0, dtype=torch.uint8, device=CPU).set_(storage)


def _copied(storage: Storage, fresh: Storage) -> Storage:
    with quiet():
        _bytes(fresh).copy_(_bytes(storage))
    return fresh


def _cloned(storage: Storage) -> Storage:
    if not _of_sim(storage):
        return cast(Storage, _clone(storage))
    return _copied(storage, new_storage(arena.heap, storage.nbytes()))


def _to_host(storage: Storage) -> Storage:
    if not _of_sim(storage):
        return cast(Storage, _cpu(storage))
    return _copied(storage, Storage(storage.nbytes(), device="cpu"))


def _to_device(storage: Storage, *, device: Any, non_blocking: bool = False) -> Storage:
    target = torch.device(device)
    if target.type == SIM.type and not _of_sim(storage):
        return _copied(storage, new_storage(arena.heap, storage.nbytes()))
    if target.type == "cpu":
        return _to_host(storage)
    if _of_sim(storage):
        return storage
    return cast(Storage, _to(storage, device=device, non_blocking=non_blocking))
