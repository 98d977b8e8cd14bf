"""`tensor.data = other` between the host and the simulated device: how libraries move weights.

torch allows it among its own devices only. Where it refuses, the two tensors exchange what they are
made of, so that the parameter stays the object that others hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

_slot: Any = torch._C.TensorBase.data


@contextmanager
def data_crosses_devices() -> Iterator[None]:
    """While open, `data` may be set to a tensor of another device, as on CUDA."""
    with mock.patch.object(Tensor, "data", property(_slot.__get__, _set_data), create=True):
        yield


def _set_data(tensor: Tensor, data: Tensor) -> None:
    if tensor.device.type == data.device.type:
        _slot.__set__(tensor, data)
        return
    fresh: Tensor = data.detach()
    if isinstance(tensor, nn.Parameter):
        fresh = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
    attributes = dict(vars(tensor))
    torch.utils.swap_tensors(tensor, fresh)
    vars(tensor).update(attributes)
