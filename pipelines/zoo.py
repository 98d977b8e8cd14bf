"""Real architectures at real sizes with random weights: benchmarks without downloads.

Knows names, ordinary call settings and how to build each pipeline; configurations are in
`zoo_configs`, published parameter counts in `zoo_published`. The pictures are noise: the work a GPU
does to make them is that of the real model, except for the length of prompts, which small built-in
tokenizers decide.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from accel.pipelines.errors import AccelError
from accel.pipelines.machine import free_memory_bytes
from accel.pipelines.names import instead
from accel.pipelines.recipe import Recipe
from accel.pipelines.zoo_configs import RECIPES

LOW_QUALITY = "blurry, low quality"

# What a person would call each pipeline with; the sizes are those of this project's benchmarks.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "zimage": {"height": 512, "width": 512, "num_inference_steps": 9, "guidance_scale": 0.0},
    "qwenimage": {
        "height": 512,
        "width": 512,
        "num_inference_steps": 50,
        "true_cfg_scale": 4.0,
        "negative_prompt": LOW_QUALITY,
    },
    "flux": {"height": 512, "width": 512, "num_inference_steps": 28, "guidance_scale": 3.5},
    "sdxl": {"height": 512, "width": 512, "num_inference_steps": 30, "guidance_scale": 5.0},
    "sd15": {"height": 512, "width": 512, "num_inference_steps": 30, "guidance_scale": 7.5},
    "sd35m": {"height": 512, "width": 512, "num_inference_steps": 40, "guidance_scale": 4.5},
    "sana": {
        "height": 1024,
        "width": 1024,
        "num_inference_steps": 20,
        "guidance_scale": 4.5,
        "use_resolution_binning": False,
    },
    "pixart": {
        "height": 1024,
        "width": 1024,
        "num_inference_steps": 20,
        "guidance_scale": 4.5,
        "use_resolution_binning": False,
        "clean_caption": False,
    },
    "wan": {
        "height": 480,
        "width": 832,
        "num_frames": 81,
        "num_inference_steps": 50,
        "guidance_scale": 5.0,
        "negative_prompt": LOW_QUALITY,
    },
}
_DTYPES = {"sdxl": torch.float16, "sd15": torch.float16}


def names() -> list[str]:
    """The models of the zoo, e.g. `"zimage"`."""
    return list(RECIPES)


def defaults(name: str) -> dict[str, Any]:
    """Keyword arguments of an ordinary call: `pipe(prompt, **zoo.defaults(name))`.

    Sizes are in pixels; set `height`, `width` or `num_inference_steps` in the copy to change them.
    """
    _recipe(name)
    return dict(_DEFAULTS[name])


def dtype(name: str) -> torch.dtype:
    """The number format in which the model is usually run."""
    _recipe(name)
    return _DTYPES.get(name, torch.bfloat16)


def build(
    name: str,
    device: str | torch.device = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    parts: Iterable[str] | str = "all",
) -> Any:
    """The whole stock pipeline `name` on `device`, random finite weights, no downloads.

    Parameters are drawn on the device (Z-Image's 10 billion take 20 GB in bf16 and seconds);
    buffers are what the models compute. The same seed, device kind and dtype give the same weights.
    `parts` limits which components are built, e.g. `("transformer",)`; the others are None.
    Raises ValueError for a name or part that does not exist, `AccelError` if main memory, should it
    be the device's, has no room for the whole pipeline's weights: the system would end the process.
    """
    chosen = (parts,) if isinstance(parts, str) else tuple(parts)
    if chosen == ("all",) and torch.device(device).type == "cpu":
        _refuse_without_room(name, dtype)
    return _recipe(name).assemble(device, dtype, seed, None if chosen == ("all",) else chosen)


def _refuse_without_room(name: str, dtype: torch.dtype) -> None:
    free, needed = free_memory_bytes(), sum(parameter_counts(name).values()) * dtype.itemsize
    if free is not None and needed > free:
        sizes = f"take {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free here"
        helps = "take a smaller --dtype, a smaller model, or a GPU that has room for them"
        raise AccelError(f"out of memory: the weights of {name} {sizes}: {helps}")


def parameter_counts(name: str) -> dict[str, int]:
    """Parameters of every part, counted on the meta device: takes seconds and no memory.

    `zoo_published.PUBLISHED` has the published figures to compare with.
    """
    return _recipe(name).parameter_counts()


def _recipe(name: str) -> Recipe:
    if name not in RECIPES:
        meant = instead(name, RECIPES, f"name may be {', '.join(RECIPES)}")
        raise ValueError(f"the zoo has no model {name!r}; {meant}")
    return RECIPES[name]
