"""Libraries are hushed for the length of a block, and talk again after it."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import transformers

from accel.pipelines.hushing import hushed, no_word_on_torchvision

LOG = logging.getLogger("transformers.utils.import_utils")


@pytest.fixture(autouse=True)
def _talkative() -> Iterator[None]:
    """Other tests of this process have switched the library to silence, as the commands do."""
    logs = transformers.utils.logging
    before = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_warning()
    logs.enable_progress_bar()
    yield
    logs.set_verbosity(before[0])
    if not before[1]:
        logs.disable_progress_bar()


def test_advice_and_bars_come_back_after_an_error_too() -> None:
    logs = transformers.utils.logging
    with pytest.raises(RuntimeError), hushed(transformers):
        assert (logs.get_verbosity(), logs.is_progress_bar_enabled()) == (logging.ERROR, False)
        raise RuntimeError
    assert (logs.get_verbosity(), logs.is_progress_bar_enabled()) == (logging.WARNING, True)


def test_bars_that_were_off_stay_off() -> None:
    logs = transformers.utils.logging
    logs.disable_progress_bar()
    with hushed(transformers):
        pass
    assert not logs.is_progress_bar_enabled()


def test_one_remark_is_left_out_and_no_other() -> None:
    heard: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    LOG.addHandler(listener)
    try:
        with no_word_on_torchvision():
            LOG.error("`%s` requires torchvision (not installed)", "SomeImageProcessor")
            LOG.error("something else")
        LOG.error("`%s` requires torchvision (not installed)", "SomeImageProcessor")
    finally:
        LOG.removeHandler(listener)
    assert heard == [
        "something else",
        "`SomeImageProcessor` requires torchvision (not installed)",
    ]


def test_the_zoo_says_nothing_on_torchvision() -> None:
    """In a process that imports diffusers' pipelines for the first time."""
    program = "from accel.pipelines import recipe; recipe.stock_class('StableDiffusionPipeline')"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert "torchvision" not in said.stdout + said.stderr
