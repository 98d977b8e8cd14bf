"""A fake accelerator for tests: device "sim". Importing this package makes torch know it."""

from tests.simulated import library, storages
from tests.simulated.backend import SimulatedBackend, python_asks_is_capturing, reset_device
from tests.simulated.device import CaptureError

_libraries = library.install()
storages.install()

__all__ = ["CaptureError", "SimulatedBackend", "python_asks_is_capturing", "reset_device"]
