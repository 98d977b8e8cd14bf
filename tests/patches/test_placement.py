"""Weights that move: offload, other devices and dtypes, before and in the middle of patched use."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import remove_hook_from_module
from torch import nn

import accel
from accel.pipelines import tiny
from accel.reporting import PartReport
from tests.patches.pair import draw
from tests.simulated.data import data_crosses_devices

Do = Callable[[Any, torch.device], Any]

SMALL = {"height": 16, "width": 16, "num_inference_steps": 2}


@pytest.fixture(autouse=True)
def _any_device_will_do(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    """As where CUDA is: modules are patched before they reach the device, and `tensor.data` may be
    set to a tensor of another device."""
    monkeypatch.setattr("accel.patches.patched._can_ever_record", lambda module: True)
    simulated = device.type == "sim"
    with data_crosses_devices() if simulated else contextlib.nullcontext():
        yield device


class Moving:
    """A tiny pipeline that is patched and moved, and one that stays where it is: what the first
    draws is compared with what the other does."""

    def __init__(self, device: torch.device, name: str = "sd15") -> None:
        self.device, self.name = device, name
        self.pipe, self.still = tiny.pipeline(name), tiny.pipeline(name)
        self.still.to("cpu" if device.type == "sim" else device)
        for pipe in (self.pipe, self.still):
            pipe.set_progress_bar_config(disable=True)

    def patched(self) -> Moving:
        accel.patch(self.pipe, capture="always")
        return self

    def on_device(self) -> Moving:
        with torch.no_grad():  # a parameter that asks for gradients would remember where it was
            self.pipe.to(self.device)
        return self

    def picture(self, seed: int, **call: Any) -> None:
        if self.device.type != "sim" and self._is_on_the_host():  # which has other bits than a GPU
            self.still.to("cpu")
        pipes, options = (self.still, self.pipe), {**SMALL, **call}
        expected, result = (draw(pipe, self.name, seed, **options) for pipe in pipes)
        if self.device.type != "sim":
            self.still.to(self.device)
        assert np.array_equal(expected, result), f"another picture, seed {seed}"

    def _is_on_the_host(self) -> bool:
        return self.pipe._execution_device.type == "cpu" and self.pipe.unet.device.type == "cpu"

    def pictures(self, count: int = 2) -> None:
        for seed in range(count):
            self.picture(seed)

    def part(self, name: str = "unet") -> PartReport:
        return accel.report(self.pipe)[name]

    def replays_again(self, count: int = 3) -> None:
        """Draws right pictures, and by replays."""
        before = self.part().replays
        self.pictures(count)
        assert self.part().replays > before


@pytest.fixture
def moving(device: torch.device) -> Moving:
    return Moving(device)


def group_offload(level: str, stream: bool, pipe: Any, device: torch.device) -> None:
    pipe.enable_group_offload(
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type=level,
        num_blocks_per_group=1,
        use_stream=stream,
    )


def no_accelerate(pipe: Any, device: torch.device) -> None:
    pipe.remove_all_hooks()
    pipe.to(device)


def no_groups(pipe: Any, device: torch.device) -> None:
    for component in (c for c in pipe.components.values() if isinstance(c, nn.Module)):
        for module in component.modules():
            registry = getattr(module, "_diffusers_hook", None)
            for name in list(getattr(registry, "hooks", ())):
                registry.remove_hook(name, recurse=False)
    with torch.no_grad():
        pipe.to(device)


def groups(level: str, stream: bool) -> tuple[Do, Do]:
    return lambda pipe, device: group_offload(level, stream, pipe, device), no_groups


OFFLOADS: dict[str, tuple[Do, Do]] = {
    "model": (lambda pipe, device: pipe.enable_model_cpu_offload(device=device), no_accelerate),
    "sequential": (
        lambda pipe, device: pipe.enable_sequential_cpu_offload(device=device),
        no_accelerate,
    ),
    "blocks": groups("block_level", False),
    "blocks, streamed": groups("block_level", True),
    "leaves": groups("leaf_level", False),
    "leaves, streamed": groups("leaf_level", True),
}


@pytest.mark.parametrize("kind", OFFLOADS)
class TestOffload:
    def test_on_before_the_patch(self, kind: str, moving: Moving, device: torch.device) -> None:
        on, off = OFFLOADS[kind]
        on(moving.pipe, device)
        moving.patched().pictures()
        assert moving.part().captures == 0
        off(moving.pipe, device)
        moving.replays_again()

    def test_on_in_the_middle(self, kind: str, moving: Moving, device: torch.device) -> None:
        on, off = OFFLOADS[kind]
        moving.on_device().patched().pictures()
        on(moving.pipe, device)
        moving.pictures(3)
        off(moving.pipe, device)
        moving.pictures(3)
        if not kind.startswith("blocks"):  # for these see below
            moving.replays_again()

    def test_unpatched_in_the_middle(self, kind: str, moving: Moving, device: torch.device) -> None:
        on, off = OFFLOADS[kind]
        moving.on_device().patched().pictures()
        on(moving.pipe, device)
        moving.picture(0)
        accel.unpatch(moving.pipe)
        moving.pictures()
        off(moving.pipe, device)
        moving.pictures()
        assert all(type(m.forward).__name__ == "method" for m in moving.pipe.unet.modules())
        moving.patched().replays_again()


@pytest.mark.parametrize("kind", ["blocks", "blocks, streamed"])
def test_after_group_offload_graphs_come_back(
    kind: str, moving: Moving, device: torch.device
) -> None:
    on, off = OFFLOADS[kind]
    moving.on_device().patched().pictures()
    on(moving.pipe, device)
    moving.pictures(3)
    off(moving.pipe, device)
    moving.replays_again()


@pytest.mark.parametrize(
    ("kind", "reason"), [("model", "CPU offload"), ("blocks", "group offloading is on")]
)
def test_offload_in_the_middle_is_declined_with_the_reason(
    kind: str, reason: str, moving: Moving, device: torch.device
) -> None:
    moving.on_device().patched().pictures()
    captures = moving.part().captures
    OFFLOADS[kind][0](moving.pipe, device)
    moving.pictures()
    assert moving.part().captures == captures
    assert any(reason in said for said in moving.part().reasons)


@pytest.mark.parametrize(
    ("kind", "reason"), [("sequential", "CPU offload"), ("leaves", "group offloading is on")]
)
def test_offload_of_parts_is_declined_with_the_reason(
    kind: str, reason: str, moving: Moving, device: torch.device
) -> None:
    OFFLOADS[kind][0](moving.pipe, device)
    moving.patched().pictures()
    assert any(reason in said for said in moving.part().reasons)


def test_a_pipeline_on_the_host_is_said_to_run_eagerly(
    moving: Moving, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="accel"):
        moving.patched().pictures(4)
    assert sum(record.name == "accel" for record in caplog.records) == 1


CASTING = {"storage_dtype": torch.bfloat16, "compute_dtype": torch.float32}


class TestLayerwiseCasting:
    def test_on_before_the_patch(self, moving: Moving) -> None:
        for pipe in (moving.on_device().pipe, moving.still):
            pipe.unet.enable_layerwise_casting(**CASTING)
        moving.patched().pictures(3)
        assert moving.part().captures == 0
        assert "layerwise casting is on" in moving.part().reasons
        assert moving.part("vae").replays > 0

    def test_on_in_the_middle(self, moving: Moving) -> None:
        moving.on_device().patched().pictures()
        for pipe in (moving.pipe, moving.still):
            pipe.unet.enable_layerwise_casting(**CASTING)
        moving.pictures(4)

    def test_on_in_the_middle_it_is_declined_with_the_reason(self, moving: Moving) -> None:
        moving.on_device().patched().pictures()
        moving.pipe.unet.enable_layerwise_casting(**CASTING)
        moving.still.unet.enable_layerwise_casting(**CASTING)
        captures = moving.part().captures
        moving.pictures()
        assert moving.part().captures == captures
        assert "layerwise casting is on" in moving.part().reasons


def spread(unet: Any, device: torch.device) -> None:
    """Its middle stays on the host and visits the device."""
    places = {name: device for name, _ in unet.named_children()}
    dispatch_model(unet, {**places, "mid_block": "cpu"}, main_device=device, force_hooks=True)


class TestDeviceMap:
    def test_over_several_devices_it_is_declined(
        self, moving: Moving, device: torch.device
    ) -> None:
        spread(moving.on_device().pipe.unet, device)
        moving.patched().pictures()
        assert moving.part().captures == 0
        assert "device_map spreads the module over several devices" in moving.part().reasons

    def test_in_the_middle_and_taken_back(self, moving: Moving, device: torch.device) -> None:
        moving.on_device().patched().pictures()
        spread(moving.pipe.unet, device)
        moving.pictures()
        remove_hook_from_module(moving.pipe.unet, recurse=True)
        del moving.pipe.unet.hf_device_map
        moving.on_device().replays_again()

    def test_on_one_device_it_is_recorded(self, moving: Moving, device: torch.device) -> None:
        unet = moving.on_device().pipe.unet
        dispatch_model(unet, {"": device}, force_hooks=True)
        moving.patched().replays_again()


class TestDevices:
    def test_to_the_host_and_back(self, moving: Moving) -> None:
        moving.on_device().patched().pictures()
        moving.pipe.to("cpu")
        moving.pictures()
        moving.on_device().replays_again()

    def test_patched_on_the_host(self, moving: Moving) -> None:
        moving.patched().pictures()
        assert moving.part().captures == 0
        moving.on_device().replays_again()

    def test_another_model_takes_the_weights_memory(self, moving: Moving) -> None:
        moving.on_device().patched().pictures()
        for turn in range(3):
            moving.pipe.to("cpu")
            guests = [torch.full((n,), 7.0, device=moving.device) for n in (64, 1024, 16384)]
            moving.on_device().pictures()
            del guests[turn]
        assert moving.part().replays > 0

    def test_a_part_leaves_while_it_is_not_needed(self, moving: Moving) -> None:
        """What people do who lack memory: the text encoder makes room for the denoiser."""
        moving.on_device().patched()

        def leave(pipe: Any, step: int, t: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if pipe is moving.pipe:
                pipe.text_encoder.to("cpu")
            return tensors

        for seed in range(4):
            moving.on_device()
            moving.picture(seed, callback_on_step_end=leave)
        assert moving.part().replays > 0

    def test_the_denoiser_moves_between_two_steps(self, moving: Moving) -> None:
        moving.on_device().patched()

        def move(pipe: Any, step: int, t: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if step == 1:
                there = pipe.unet.device
                pipe.unet.to("cpu")
                kept.append(torch.ones(5000, device=there))
                pipe.unet.to(there)
            return tensors

        kept: list[torch.Tensor] = []
        for seed in range(3):
            moving.picture(seed, callback_on_step_end=move, num_inference_steps=5)
        assert moving.part().replays > 0


def test_an_argument_may_lie_where_a_weight_was(device: torch.device) -> None:
    layer = accel.patch(nn.Linear(64, 64).to(device), capture="always")
    with torch.no_grad():
        for _ in range(3):
            layer(torch.ones(64, 64, device=device))
        layer.weight.data = layer.weight.data.clone()
        x = torch.ones(64, 64, device=device)  # the allocator gives what was freed last
        for _ in range(3):
            expected = nn.functional.linear(x, layer.weight, layer.bias)
            assert torch.equal(layer(x), expected)
    assert accel.report(layer)["module"].eager_calls == 1


class TestDtypes:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_another_dtype_and_back(self, dtype: torch.dtype, moving: Moving) -> None:
        moving.on_device().patched().pictures()
        for to in (dtype, torch.float32):
            for pipe in (moving.pipe, moving.still):
                pipe.to(to)
            moving.replays_again()

    def test_one_layer_gets_another_dtype_and_back(self, moving: Moving) -> None:
        """Weights of the same bytes at the same place: `view` of the same memory."""
        moving.on_device().patched().pictures()
        for pipe in (moving.pipe, moving.still):
            weight = pipe.unet.conv_out.weight
            weight.data = weight.data.to(torch.bfloat16).to(torch.float32)
        moving.replays_again()

    def test_channels_last(self, moving: Moving) -> None:
        moving.on_device().patched().pictures()
        for layout in (torch.channels_last, torch.contiguous_format):
            for pipe in (moving.pipe, moving.still):
                pipe.unet.to(memory_format=layout)
            moving.replays_again()
