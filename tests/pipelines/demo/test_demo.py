"""The demo package imports cheaply and says where its model should be."""

import subprocess
import sys
from pathlib import Path

import pytest

from accel.pipelines import demo


def test_importing_the_demo_brings_in_no_heavy_library() -> None:
    code = (
        "import sys, accel.pipelines.demo as demo; demo.notice('a cat'); "
        "print([name for name in ('torch', 'diffusers', 'numpy', 'PIL') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_missing_weights_are_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(FileNotFoundError, match=r"demo model is missing.*train_demo\.py"):
        demo.demo_folder()


def test_loading_says_nothing_and_leaves_the_libraries_talkative() -> None:
    program = (
        "import diffusers, transformers\n"
        "from accel.pipelines.demo import load_demo\n"
        "load_demo()\n"
        "for library in (diffusers, transformers):\n"
        "    assert library.utils.logging.is_progress_bar_enabled()\n"
        "    assert library.utils.logging.get_verbosity() == 30\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    for words in ("Loading", "Expected types", "torchvision"):
        assert words not in done.stderr
