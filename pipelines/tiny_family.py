"""What a tiny denoiser family is, and the random tensors its calls are made of.

Knows how to build a model from a diffusers class name and a configuration, and how to draw
reproducible arguments. Which families exist is written in the other `tiny_*` modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accel.pipelines.random_weights import build
from accel.pipelines.recipe import Part, stock_class


class Draw:
    """Reproducible random arguments on the CPU, float32 unless said otherwise.

    >>> bool((Draw(3).normal(2, 4) == Draw(3).normal(2, 4)).all())
    True
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator("cpu").manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal numbers of `shape`."""
        return torch.randn(shape, generator=self._generator)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """Integers from 0 up to `high` - 1, int64."""
        return torch.randint(high, shape, generator=self._generator)

    def time(self, scale: float = 1000.0) -> torch.Tensor:
        """One timestep as schedulers hand it out: 0-dim, strictly between 0 and `scale`."""
        return (0.05 + 0.9 * torch.rand((), generator=self._generator)) * scale

    def step(self, scale: float = 1000.0) -> torch.Tensor:
        """A 0-dim int64 timestep, as the schedulers of UNets hand it out."""
        return self.time(scale).long()

    def times(self, batch: int, scale: float = 1000.0) -> torch.Tensor:
        """`time` expanded over the batch as pipelines do it (stride 0), shape `[batch]`."""
        return self.time(scale).expand(batch)


@dataclass(frozen=True)
class Family:
    """One kind of denoiser, small enough for a test: about 100,000 parameters, float32, CPU.

    A class that fixes a width itself makes its family larger, up to 4.4 million parameters.

    `arguments(draw, variant)` returns the keyword arguments of one forward; variants 0 and 1 differ
    in shape (picture size or prompt length). `time` names the argument that carries the timestep;
    what tells how far a picture is, where there is none. `build` makes the module where the class
    and a configuration do not suffice. `takes_return_dict` is False for a class whose forward knows
    no such argument.
    """

    kind: str
    config: Mapping[str, Any]
    arguments: Callable[[Draw, int], dict[str, Any]]
    time: str = "timestep"
    build: Callable[[], nn.Module] | None = None
    takes_return_dict: bool = True

    def make(self, seed: int = 0) -> nn.Module:
        """The diffusers model with random weights, in eval mode, on the CPU in float32."""
        make = self.build or Part(self.kind, self.config).make
        return build(make, "cpu", torch.float32, seed)

    def inputs(self, seed: int = 0, variant: int = 0) -> dict[str, Any]:
        """Keyword arguments of one forward, fresh tensors every call.

        `return_dict` is False, as pipelines pass it, except where a family's pipeline passes True.

        Different seeds differ in latents, prompt and timestep, not in shape.
        """
        if variant not in (0, 1):
            raise ValueError(f"{self.kind} has variants 0 and 1, got variant={variant!r}")
        asked = {"return_dict": False} if self.takes_return_dict else {}
        return {**asked, **self.arguments(Draw(seed), variant)}


def several(
    kind: str,
    one: Part,
    arguments: Callable[[Draw, int], dict[str, Any]],
    count: int = 2,
) -> Family:
    """The family of a class that is made of a list of `count` models like `one`."""

    def build_all() -> nn.Module:
        made: nn.Module = stock_class(kind)([one.make() for _ in range(count)])
        return made

    return Family(kind, one.config, arguments, build=build_all)


def mask(batch: int, length: int, real: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """An attention mask `[batch, length]`: the first `real` tokens on, padding at the end."""
    return (torch.arange(length) < real).to(dtype).repeat(batch, 1)


def grid_ids(height: int, width: int, axes: int = 3) -> torch.Tensor:
    """Position ids `[height * width, axes]`: row in axis 1, column in axis 2, zero elsewhere."""
    ids = torch.zeros(height, width, axes)
    ids[..., 1] += torch.arange(height)[:, None]
    ids[..., 2] += torch.arange(width)[None, :]
    return ids.reshape(height * width, axes)
