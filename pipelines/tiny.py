"""Tiny models with random weights, for tests: denoiser families, whole pipelines, pipeline folders.

Knows where each kind is described and makes it; nothing here needs a GPU or a network, and nothing
here says anything about speed or picture quality.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from accel.pipelines.names import instead
from accel.pipelines.tiny_adapters import ADAPTER_FAMILIES
from accel.pipelines.tiny_controlnets import CONTROLNET_FAMILIES
from accel.pipelines.tiny_family import Family
from accel.pipelines.tiny_flex_videos import FLEX_FAMILIES as FLEX_FAMILIES
from accel.pipelines.tiny_images import IMAGE_FAMILIES
from accel.pipelines.tiny_more_images import MORE_IMAGE_FAMILIES
from accel.pipelines.tiny_more_unets import MORE_UNET_FAMILIES
from accel.pipelines.tiny_more_videos import MORE_VIDEO_FAMILIES
from accel.pipelines.tiny_older_images import OLDER_IMAGE_FAMILIES
from accel.pipelines.tiny_recipes import RECIPES
from accel.pipelines.tiny_unets import UNET_FAMILIES
from accel.pipelines.tiny_videos import VIDEO_FAMILIES

FAMILIES: dict[str, Family] = {
    **IMAGE_FAMILIES,
    **MORE_IMAGE_FAMILIES,
    **OLDER_IMAGE_FAMILIES,
    **UNET_FAMILIES,
    **MORE_UNET_FAMILIES,
    **CONTROLNET_FAMILIES,
    **ADAPTER_FAMILIES,
    **VIDEO_FAMILIES,
    **MORE_VIDEO_FAMILIES,
}
"""Every tiny denoiser by name; `FAMILIES["flux"].make(seed)` and `.inputs(seed, variant)`.

`FLEX_FAMILIES` holds those that run on the CPU and on GPUs, but on no test double of a device.
"""

# Smallest call that draws a picture; long-prompt encoders are told to stop early.
CALLS: dict[str, dict[str, Any]] = {
    name: {"height": 64, "width": 64, "num_inference_steps": 3} for name in RECIPES
}
CALLS["flux"]["max_sequence_length"] = 32
CALLS["sd3"]["max_sequence_length"] = 32
CALLS["pixart"].update(max_sequence_length=32, use_resolution_binning=False)
CALLS["sana"].update(max_sequence_length=64, use_resolution_binning=False)
CALLS["zimage"].update(max_sequence_length=64, guidance_scale=0.0)
CALLS["wan"].update(num_frames=5, height=32, width=32)
CALLS["qwenimage"].update(true_cfg_scale=4.0, negative_prompt="blurry")


def pipeline_names() -> list[str]:
    """The names that `pipeline` and `save_pipeline` take."""
    return list(RECIPES)


def pipeline(name: str, seed: int = 0) -> Any:
    """A complete tiny pipeline on the CPU in float32, random weights, tokenizers included.

    `pipe("a red circle", **tiny.CALLS[name])` draws a 64x64 picture (wan: five 32x32 frames)
    in well under a second.
    Raises ValueError for an unknown name.
    """
    if name not in RECIPES:
        meant = instead(name, RECIPES, f"name may be {', '.join(RECIPES)}")
        raise ValueError(f"no tiny pipeline {name!r}; {meant}")
    return RECIPES[name]().assemble("cpu", torch.float32, seed)


def save_pipeline(folder: str | Path, name: str, seed: int = 0) -> Path:
    """Writes `pipeline(name, seed)` as a folder that `DiffusionPipeline.from_pretrained` loads."""
    folder = Path(folder)
    pipeline(name, seed).save_pretrained(folder)
    return folder
