"""What the simulated device raises. Importing this brings in nothing."""


class CaptureError(RuntimeError):
    """What the device says to work that a recording cannot hold."""
