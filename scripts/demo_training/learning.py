"""The two trainings: the autoencoder on pictures, then denoiser and text encoder on its latents.

Both run until a moment, not for a number of steps: the learning rate follows the elapsed share of
the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from copy import deepcopy

import torch
import torch.nn.functional as F
from diffusers import AutoencoderTiny

from demo_training.data import Dataset, as_signal
from demo_training.parts import Parts, normalise

Log = Callable[[str], None]

EDGE_WEIGHT = 0.5
MOMENT_WEIGHT = 0.003
LATENT_NOISE = 0.05
CROP = 128
"""Side of the squares that the autoencoder learns on: it is local, and steps are worth more."""
UNPROMPTED = 0.1
"""Share of training pictures whose prompt is left out, for classifier-free guidance."""


def shares(until: float, warm_up: int) -> Iterator[tuple[int, float]]:
    """(step, learning rate factor) until the clock (`time.monotonic`) reads `until`."""
    begin, step = time.monotonic(), 0
    while (now := time.monotonic()) < until:
        share = (now - begin) / (until - begin)
        yield step, min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * share))
        step += 1


def train_vae(
    vae: AutoencoderTiny, data: Dataset, until: float, batch: int, rate: float, log: Log
) -> None:
    """Teaches the autoencoder to reproduce pictures: L1 on pixels and on their differences.

    A penalty keeps every latent channel near zero mean and unit variance; a little noise on the
    latents prepares the decoder for what the denoiser leaves.
    """
    device, side = data.device, min(CROP, data.pixels.shape[1])
    vae.train().requires_grad_(True).to(device, memory_format=torch.channels_last)
    with torch.no_grad():
        normalise(vae, vae.encode(data.crops(batch, side)).latents)
    optimizer = torch.optim.AdamW(
        vae.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=1e-4, fused=True
    )
    for step, factor in shares(until, warm_up=50):
        _set_rate(optimizer, rate * factor)
        pictures = data.crops(batch, side).to(memory_format=torch.channels_last)
        with half_precision(device):
            latents = vae.encode(pictures).latents
            drawn = vae.decode(latents + LATENT_NOISE * torch.randn_like(latents)).sample
        error = drawn.float() - pictures
        pixels = error.abs().mean()
        edges = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
        loss = pixels + EDGE_WEIGHT * edges + MOMENT_WEIGHT * _moments(latents.float())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            log(f"vae step {step}: L1 {pixels.item():.4f}, edges {edges.item():.4f}")
        elif step % 10 == 0:
            pixels.item()  # keeps the host from running ahead of the clock
    vae.eval().requires_grad_(False)


def _moments(latents: torch.Tensor) -> torch.Tensor:
    """How far the channels are from zero mean and unit variance."""
    variance, mean = torch.var_mean(latents, dim=(0, 2, 3))
    return (mean**2 + (variance + 1e-4).log() ** 2).mean()


@torch.no_grad()
def cache_latents(vae: AutoencoderTiny, data: Dataset, batch: int) -> None:
    """Encodes every scene that is ready, sets the autoencoder's scaling factor so that latents have
    unit variance, and drops the pixels."""
    data.finish()
    count = data.ready
    data.latents = torch.cat(
        [
            _encoded(vae, as_signal(data.pixels[low : min(low + batch, count)])).half()
            for low in range(0, count, batch)
        ]
    )
    factor = 1 / data.latents[:5000].float().std().item()
    data.latents.mul_(factor)
    vae.register_to_config(scaling_factor=factor)
    data.pixels = data.pixels[:0].clone()


def _encoded(vae: AutoencoderTiny, pictures: torch.Tensor) -> torch.Tensor:
    with half_precision(pictures.device):
        return vae.encode(pictures.to(memory_format=torch.channels_last)).latents.float()


class Masters:
    """Float32 copies of low-precision weights: what the optimizer moves, and their running mean."""

    def __init__(self, modules: list[torch.nn.Module], rate: float, decay: float) -> None:
        self.weights = [weight for module in modules for weight in module.parameters()]
        self.masters = [weight.detach().float().clone() for weight in self.weights]
        self.means = [master.clone() for master in self.masters]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.decay = decay
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=rate, betas=(0.9, 0.99), weight_decay=0.01, fused=True
        )

    @torch.no_grad()
    def step(self, number: int, rate: float) -> torch.Tensor:
        """One update from the weights' gradients; the gradients' norm."""
        _set_rate(self.optimizer, rate)
        torch._foreach_copy_([m.grad for m in self.masters], [w.grad for w in self.weights])
        norm = torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        # The fused optimizer skips the update itself, without a word to the host.
        self.optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.masters)
        for weight in self.weights:
            weight.grad = None
        decay = min(self.decay, (number + 1) / (number + 10))
        torch._foreach_lerp_(self.means, self.masters, 1 - decay)
        return norm

    @torch.no_grad()
    def write_means(self, modules: list[torch.nn.Module]) -> None:
        """Puts the running means into copies of the modules."""
        targets = [weight for module in modules for weight in module.parameters()]
        torch._foreach_copy_(targets, self.means)


class DenoiserTraining:
    """Rectified flow: x = (1 - s) * latent + s * noise, the denoiser predicts noise - latent.

    (Liu et al., "Flow Straight and Fast"; s is drawn logit-normal as in Esser et al., "Scaling
    Rectified Flow Transformers".)
    """

    def __init__(self, parts: Parts, data: Dataset, rate: float, decay: float) -> None:
        self.parts, self.data, self.rate = parts, data, rate
        dtype = torch.bfloat16 if data.device.type == "cuda" else torch.float32
        layout = torch.channels_last
        self.unet = deepcopy(parts.unet).to(data.device, dtype, memory_format=layout).train()
        self.text = deepcopy(parts.text_encoder).to(data.device, dtype).train()
        # Masters start from the float32 weights, not from their rounded copies.
        self.masters = Masters([self.unet, self.text], rate, decay)
        originals = [*parts.unet.parameters(), *parts.text_encoder.parameters()]
        torch._foreach_copy_(self.masters.masters, [w.detach().to(data.device) for w in originals])
        torch._foreach_copy_(self.masters.means, self.masters.masters)
        empty = parts.tokenizer([""], padding="max_length", return_tensors="pt").input_ids
        self.empty = empty.to(data.device)
        self.dtype = dtype

    def run(
        self,
        until: float,
        batch: int,
        log: Log,
        checkpoints: list[float],
        visit: Callable[[], None],
    ) -> int:
        """Trains until the clock reads `until`, calling `visit` as it passes each checkpoint; the
        number of steps."""
        begin, last = time.monotonic(), 0
        waiting = sorted(checkpoints)
        for step, factor in shares(until, warm_up=300):
            loss = self.loss(batch)
            loss.backward()
            norm = self.masters.step(step, self.rate * factor)
            if step % 200 == 0:
                speed = (step + 1) / (time.monotonic() - begin)
                figures = f"loss {loss.item():.4f}, norm {norm.item():.2f}, {speed:.1f} steps/s"
                log(f"denoiser step {step}: {figures}")
            elif step % 10 == 0:
                loss.item()  # keeps the host from running ahead of the clock
            if waiting and time.monotonic() >= waiting[0]:
                waiting.pop(0)
                self.publish()
                visit()
            last = step
        self.publish()
        return last + 1

    def loss(self, batch: int) -> torch.Tensor:
        """The mean squared error of the predicted flow on random latents."""
        latents, tokens = self.data.latents_and_tokens(batch)
        device = latents.device
        unprompted = torch.rand(batch, 1, device=device) < UNPROMPTED
        tokens = torch.where(unprompted, self.empty, tokens)
        sigma = torch.sigmoid(torch.randn(batch, device=device) + 0.5)
        # A share of even draws: the first and last steps of the sampler lie in the thin tails.
        sigma = torch.where(torch.rand_like(sigma) < 0.2, torch.rand_like(sigma), sigma)
        timesteps = (sigma * 1000).long()
        noise = torch.randn_like(latents)
        spread = sigma[:, None, None, None]
        noisy = ((1 - spread) * latents + spread * noise).to(self.dtype)
        noisy = noisy.to(memory_format=torch.channels_last)
        context = self.text(tokens).last_hidden_state
        flow = self.unet(noisy, timesteps, context, return_dict=False)[0]
        return F.mse_loss(flow.float(), noise - latents)

    def publish(self) -> None:
        """Writes the running means into the parts."""
        self.masters.write_means([self.parts.unet, self.parts.text_encoder])


def half_precision(device: torch.device) -> torch.autocast:
    """bfloat16 for the matrix work on a GPU; rehearsals on a CPU stay in float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
