"""What a picture is made of: `Settings` hold everything that decides its pixels.

They are plain data, go through JSON and back, and know nothing of pipelines or files.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from accel.pipelines.errors import BadInput
from accel.pipelines.machine import memory_bytes

_SIZE = re.compile(r"(\d+)(?:x(\d+))?")


@dataclass(frozen=True)
class Lora:
    """A LoRA file, folder or hub id, its scale, and the file's fingerprint where it is a file."""

    path: str
    scale: float = 1.0
    fingerprint: str | None = None

    @classmethod
    def parse(cls, text: str) -> Lora:
        """`PATH` or `PATH:scale`.

        >>> Lora.parse("style.safetensors:0.8").scale
        0.8
        """
        path, colon, scale = text.rpartition(":")
        try:
            return cls(path, float(scale)) if colon and path else cls(text)
        except ValueError:
            return cls(text)


@dataclass(frozen=True)
class Settings:
    """One picture. Sizes are in pixels; None leaves a value to the pipeline's own default.

    `extra` are further arguments of the pipeline's call, by name.
    """

    prompt: str = ""
    negative_prompt: str | None = None
    seed: int = 0
    steps: int | None = None
    guidance: float | None = None
    width: int | None = None
    height: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    model: str = "demo"
    dtype: str = "auto"
    loras: tuple[Lora, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Settings:
        """The settings in `data`; names that this version does not know are left out."""
        known = {f.name for f in fields(cls)}
        settings = cls(**{name: value for name, value in data.items() if name in known})
        return replace(settings, loras=tuple(Lora(**lora) for lora in data.get("loras", ())))

    def changed(self, **values: Any) -> Settings:
        """The settings with those `values` that are not None."""
        return replace(self, **{k: v for k, v in values.items() if v is not None})


BYTES_A_PIXEL = 64
"""The least that a picture takes while it is decoded: a few channels in float32. Most take more;
what is refused by this could only end with the process being killed."""


def parse_size(text: str) -> tuple[int, int]:
    """Width and height from `512` or `768x512`.

    >>> parse_size("768x512")
    (768, 512)
    """
    found = _SIZE.fullmatch(text.strip().lower())
    width, height = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if width < 1 or height < 1:
        raise BadInput(f"--size {text}: a size is 512 or 768x512 (width x height), in pixels")
    needed, memory = width * height * BYTES_A_PIXEL, memory_bytes()
    if memory is not None and needed > memory:
        raise BadInput(
            f"--size {text}: a picture of that size takes at least {needed >> 30} GiB to make, "
            f"this machine has {memory >> 30}: lower --size"
        )
    return width, height
