"""The demo on a GPU: patched, it draws the same bytes."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import accel
from accel.pipelines.demo import DEFAULT_GUIDANCE, DEFAULT_STEPS, load_demo

PROMPTS = ("a red circle on a blue background", "two green stars", "a house")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def drawn(pipe: Any, prompt: str, seed: int, output_type: str) -> Any:
    return pipe(
        prompt,
        num_inference_steps=DEFAULT_STEPS,
        guidance_scale=DEFAULT_GUIDANCE,
        generator=torch.Generator().manual_seed(seed),
        output_type=output_type,
    ).images[0]


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_demo_draws_the_same_bytes_with_and_without(dtype: torch.dtype) -> None:
    pipe = load_demo().to("cuda", dtype)
    pipe.set_progress_bar_config(disable=True)
    calls = [(prompt, seed) for seed in (1, 2) for prompt in PROMPTS]
    pictures = [drawn(pipe, *call, "pil") for call in calls]
    latents = [drawn(pipe, *call, "latent") for call in calls]
    for capture in ("auto", "always"):  # whether it pays depends on who else has the GPU
        accel.patch(pipe, capture=capture)
        for call, picture, latent in zip(calls, pictures, latents, strict=True):
            assert np.asarray(picture).std() > 5
            assert png(drawn(pipe, *call, "pil")) == png(picture)
            assert torch.equal(drawn(pipe, *call, "latent"), latent)
    assert accel.report(pipe)["unet"].replays > 50
    accel.unpatch(pipe)
    assert png(drawn(pipe, *calls[0], "pil")) == png(pictures[0])
