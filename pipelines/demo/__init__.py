"""The built-in text-to-image model: a stock diffusers pipeline small enough to ship.

This module knows where the saved pipeline lies and how it is best sampled. Importing it brings in
neither torch nor diffusers; `load_demo` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from accel.pipelines.demo.words import known_words, notice, translate
from accel.pipelines.hushing import hushed, no_word_on_torchvision

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

SIZE = 256
"""Width and height of the demo model's pictures, in pixels."""

DEFAULT_STEPS = 16
"""Denoising steps that the saved scheduler needs for a finished picture."""

DEFAULT_GUIDANCE = 3.0
"""Classifier-free guidance scale at which the demo model follows prompts best."""

__all__ = [
    "DEFAULT_GUIDANCE",
    "DEFAULT_STEPS",
    "SIZE",
    "demo_folder",
    "known_words",
    "load_demo",
    "notice",
    "translate",
]


def demo_folder() -> Path:
    """The folder of the saved pipeline, as `DiffusionPipeline.from_pretrained` takes it.

    Raises FileNotFoundError where the installation came without the weights.
    """
    folder = Path(__file__).parent / "model"
    if not (folder / "model_index.json").is_file():
        raise FileNotFoundError(
            f"the built-in demo model is missing from {folder}: reinstall the package, or train it "
            "with scripts/train_demo.py"
        )
    return folder


def load_demo() -> DiffusionPipeline:
    """The demo pipeline in float32 on the CPU; move it with `.to(…)` as any other."""
    import diffusers
    import torch
    import transformers

    with no_word_on_torchvision():
        from diffusers import StableDiffusionPipeline
    # Bars for twelve megabytes, and that the autoencoder is of another class than usual.
    with hushed(diffusers, transformers):
        pipe = StableDiffusionPipeline.from_pretrained(
            demo_folder(), dtype=torch.float32, local_files_only=True
        )
    pipe.set_progress_bar_config(disable=True)
    return pipe
