"""Modular pipelines: components are patched in place, blocks see the same signatures."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import accel
from accel.pipelines import tiny

NAMES = ["sdxl", "flux"]


def modular(folder: Path, device: torch.device) -> Any:
    """The saved tiny pipeline as a `ModularPipeline` on `device`."""
    from diffusers import ModularPipeline

    pipe = ModularPipeline.from_pretrained(str(folder))
    pipe.load_components()
    return pipe.to(device)


def drawn(pipe: Any, seed: int, name: str) -> np.ndarray:
    """The picture for a seed, as numbers."""
    size = {key: tiny.CALLS[name][key] for key in ("height", "width") if key in tiny.CALLS[name]}
    pictures = pipe(
        prompt="a red circle",
        num_inference_steps=4,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
        output="images",
        **size,
    )
    return np.asarray(pictures[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_modular_pipeline_draws_the_same_pictures(
    device: torch.device, tmp_path: Path, name: str
) -> None:
    tiny.save_pipeline(tmp_path / "saved", name)
    pipe = modular(tmp_path / "saved", device)
    denoiser = getattr(pipe, "transformer", None) or pipe.unet
    parameters = inspect.signature(denoiser.forward)
    expected = [drawn(pipe, seed, name) for seed in (1, 2, 3)]
    kind = type(pipe)
    assert accel.patch(pipe, capture="always") is pipe
    assert type(pipe) is kind
    assert inspect.signature(denoiser.forward) == parameters
    for seed, picture in zip((1, 2, 3), expected, strict=True):
        assert picture.std() > 0
        assert np.array_equal(drawn(pipe, seed, name), picture)
    parts = {part.kind: part for part in accel.report(pipe).parts}
    assert parts[type(denoiser).__name__].replays > 0
    accel.unpatch(pipe)
    assert np.array_equal(drawn(pipe, 1, name), expected[0])
