"""Which versions are installed, and which were tested. Imports none of what it asks about."""

from __future__ import annotations

import platform
from importlib import metadata

# Lowest and highest version this project's tests ran with. README names the same.
TESTED = {
    "python": ("3.11", "3.12"),
    "torch": ("2.11", "2.13"),
    "diffusers": ("0.42", "0.42"),
    "transformers": ("5.17", "5.24"),
}
PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "peft",
    "triton",
    "flashinfer-python",
)
DISTRIBUTION = "accel-graph"


def installed(package: str) -> str | None:
    """The installed version of `package`, or None."""
    if package == "python":
        return platform.python_version()
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def made_with() -> dict[str, str]:
    """The versions that decide a picture's bytes."""
    names = {"accel": DISTRIBUTION, "torch": "torch", "diffusers": "diffusers", "pillow": "pillow"}
    names["transformers"] = "transformers"
    return {name: installed(package) or "absent" for name, package in names.items()}


def outside_tested(package: str, version: str) -> bool:
    """Whether `version` lies outside what was tested, at the precision of the table.

    >>> outside_tested("torch", "2.13.0+cpu"), outside_tested("torch", "2.99.1")
    (False, True)
    """
    low, high = (_numbers(bound, 2) for bound in TESTED[package])
    return not low <= _numbers(version, 2) <= high


def tested_range(package: str) -> str:
    """`2.11 to 2.13`, or `0.42` where only one was tested."""
    low, high = TESTED[package]
    return low if low == high else f"{low} to {high}"


def tested_sentence() -> str:
    """The sentence that README holds."""
    parts = [f"{'Python' if n == 'python' else n} {tested_range(n)}" for n in TESTED]
    return f"Tested with {', '.join(parts)}."


def _numbers(version: str, count: int) -> tuple[int, ...]:
    plain = version.partition("+")[0]
    pieces = [piece for piece in plain.split(".") if piece.isdigit()]
    return tuple(int(piece) for piece in pieces[:count])
