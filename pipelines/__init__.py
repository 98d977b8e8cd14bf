"""What a person runs: the command line, image generation, benchmarks, the built-in demo model."""

import sys

# Beside a clone called accel, an editable installation comes too late: the clone is a namespace,
# in which this room is found and the package's own names are not.
if sys.modules["accel"].__file__ is None:
    raise ImportError(
        f"Python took the folder {next(iter(sys.modules['accel'].__path__))} for the package "
        "accel: run this in that folder, or in any other that holds no folder called accel"
    )
