"""Trains the autoencoder, or its decoder alone, and encodes pictures with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers import AutoencoderTiny

from demo_training.data import Dataset
from demo_training.pace import shares
from demo_training.parts import normalise
from demo_training.replay import recorded

Log = Callable[[str], None]

EDGE_WEIGHT = 0.5
MOMENT_WEIGHT = 0.003
LATENT_NOISE = 0.05
CROP = 128
"""Side of the squares that the autoencoder learns on: it is local, and steps are worth more."""


class AutoencoderTraining:
    """Teaches the autoencoder to reproduce pictures: L1 on pixels and on their differences.

    A penalty keeps every latent channel near zero mean and unit variance; a little noise on the
    latents prepares the decoder for what the denoiser leaves. `decoder_only` leaves the encoder,
    and so the latents that a denoiser was trained on, as they are.
    """

    def __init__(
        self, vae: AutoencoderTiny, data: Dataset, batch: int, *, decoder_only: bool
    ) -> None:
        self.vae, self.data, self.size, self.decoder_only = vae, data, batch, decoder_only
        vae.train().requires_grad_(True).to(data.device, memory_format=torch.channels_last)
        vae.encoder.requires_grad_(not decoder_only)
        self.crop = min(CROP, data.pixels.shape[1])
        pictures = data.crops(batch, self.crop)
        if not decoder_only:
            with torch.no_grad():
                normalise(vae, vae.encode(pictures).latents)
        self.pictures = pictures.contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            self.noise = torch.empty_like(vae.encode(self.pictures).latents)
        self.weights = [weight for weight in vae.parameters() if weight.requires_grad]
        self.rate = torch.zeros((), device=data.device)
        self.optimizer = torch.optim.AdamW(
            self.weights,
            lr=self.rate,
            betas=(0.9, 0.99),
            weight_decay=1e-4,
            fused=True,
            capturable=data.device.type == "cuda",
        )
        self.figures = torch.zeros(2, device=data.device)  # L1 of pixels and of edges
        self.fill()

    def run(self, until: float, rate: float, log: Log) -> int:
        """Trains until the clock reads `until`, taking in new scenes; the number of steps."""
        update, last = recorded(self.update, self.data.device, log), -1
        for step, factor in shares(until, warm_up=50):
            self.data.grow()
            self.rate.fill_(rate * factor)
            self.fill()
            update()
            if step % 200 == 0:
                pixels, edges = self.figures.tolist()
                log(f"autoencoder step {step}: L1 {pixels:.4f}, edges {edges:.4f}")
            elif step % 10 == 0:
                self.figures.tolist()  # keeps the host from running ahead of the clock
            last = step
        self.vae.eval().requires_grad_(False)
        return last + 1

    def fill(self) -> None:
        """Cuts other squares and draws other noise, into the buffers."""
        self.pictures.copy_(self.data.crops(self.size, self.crop))
        self.noise.normal_(generator=self.data.generator)

    def update(self) -> None:
        """One step on the squares in the buffers; their errors go to `figures`."""
        for weight in self.weights:
            weight.grad = None
        with half_precision(self.data.device):
            latents = self.vae.encode(self.pictures).latents
            drawn = self.vae.decode(latents + LATENT_NOISE * self.noise).sample
        error = drawn.float() - self.pictures
        pixels = error.abs().mean()
        edges = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
        loss = pixels + EDGE_WEIGHT * edges
        if not self.decoder_only:
            loss = loss + MOMENT_WEIGHT * _moments(latents.float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.figures.copy_(torch.stack([pixels.detach(), edges.detach()]))


def _moments(latents: torch.Tensor) -> torch.Tensor:
    """How far the channels are from zero mean and unit variance."""
    variance, mean = torch.var_mean(latents, dim=(0, 2, 3))
    return (mean**2 + (variance + 1e-4).log() ** 2).mean()


@torch.no_grad()
def scale_latents(vae: AutoencoderTiny, data: Dataset) -> None:
    """Sets the autoencoder's scaling factor so that its latents have unit variance."""
    latents = [vae.encode(data.crops(50, data.pixels.shape[1])).latents for _ in range(20)]
    vae.register_to_config(scaling_factor=1 / torch.cat(latents).std().item())


def encode_data(vae: AutoencoderTiny, data: Dataset) -> None:
    """Lets `data` encode its scenes, those that come too."""
    vae.to(data.device, memory_format=torch.channels_last)

    def encode(pictures: torch.Tensor) -> torch.Tensor:
        with half_precision(pictures.device):
            pictures = pictures.contiguous(memory_format=torch.channels_last)
            latents: torch.Tensor = vae.encode(pictures).latents
        scaled: torch.Tensor = latents.float() * vae.config.scaling_factor
        return scaled.half()

    data.encode_with(encode)


def half_precision(device: torch.device) -> torch.autocast:
    """bfloat16 for the matrix work on a GPU; rehearsals on a CPU stay in float32."""
    # Casts that a cache remembers from outside a graph would be missing inside it.
    enabled = device.type == "cuda"
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)
