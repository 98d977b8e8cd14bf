"""Random finite weights for any torch module, made on the device where they will be used.

Knows how to build a module without touching its weights (parameters on the meta device, buffers
for real, so that rotary tables and position ids hold what the model computed) and how to fill them.
It knows nothing about particular models; configurations live in `zoo_configs` and `tiny_*`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn

SMALLEST_STD = 0.02  # the customary initial scale; wide layers keep it, narrow ones get more


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """The module that `make()` builds, parameters on the meta device, buffers real on the CPU.

    Takes no memory for weights, so 20 billion parameters are built in seconds.
    """
    with init_empty_weights(include_buffers=False):
        module = make()
    tie = getattr(module, "tie_weights", None)
    if callable(tie):  # the context gave tied parameters an object each
        tie()
    return module.eval()


def materialize(
    module: nn.Module, device: str | torch.device, dtype: torch.dtype, seed: int
) -> nn.Module:
    """Gives a module from `on_meta` real random weights on `device`; returns it in eval mode.

    Parameters get `dtype`, except those the model's class asks to keep in float32, as a stock
    `from_pretrained` would have it; parameters that are tied stay tied. Buffers keep their values.
    """
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # keeps the old ones: ids stay unique
    in_float32 = _names_kept_in_float32(module, dtype)
    for path, part in module.named_modules():
        for name, old in list(part.named_parameters(recurse=False)):
            if id(old) not in made:
                pieces = f"{path}.{name}".split(".")
                wanted = torch.float32 if in_float32.intersection(pieces) else dtype
                storage = torch.empty(old.shape, dtype=wanted, device=device)
                made[id(old)] = (old, nn.Parameter(storage, requires_grad=False))
            setattr(part, name, made[id(old)][1])
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, buffer.to(device, _buffer_dtype(module, buffer, dtype)))
    fill(module, seed)
    return module.eval()


@torch.no_grad()
def fill(module: nn.Module, seed: int) -> nn.Module:
    """Overwrites every parameter with random finite values; same seed and device, same values.

    Matrices and kernels: normal with standard deviation `max(0.02, fan_in ** -0.5)`. The floor is
    the customary 0.02; narrow layers get more, so that signals neither vanish nor grow through a
    small model. Embeddings: 0.02. Biases and other vectors: normal around 0 with 0.02. Norm scales:
    normal around 1 with 0.02, never exactly 1, so that code that forgets one is seen.
    """
    generators: dict[torch.device, torch.Generator] = {}
    seen: set[int] = set()
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            device = parameter.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            mean, std = _mean_and_std(part, name, parameter)
            parameter.normal_(mean, std, generator=generators[device])
    return module


def _mean_and_std(part: nn.Module, name: str, parameter: torch.Tensor) -> tuple[float, float]:
    scales = name in ("weight", "gamma") and parameter.numel() == max(parameter.shape, default=1)
    if scales and not isinstance(part, (nn.Linear, nn.Embedding)):
        return 1.0, SMALLEST_STD
    if parameter.ndim < 2 or isinstance(part, nn.Embedding):
        return 0.0, SMALLEST_STD
    fan_in = parameter.numel() // max(1, parameter.shape[0])
    return 0.0, max(SMALLEST_STD, max(1, fan_in) ** -0.5)


def _names_kept_in_float32(module: nn.Module, dtype: torch.dtype) -> set[str]:
    """Submodule names whose parameters the libraries' loaders leave in float32 at this `dtype`."""
    kept: set[str] = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    if not _is_transformers_model(module) or dtype == torch.float16:
        kept |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    return kept


def _buffer_dtype(module: nn.Module, buffer: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    # diffusers casts a whole model, float buffers too, unless the class keeps parts in float32;
    # transformers leaves buffers such as rotary frequencies as they were computed.
    whole = not _is_transformers_model(module) and not getattr(
        module, "_keep_in_fp32_modules", None
    )
    return dtype if whole and buffer.is_floating_point() else buffer.dtype


def _is_transformers_model(module: nn.Module) -> bool:
    return any(kind.__module__.startswith("transformers.") for kind in type(module).__mro__)


def count(module: nn.Module) -> int:
    """Number of parameters, tied ones once. Works on the meta device."""
    return sum(parameter.numel() for parameter in module.parameters())


def count_unbuilt(make: Callable[[], nn.Module]) -> int:
    """`count` of what `make()` would build, without computing a weight or a table of positions."""
    with torch.device("meta"):
        return count(make())


def build(
    make: Callable[[], Any], device: str | torch.device, dtype: torch.dtype, seed: int
) -> nn.Module:
    """`make()` with random weights of `dtype` on `device`: `on_meta`, then `materialize`."""
    return materialize(on_meta(make), device, dtype, seed)
