"""A patched module: when it gets a runner, which options it has, and what the report says."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from accel.backend import Backend
from accel.patches.part import Options, Part
from accel.pipelines import tiny


def calls(module: nn.Module, device: torch.device, count: int = 4) -> list[Tensor]:
    with torch.no_grad():
        return [module(torch.full((2, 4), float(i), device=device)) for i in range(count)]


def test_a_module_on_the_cpu_stays_eager_with_the_reason() -> None:
    layer = nn.Linear(4, 4)
    part = Part("layer", layer, "forward", Options(capture="always"))
    calls(layer, torch.device("cpu"))
    assert part.report.eager_calls == 4
    assert list(part.report.reasons) == ["the module is not on a CUDA device"]


def test_a_module_that_moves_to_the_device_is_recorded_from_then_on(device: torch.device) -> None:
    layer = nn.Linear(4, 4)
    part = Part("layer", layer, "forward", Options(capture="always"))
    calls(layer, torch.device("cpu"), count=1)
    layer.to(device)
    calls(layer, device)
    assert (part.report.captures, part.report.replays, part.report.eager_calls) == (1, 2, 2)
    layer.cpu()
    calls(layer, torch.device("cpu"), count=1)
    layer.to(device)
    expected = nn.functional.linear(torch.full((2, 4), 3.0).to(device), layer.weight, layer.bias)
    assert torch.equal(calls(layer, device)[3], expected)


def test_parts_of_one_patch_share_a_pool(device: torch.device) -> None:
    options = Options(capture="always")
    layers = [nn.Linear(4, 4).to(device) for _ in range(2)]
    parts = [Part(str(i), layer, "forward", options) for i, layer in enumerate(layers)]
    for layer in layers:
        calls(layer, device)
    assert list(options.pools) == [device]
    assert [part.report.captures for part in parts] == [1, 1]


def test_a_hook_older_than_the_patch_may_go_first(device: torch.device) -> None:
    layer = nn.Linear(4, 4).to(device)
    older = layer.forward
    layer.forward = lambda x: older(x)
    part = Part("layer", layer, "forward", Options(capture="always"))
    layer.forward = older  # what accelerate does when its hook is removed
    assert not part.is_on
    part.stay_installed()
    calls(layer, device)
    assert part.report.replays > 0


def test_taken_off_the_module_is_plain_and_may_die(device: torch.device, backend: Backend) -> None:
    layer = nn.Linear(4, 4).to(device)
    part = Part("layer", layer, "forward", Options(capture="always"))
    calls(layer, device)
    part.take_off()
    assert "forward" not in vars(layer)
    assert part.report.graphs == []
    gone = weakref.ref(layer)
    del layer, part
    gc.collect()
    assert gone() is None


def test_the_pool_is_made_for_the_dtype_of_the_module(device: torch.device) -> None:
    layer, options = nn.Linear(4, 4).to(device, torch.float16), Options(capture="always")
    part = Part("layer", layer, "forward", options)
    layer(torch.zeros(1, 4, dtype=torch.float16, device=device))
    assert options.pools[device].dtype == torch.float16
    part.take_off()


def test_a_patched_module_may_die(device: torch.device) -> None:
    layer = nn.Linear(4, 4).to(device)
    part = Part("layer", layer, "forward", Options(capture="always"))
    calls(layer, device)
    gone = weakref.ref(layer)
    del layer, part
    gc.collect()
    assert gone() is None


def test_a_decoder_is_patched_at_its_decode(device: torch.device) -> None:
    vae: Any = tiny.pipeline("sd15").vae.to(device)
    part = Part("vae", vae, "decode", Options(capture="always"))
    latents = torch.randn(3, 1, 4, 8, 8, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        for x in latents:
            z = vae.decode(x, return_dict=False)[0]
            assert torch.equal(z, type(vae).decode(vae, x, return_dict=False)[0])
    assert (part.report.captures, part.report.replays) == (1, 1)
