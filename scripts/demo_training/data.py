"""Captioned scenes on the device: pixels for the autoencoder, latents and tokens for the denoiser.

The set grows while scenes are drawn. Only the thread that trains touches the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from demo_training.studio import CAPTIONS, CHUNK, Studio

Encode = Callable[[torch.Tensor], torch.Tensor]
"""Scaled latents, in half precision, of pictures in [-1, 1]."""

AT_ONCE = 125
"""Pictures that are encoded together."""


class Dataset:
    """Scenes on the device: pixels (uint8) of the first `kept`, latents of all, tokens of all.

    `ready` of them may be drawn from; `pictures` of those have pixels.
    """

    def __init__(self, studio: Studio, device: torch.device, kept: int, seed: int) -> None:
        count, side = studio.scenes, studio.side
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)
        self._studio = studio
        self._encode: Encode | None = None
        kept = min(kept, count)
        self.pixels = torch.empty((kept, side, side, 3), dtype=torch.uint8, device=device)
        shape = (count, CAPTIONS, studio.tokens)
        self.tokens = torch.empty(shape, dtype=torch.int16, device=device)
        self.latents = torch.empty(0, device=device)
        self.ready = self.pictures = 0

    @property
    def complete(self) -> bool:
        """Whether every scene is here."""
        return self.ready == len(self.tokens)

    def grow(self) -> bool:
        """Takes in one chunk, if one is drawn and, without an encoder, its pixels can be kept."""
        if self.complete or (self._encode is None and self.pictures == len(self.pixels)):
            return False
        drawn = self._studio.collect()
        if drawn is None:
            return False
        pixels, tokens = (torch.from_numpy(array).to(self.device) for array in drawn)
        low, high = self.ready, self.ready + CHUNK
        self.tokens[low:high] = tokens
        if self._encode is not None:
            self._store(low, pixels)
        if self.pictures == low and self.pictures + CHUNK <= len(self.pixels):
            self.pixels[low:high] = pixels
            self.pictures = high
        self.ready = high
        return True

    def wait_for(self, scenes: int) -> None:
        """Returns when at least `scenes` are ready (all of them, if there are fewer)."""
        while self.ready < min(scenes, len(self.tokens)):
            if not self.grow():
                time.sleep(0.005)

    @torch.no_grad()
    def encode_with(self, encode: Encode) -> None:
        """Encodes the scenes that are here, and from now on every scene that comes."""
        self._encode = encode
        for low in range(0, self.ready, CHUNK):
            self._store(low, self.pixels[low : low + CHUNK])

    @torch.no_grad()
    def _store(self, low: int, pixels: torch.Tensor) -> None:
        assert self._encode is not None
        for first in range(0, len(pixels), AT_ONCE):
            latents = self._encode(as_signal(pixels[first : first + AT_ONCE]))
            if not len(self.latents):
                shape = (len(self.tokens), *latents.shape[1:])
                self.latents = torch.empty(shape, dtype=torch.float16, device=self.device)
            self.latents[low + first : low + first + len(latents)] = latents

    def crops(self, count: int, side: int) -> torch.Tensor:
        """(count, 3, side, side) squares cut out of random pictures, in [-1, 1], float32."""
        chosen = self._random(self.pictures, count)
        room = self.pixels.shape[1] - side + 1
        across = torch.arange(side, device=self.device)
        rows, columns = (self._random(room, count)[:, None] + across for _ in range(2))
        return as_signal(self.pixels[chosen[:, None, None], rows[:, :, None], columns[:, None]])

    def latents_and_tokens(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random latents, float32, each with the tokens of one of its captions, int64."""
        chosen, wording = self._random(self.ready, count), self._random(CAPTIONS, count)
        return self.latents[chosen].float(), self.tokens[chosen, wording].long()

    def _random(self, below: int, count: int) -> torch.Tensor:
        return torch.randint(below, (count,), device=self.device, generator=self.generator)


def as_signal(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 (n, height, width, 3) as float32 (n, 3, height, width) in [-1, 1]."""
    return pixels.permute(0, 3, 1, 2).float().div(127.5).sub(1)
