"""Parameter counts that the zoo's models are published with, and where each figure comes from.

Knows figures and their sources in words. A checkpoint's size in bytes, divided by the bytes a
number takes, is its parameter count; sources that round (a "12B" in a title) are not used.
"""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """A parameter count, and its source in words."""

    parameters: float
    source: str


CLIP_L = Published(123e6, "Stable Diffusion 1.x model card: 123M text encoder")
CLIP_L_PROJECTED = Published(123.65e6, "checkpoint: 247 MB in fp16, projection included")
CLIP_BIG_G = Published(694.7e6, "checkpoint: 1.39 GB in fp16; SDXL paper: 817M with CLIP-L")
T5_XXL = Published(4.76e9, "checkpoint of the encoder half of T5 v1.1 XXL: 9.52 GB in bf16")
VAE_4 = Published(83.65e6, "checkpoint: 335 MB in fp32")
VAE_16 = Published(83.8e6, "checkpoint: 168 MB in bf16")
VAE_WAN = Published(126.9e6, "checkpoint: 508 MB in fp32; papers of Wan and Qwen-Image: 127M")

PUBLISHED: dict[str, dict[str, Published]] = {
    "zimage": {
        "transformer": Published(6.15e9, "checkpoint: 12.3 GB in bf16; model card: 6B"),
        "text_encoder": Published(4.02e9, "checkpoint: 8.04 GB in bf16; Qwen3 model card: 4.0B"),
        "vae": VAE_16,
    },
    "qwenimage": {
        "transformer": Published(20.43e9, "checkpoint: 40.9 GB in bf16; paper: 20B"),
        "text_encoder": Published(8.29e9, "checkpoint of Qwen2.5-VL-7B: 16.6 GB in bf16"),
        "vae": VAE_WAN,
    },
    "flux": {
        "transformer": Published(11.9e9, "checkpoint: 23.8 GB in bf16; model card: 12B"),
        "text_encoder": CLIP_L,
        "text_encoder_2": T5_XXL,
        "vae": VAE_16,
    },
    "sdxl": {
        "unet": Published(2.567e9, "checkpoint: 5.14 GB in fp16; paper: 2.6B"),
        "text_encoder": CLIP_L,
        "text_encoder_2": CLIP_BIG_G,
        "vae": VAE_4,
    },
    "sd15": {
        "unet": Published(860e6, "model card: 860M UNet"),
        "text_encoder": CLIP_L,
        "vae": VAE_4,
    },
    "sd35m": {
        "transformer": Published(
            2.243e9, "checkpoint: 4.94 GB in bf16, less its 384x384x1536 table of positions"
        ),
        "text_encoder": CLIP_L_PROJECTED,
        "text_encoder_2": CLIP_BIG_G,
        "text_encoder_3": T5_XXL,
        "vae": VAE_16,
    },
    "sana": {
        "transformer": Published(1604e6, "paper: 1604M for Sana-1.6B"),
        "text_encoder": Published(2.61e9, "checkpoint of Gemma 2 2B: 5.23 GB in bf16"),
        "vae": Published(312e6, "checkpoint: 1.25 GB in fp32"),
    },
    "pixart": {
        "transformer": Published(611e6, "checkpoint: 2.44 GB in fp32; paper: 0.6B"),
        "text_encoder": T5_XXL,
        "vae": VAE_4,
    },
    "wan": {
        "transformer": Published(1.42e9, "checkpoint: 5.68 GB in fp32; model card: 1.3B"),
        "text_encoder": Published(5.68e9, "checkpoint of UMT5-XXL's encoder: 11.4 GB in bf16"),
        "vae": VAE_WAN,
    },
}
