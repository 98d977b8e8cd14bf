"""A model split over two ranks by transformers' tp_plan gives what the whole one gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import GPU_COUNT
from tests.patches.llm_families import tiny_lm

HERE = Path(__file__).parent


def on_two_ranks(folder: Path, device: str) -> dict[str, Any]:
    """What the first of two ranks printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(HERE / "llm_rank.py"), str(folder), device],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(HERE.parent.parent)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_two_ranks_on_the_host(family: str, tmp_path: Path) -> None:
    tiny_lm(family, vocab_size=98).save_pretrained(tmp_path)  # transformers 5.17 halves it
    for found in on_two_ranks(tmp_path, "cpu").values():
        assert found["declined"] is None
        assert found["worst"] < 1e-5
        assert (found["replays"], found["eager_passes"]) == (0, 4)


@pytest.mark.gpu
@pytest.mark.skipif(GPU_COUNT < 2, reason="needs two GPUs")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_two_gpus(family: str, tmp_path: Path) -> None:
    tiny_lm(family, vocab_size=98).save_pretrained(tmp_path)  # transformers 5.17 halves it
    for mode, found in on_two_ranks(tmp_path, "cuda").items():
        assert found["declined"] is None, found
        assert found["worst"] < 1e-4, found
        assert found["replays"] == (0 if mode == "eager" else 4), found
