"""Trains the denoiser and its text encoder on cached latents.

Rectified flow: x = (1 - s) * latent + s * noise, the denoiser predicts noise - latent (Liu et al.,
"Flow Straight and Fast").
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy

import torch
import torch.nn.functional as F

from demo_training.data import Dataset
from demo_training.masters import Masters
from demo_training.pace import shares
from demo_training.parts import Parts
from demo_training.replay import recorded

Log = Callable[[str], None]

UNPROMPTED = 0.1
"""Share of training pictures whose prompt is left out, for classifier-free guidance."""

USUAL, EARLY = 0.45, 0.40
"""Shares of logit-normal and of nearly pure noise; the rest is even."""

EARLY_SHIFT = 6.0
WARM_UP = 400
GROW_EVERY = 4
"""Steps between two looks for newly drawn scenes."""


def noise_levels(count: int, generator: torch.Generator) -> torch.Tensor:
    """Random shares of noise, (count,), in three parts.

    Logit-normal ones as in Esser et al., "Scaling Rectified Flow Transformers": shapes and edges.
    Early ones, s = c * u / (1 + (c - 1) * u): what stands where, which a prompt's relations decide,
    is settled above s = 0.85. Even ones: the sampler's last steps lie in the thin tails.
    """
    device = generator.device
    choice, even = torch.rand(2, count, device=device, generator=generator)
    usual = torch.sigmoid(torch.randn(count, device=device, generator=generator) + 0.5)
    early = EARLY_SHIFT * even / (1 + (EARLY_SHIFT - 1) * even)
    return torch.where(choice < USUAL, usual, torch.where(choice < USUAL + EARLY, early, even))


class Batch:
    """The inputs of a step, in buffers that stay where they are."""

    def __init__(self, data: Dataset, size: int, empty: torch.Tensor) -> None:
        self.size, self._data, self._empty = size, data, empty
        latents, self.tokens = data.latents_and_tokens(size)
        self.latents = latents.contiguous(memory_format=torch.channels_last)
        self.noise = torch.empty_like(self.latents)
        self.sigma = torch.empty(size, device=data.device)
        self.fill()

    def fill(self) -> None:
        """Draws other scenes, wordings, noise and noise levels."""
        generator = self._data.generator
        latents, tokens = self._data.latents_and_tokens(self.size)
        chance = torch.rand(self.size, 1, device=generator.device, generator=generator)
        self.latents.copy_(latents)
        self.tokens.copy_(torch.where(chance < UNPROMPTED, self._empty, tokens))
        self.noise.normal_(generator=generator)
        self.sigma.copy_(noise_levels(self.size, generator))


class DenoiserTraining:
    """Moves low-precision copies of the denoiser and the text encoder; `publish` writes back."""

    def __init__(self, parts: Parts, data: Dataset, batch: int, decay: float = 0.999) -> None:
        self.parts, self.data = parts, data
        self.dtype = torch.bfloat16 if data.device.type == "cuda" else torch.float32
        layout = torch.channels_last
        self.unet = deepcopy(parts.unet).to(data.device, self.dtype, memory_format=layout)
        self.text = deepcopy(parts.text_encoder).to(data.device, self.dtype)
        for module in (self.unet, self.text):
            module.train().requires_grad_(True)
        weights = [*self.unet.parameters(), *self.text.parameters()]
        self.masters = Masters(weights, self._originals(), decay)
        empty = parts.tokenizer([""], padding="max_length", return_tensors="pt").input_ids
        self.batch = Batch(data, batch, empty.to(data.device))
        length = data.tokens.shape[-1]
        # What the encoder does without a mask, said outright: left to itself, transformers builds a
        # mask anew while a graph is captured.
        self.causal = torch.ones(1, 1, length, length, dtype=torch.bool, device=data.device).tril()
        self.figures = torch.zeros(2, device=data.device)  # loss and gradient norm of a step

    def run(
        self,
        until: float,
        rate: float,
        log: Log,
        checkpoints: list[float],
        visit: Callable[[], None],
    ) -> int:
        """Trains until the clock reads `until`, calling `visit` as it passes each checkpoint; the
        number of steps."""
        waiting, last, resting = sorted(checkpoints), -1, 0.0
        update = recorded(self.update, self.data.device, log)
        begin = time.monotonic()
        for step, factor in shares(until, WARM_UP):
            if step % GROW_EVERY == 0:
                self.data.grow()
            self.masters.set(step, rate * factor)
            self.batch.fill()
            update()
            if step % 250 == 0:
                speed = (step + 1) / (time.monotonic() - begin - resting)
                loss, norm = self.figures.tolist()
                log(f"denoiser step {step}: loss {loss:.4f}, norm {norm:.2f}, {speed:.1f} steps/s")
            elif step % 10 == 0:
                self.figures.tolist()  # keeps the host from running ahead of the clock
            if waiting and (now := time.monotonic()) >= waiting[0]:
                waiting.pop(0)
                self.publish()
                visit()
                resting += time.monotonic() - now
            last = step
        self.publish()
        return last + 1

    def update(self) -> None:
        """One step on the batch in the buffers; loss and gradient norm go to `figures`."""
        self.masters.forget_gradients()
        loss = self.loss()
        loss.backward()
        norm = self.masters.step()
        self.figures.copy_(torch.stack([loss.detach(), norm]))

    def loss(self) -> torch.Tensor:
        """The mean squared error of the predicted flow on the batch."""
        batch = self.batch
        spread = batch.sigma[:, None, None, None]
        noisy = ((1 - spread) * batch.latents + spread * batch.noise).to(self.dtype)
        context = self.text(batch.tokens, attention_mask=self.causal).last_hidden_state
        timesteps = (batch.sigma * 1000).long()
        flow = self.unet(noisy, timesteps, context, return_dict=False)[0]
        return F.mse_loss(flow.float(), batch.noise - batch.latents)

    def publish(self) -> None:
        """Writes the running means into the parts."""
        self.masters.write_means(self._originals())

    def _originals(self) -> list[torch.Tensor]:
        return [*self.parts.unet.parameters(), *self.parts.text_encoder.parameters()]
