"""A fake accelerator for tests: device "sim".

torch knows it from `new_device` on and not before: with it, torch's autograd for CUDA does not work
any more in the process, and tests on a GPU come first.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulated.backend import SimulatedBackend


def new_device() -> type[SimulatedBackend]:
    """A device as new: without pools, failures, or time passed. Returns its backend's class."""
    from tests.simulated.backend import SimulatedBackend
    from tests.simulated.device import card

    _installed()
    card.reset()
    return SimulatedBackend


@functools.cache
def _installed() -> list[Any]:
    """Makes torch know the device, for as long as these libraries live."""
    from tests.simulated import library, storages

    storages.install()
    return library.install()
