"""A denoising loop over a scheduler alone, and what of two such loops must be the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel.backend import backend_for

STEPS = 6


@dataclass
class Case:
    """A scheduler's class, its configuration, and what its `step` is given besides."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    step: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    channels: int = 4  # of the model's output: twice as many for a learned variance

    def scheduler(self) -> Any:
        """A new scheduler. Skips the test where this diffusers and this torch cannot make it."""
        try:
            return getattr(diffusers, self.name)(**self.config)
        except TypeError as error:
            pytest.skip(f"{self} cannot be made here: {error}")

    def __str__(self) -> str:
        given = {**self.config, **self.step, **self.schedule}
        short = self.name.removesuffix("Scheduler")
        return "-".join([short, *(f"{key}={value}" for key, value in given.items())])


@dataclass
class Loop:
    """What a loop returned, step by step, the state it left, and what it asked of the device."""

    outputs: list[Any]
    scheduler: Any
    random_state: Tensor
    reads: int
    uploads: int


def model(x: Tensor, channels: int = 4) -> Tensor:
    """Something that a denoiser might have said."""
    out = torch.sin(x * 3) * 0.7
    return torch.cat([out, out * 0.5], dim=1) if channels == 8 else out


def latents(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same on every device."""
    made = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(1))
    return made.to(device=device, dtype=dtype)


def denoise(
    case: Case,
    scheduler: Any,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    start: int = 0,
    prepare: Callable[[Any], None] = lambda scheduler: None,
    as_timestep: Callable[[Any], Any] = lambda t: t,
    forbidden: bool = False,
    **step: Any,
) -> Loop:
    """Denoises as a pipeline would, from step `start` on. `prepare` comes before the loop; with
    `forbidden`, a wait for a GPU raises."""
    backend: Any = backend_for(device)
    schedule = {"num_inference_steps": STEPS, **case.schedule}
    scheduler.set_timesteps(**schedule, device=device)
    prepare(scheduler)
    torch.manual_seed(3)
    x = latents(device, dtype)
    outputs: list[Any] = []
    with waits(device, forbidden) as counts:
        for t in scheduler.timesteps[start:]:
            given = as_timestep(t)
            scaled = x
            if hasattr(scheduler, "scale_model_input"):
                scaled = scheduler.scale_model_input(x, given)
            result = scheduler.step(model(scaled, case.channels), given, x, **case.step, **step)
            x = result[0].to(dtype)
            outputs.append(result)
    return Loop(outputs, scheduler, backend.rng_state(device), *counts())


@contextlib.contextmanager
def waits(device: torch.device, forbidden: bool = False) -> Iterator[Callable[[], tuple[int, int]]]:
    """Counts host reads and uploads on the simulated device. On a GPU, which counts nothing, any
    wait raises if it is `forbidden`."""
    backend: Any = backend_for(device)
    reads = uploads = 0
    if device.type == "sim":
        reads, uploads = backend.counters.host_reads, backend.counters.uploads
    elif forbidden:
        torch.cuda.set_sync_debug_mode("error")
    yield lambda: (reads, uploads)
    if device.type == "sim":
        reads = backend.counters.host_reads - reads
        uploads = backend.counters.uploads - uploads
    else:
        torch.cuda.set_sync_debug_mode("default")


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Fails where two values differ in type, device, shape, strides or in one bit."""
    assert type(one) is type(other), where
    if isinstance(one, Tensor):
        assert (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape), where
        left, right = (x.detach().cpu().reshape(-1).view(torch.uint8) for x in (one, other))
        assert torch.equal(left, right), where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for place, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{where}[{place}]")
    elif hasattr(one, "tobytes"):
        assert one.tobytes() == other.tobytes(), where
    elif not callable(one):
        assert one == other, where


def assert_same_loops(one: Loop, other: Loop) -> None:
    """Fails where two loops differ: outputs, attributes, use of random numbers."""
    assert len(one.outputs) == len(other.outputs) > 0
    assert_same(one.outputs, other.outputs, "outputs")
    assert_same(vars(one.scheduler), vars(other.scheduler), "scheduler")
    assert_same(one.random_state, other.random_state, "random state")


class DeviceWork(TorchDispatchMode):
    """Notes which operators compute on device tensors, and where and what their arguments are: a
    number that a kernel gets from the host is another argument than one that it reads itself, and
    on a GPU may give other bits. What only looks up or moves values is left out."""

    MOVES = ("nonzero", "_local_scalar_dense", "_to_copy", "copy_", "clone", "as_strided", "select")
    MOVES += (
        "slice",
        "stack",
        "unsqueeze",
        "unbind",
        "index",
        "detach",
        "is_pinned",
        "_pin_memory",
    )
    MOVES += ("_linalg_check_errors", "alias", "cat", "lift_fresh", "repeat", "expand", "view")

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[str, list[tuple[str, torch.dtype, int]]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name not in self.MOVES and not all(x.is_cpu for x in given):
            self.noted.append((name, [(x.device.type, x.dtype, x.dim()) for x in given]))
        return func(*args, **(kwargs or {}))
