"""Libraries that hold their tongue for the length of a block, and only that long.

This module knows the switches of diffusers' and transformers' logs. The command line, which never
gives them back, has `loading.quiet`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import ModuleType

_ON_TORCHVISION = "requires torchvision"


@contextlib.contextmanager
def hushed(*libraries: ModuleType) -> Iterator[None]:
    """Without progress bars and advice of `libraries`, which are diffusers and transformers or one
    of them; what they log as an error is said."""
    with contextlib.ExitStack() as stack:
        for logs in (library.utils.logging for library in libraries):
            stack.callback(logs.set_verbosity, logs.get_verbosity())
            logs.set_verbosity_error()
            if logs.is_progress_bar_enabled():
                stack.callback(logs.enable_progress_bar)
                logs.disable_progress_bar()
        yield


@contextlib.contextmanager
def no_word_on_torchvision() -> Iterator[None]:
    """Without transformers' remark, made as diffusers' pipelines import their image processors,
    that it takes those of pillow where torchvision is not installed: nobody here needs them."""
    log = logging.getLogger("transformers.utils.import_utils")

    def about_something_else(record: logging.LogRecord) -> bool:
        return _ON_TORCHVISION not in record.getMessage()

    log.addFilter(about_something_else)
    try:
        yield
    finally:
        log.removeFilter(about_something_else)
