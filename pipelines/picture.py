"""Pictures on disk: PNG bytes with the settings inside, and the settings out of a PNG again.

The chunk `accel` holds JSON: the settings, and under `made_with` what it was made with. Nothing in
it depends on the time or on the path written to, so the same settings give the same bytes.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.pipelines.errors import AccelError, BadInput, first_line
from accel.pipelines.settings import Settings

if TYPE_CHECKING:
    from PIL.Image import Image

CHUNK = "accel"


def png_bytes(
    image: Image, settings: Settings | None = None, made_with: dict[str, Any] | None = None
) -> bytes:
    """`image` as the bytes of a PNG file; with `settings`, they are its metadata."""
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    if settings is not None:
        content = {**settings.to_dict(), "made_with": made_with or {}}
        info.add_itxt(CHUNK, json.dumps(content, sort_keys=True, ensure_ascii=False))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", pnginfo=info)
    return buffer.getvalue()


def write(path: Path, content: bytes) -> None:
    """Writes a whole file or none: a picture cut short by Ctrl-C or a full disk would look done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".accel-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise AccelError(f"{path} cannot be written: {error.strerror or error}") from error


def read_settings(path: Path) -> tuple[Settings, dict[str, Any]]:
    """The settings inside a PNG and what it was made with. Raises `BadInput` without them."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.load()
            text = getattr(image, "text", {}).get(CHUNK)
    except OSError as error:
        raise BadInput(
            f"--from {path}: no picture can be read there: {first_line(error)}"
        ) from error
    if text is None:
        raise BadInput(f"--from {path}: the picture carries no settings of accel")
    try:
        content = json.loads(text)
        return Settings.from_dict(content), dict(content.get("made_with", {}))
    except (ValueError, TypeError, AttributeError) as error:
        raise BadInput(f"--from {path}: unreadable settings: {first_line(error)}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
