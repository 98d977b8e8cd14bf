"""A small pipeline of our own with a scheduler of diffusers', and faults to put into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import EulerDiscreteScheduler
from torch import Tensor, nn

STEPS = 4
Fault = Callable[[Tensor, Tensor], Tensor]

calls_so_far = 0
"""What a forward may count in and no guard sees, on purpose."""


class Hidden:
    """A fault where no guard looks: by identity the same, whatever it reads."""

    __slots__ = ("fault",)

    def __init__(self, fault: Fault) -> None:
        self.fault = fault


class Innermost(nn.Module):
    """A layer with a fault."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.fault = lambda x, timestep: x

    @property
    def fault(self) -> Fault:
        """What is done to its result."""
        return self.hidden.fault

    @fault.setter
    def fault(self, fault: Fault) -> None:
        self.hidden = Hidden(fault)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        return self.hidden.fault(self.linear(x), timestep)


class Block(nn.Module):
    """A block around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.inner = Innermost()

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        return x + self.inner(self.norm(x), timestep)


class Denoiser(nn.Module):
    """Two blocks that see the timestep."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        x = self.first(x * torch.cos(timestep * 0.01), timestep)
        return self.second(x, timestep)


class Decoder(nn.Module):
    """What a pipeline calls `decode` of."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 3)

    def decode(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.out(x))


class Pipe:
    """Noise, steps, a picture of 4 pixels."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.unet, self.vae = Denoiser().to(device).eval(), Decoder().to(device).eval()
        self.scheduler: Any = EulerDiscreteScheduler()
        self.device = device
        self.last_timestep: Any = None
        self.meddle: Callable[[Tensor], Tensor] = lambda x: x

    @property
    def components(self) -> dict[str, Any]:
        """Its parts, as pipelines tell them."""
        return {"unet": self.unet, "vae": self.vae, "scheduler": self.scheduler}

    @torch.no_grad()
    def __call__(
        self, prompt: str = "", num_inference_steps: int = STEPS, generator: Any = None
    ) -> dict[str, Tensor]:
        self.scheduler.set_timesteps(num_inference_steps)
        x = torch.randn(4, 8, generator=generator) + 0.01 * len(prompt)
        x = self.meddle(x)
        for timestep in self.scheduler.timesteps:
            self.last_timestep = timestep
            scaled = self.scheduler.scale_model_input(x, timestep).to(self.device)
            noise = self.unet(scaled, timestep.to(self.device))
            x = self.scheduler.step(noise.cpu(), timestep, x).prev_sample
        return {"picture": self.vae.decode(x.to(self.device)).cpu()}


def counting(period: int | None = None) -> Fault:
    """Adds a thousandth for every call so far; counts from 0 again after `period` calls."""

    def fault(x: Tensor, timestep: Tensor) -> Tensor:
        global calls_so_far
        number = calls_so_far if period is None else calls_so_far % period
        calls_so_far += 1
        return x + 0.001 * number

    return fault


def not_a_number(step: int) -> Fault:
    """Returns NaN at one step."""
    scheduler: Any = EulerDiscreteScheduler()
    scheduler.set_timesteps(STEPS)
    when = float(scheduler.timesteps[step])

    def fault(x: Tensor, timestep: Tensor) -> Tensor:
        return torch.where(timestep == when, torch.nan, x)

    return fault
