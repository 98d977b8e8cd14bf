"""A fake accelerator for tests: device "sim". Importing this package makes torch know it."""

from tests.simulated import library
from tests.simulated.backend import SimulatedBackend, python_asks_is_capturing, reset_device
from tests.simulated.device import CaptureError, device

_libraries = library.install()

__all__ = ["CaptureError", "SimulatedBackend", "device", "python_asks_is_capturing", "reset_device"]
