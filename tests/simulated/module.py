"""What torch expects to find as `torch.sim`: the device module of the simulated device.

Knows the names that torch and model code look up; the numbers come from the device itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.simulated.device import Device, Stream


class SimModule:
    """`torch.sim`. `card` is set once the device exists."""

    card: Device

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def manual_seed(self, seed: int) -> None:
        self.card.generator.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        self.card.generator.manual_seed(seed)

    def get_rng_state(self, device: Any = NotImplemented) -> torch.Tensor:
        return self.card.generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = NotImplemented) -> None:
        self.card.generator.set_state(state)

    def synchronize(self, device: Any = NotImplemented) -> None:
        self.card.synchronize(self.card.current_stream())

    def Stream(self, device: Any = NotImplemented) -> Stream:
        from tests.simulated import device as simulated
        from tests.simulated import tensors

        return simulated.Stream(tensors.SIM)

    def current_stream(self, device: Any = NotImplemented) -> Stream:
        return self.card.current_stream()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Makes `stream` the calling thread's current one."""
        before = self.card.current_stream()
        self.card.set_current_stream(stream)
        try:
            yield
        finally:
            self.card.set_current_stream(before)

    def empty_cache(self) -> None:
        from tests.simulated.tensors import arena

        arena.empty_cache()

    def is_current_stream_capturing(self) -> bool:
        """What a model would ask. Hears no in a thread that hides its recording."""
        return threading.get_ident() not in self.card.hiding and (
            self.card.current_stream().segment is not None
        )
