"""Kinds of pipelines under what users of similar tools ran into, each test named after its symptom.

Everything is done to a plain and to a patched pipeline; the pictures are the same bit for bit. What
controls a kind (scales, adapters, parts of the steps) is in test_kinds_of_control.py; what no kind
can change (eviction, threads, what pays) is in tests/accel/test_cases.py.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch import nn

import accel
from accel.pipelines.random_weights import fill
from tests.patches.kinds import KINDS, PIXELS, Both, denoiser
from tests.simulated.data import data_crosses_devices

MakeBoth = Callable[..., Both]


@pytest.fixture
def kind(device: torch.device) -> MakeBoth:
    """Makes a kind's pipeline twice: `kind("controlnet")`."""
    return lambda name, **options: Both(name, device, **options)


@pytest.fixture(params=KINDS)
def both(request: pytest.FixtureRequest, kind: MakeBoth) -> Both:
    """Every kind in turn."""
    return kind(request.param)


def differ(one: np.ndarray, other: np.ndarray) -> bool:
    return not np.array_equal(one, other)


def test_another_prompt_or_picture_gets_the_last_ones_result(both: Both) -> None:
    """diffusers#10317, pytorch#130912."""
    prompts = ["a red circle", "", "a cat and a dog in the snow", "a red circle"]
    drawn = [both.picture(seed, prompt) for seed, prompt in zip((1, 2, 2, 1), prompts, strict=True)]
    assert np.array_equal(drawn[0], drawn[3])
    assert differ(drawn[0], drawn[1]) and differ(drawn[1], drawn[2])
    assert both.counts() == [(1, 1)] * len(both.kind.steps)
    assert both.replays() >= 6


def test_another_size_or_batch_is_recorded_again_or_mixed_up(both: Both) -> None:
    """diffusers#11360."""
    for seed, size in enumerate((PIXELS, 32, PIXELS, 32)):
        both.picture(seed, size=size)
    two = both.picture(7, num_images_per_prompt=2)
    assert len(two) == 2
    before = both.replays()
    both.picture(8, size=32)
    both.picture(9)
    both.picture(7, num_images_per_prompt=2)
    assert both.counts() == [(3, 3)] * len(both.kind.steps)
    assert both.replays() >= before + 6


def test_a_later_picture_overwrites_an_earlier_one(both: Both) -> None:
    """diffusers#7420, pytorch#122192."""
    expected = [both.latents(both.plain, seed) for seed in (1, 2)]
    kept = [[both.latents(both.patched, seed) for seed in (1, 2)] for _ in range(3)]
    for pair in kept:
        for one, other in zip(pair, expected, strict=True):
            assert torch.equal(one.cpu(), other.cpu())
    assert differ(*(x.cpu().numpy() for x in expected))


FED_BACK = {
    "img2img": "image",
    "flux_img2img": "image",
    "inpaint": "image",
    "controlnet": "image",
    "flux_controlnet": "control_image",
    "t2i_adapter": "image",
}


@pytest.mark.parametrize("name", FED_BACK)
def test_feeding_a_picture_back_in_goes_wrong(name: str, kind: MakeBoth) -> None:
    """pytorch#152887."""
    both, given = kind(name), {}
    seen = []
    for _ in range(4):
        seen.append(both.picture(1, **given))
        given = {FED_BACK[name]: torch.from_numpy(seen[-1]).permute(0, 3, 1, 2)}
    assert all(differ(one, other) for one, other in itertools.pairwise(seen))
    assert both.replays() >= 5


@pytest.mark.parametrize("name", ["controlnet", "t2i_adapter", "flux_img2img"])
def test_no_room_for_graphs_breaks_the_pictures(name: str, kind: MakeBoth) -> None:
    """pytorch#150708, stable-fast#141."""
    both = kind(name)
    accel.patch(both.patched, capture="always", memory_limit="64KiB")
    both.pictures(1, 2, 3)
    assert "memory limit" in str(both.report)
    assert both.report.pool_bytes <= 64 << 10
    accel.patch(both.patched, capture="always")
    both.pictures(1, 2)
    assert both.replays() >= 2


def modules(both: Both, pipe: Any) -> list[nn.Module]:
    """The modules behind the parts of every step."""
    found = [getattr(pipe, name.partition("[")[0]) for name in both.kind.steps]
    nets = [getattr(module, "nets", [module]) for module in dict.fromkeys(found)]
    return [module for several in nets for module in several]


def test_weights_changed_in_place_or_moved_are_not_seen(both: Both) -> None:
    """peft#2611."""

    def every(change: Callable[[nn.Parameter], None]) -> Callable[[Any], None]:
        def do(pipe: Any) -> None:
            for module in modules(both, pipe):
                with torch.no_grad():
                    change(next(p for p in module.parameters() if p.dim() > 1))

        return do

    def move(weight: nn.Parameter) -> None:
        weight.data = weight.data * 2

    before = both.pictures(1, 2)[0]
    both.both(every(lambda weight: weight.mul_(0.5)))
    assert differ(both.picture(1), before)
    assert both.counts() == [(1, 1)] * len(both.kind.steps)
    both.both(every(move))
    assert np.array_equal(both.picture(1), before)
    both.picture(2)
    assert both.counts() == [(2, 1)] * len(both.kind.steps)


@pytest.mark.parametrize("name", ["controlnet", "flux_img2img", "modular"])
def test_an_error_in_the_middle_of_a_swap_leaves_half_of_the_old_weights(
    name: str, kind: MakeBoth
) -> None:
    both = kind(name)
    both.pictures(1, 2)
    for pipe in (both.plain, both.patched):
        with pytest.raises(RuntimeError, match="shape"):
            for weight in list(modules(both, pipe)[-1].parameters())[:2]:
                weight.data = weight.data * 0.5
                weight.data.view(-1, 1 << 20)
    both.pictures(1, 2)
    assert both.replays() >= 2


OTHER_LORAS = ["modular", "flux_img2img", "flux_controlnet", "t2i_adapter", "two_controlnets"]


@pytest.mark.parametrize("name", OTHER_LORAS)
def test_a_loras_life_goes_by_unseen(name: str, kind: MakeBoth) -> None:
    """stable-fast#143, diffusers#9279, diffusers#11408: as adapters of the model (pipelines that
    load LoRAs themselves: test_kinds_of_control.py)."""
    both = kind(name)
    bare = both.picture(1)

    def after(do: Callable[[Any], Any]) -> np.ndarray:
        both.both(lambda pipe: do(denoiser(pipe)))
        denoiser(both.patched).load_state_dict(denoiser(both.plain).state_dict())
        drawn = both.picture(1)
        both.picture(2)
        return drawn

    def add(name: str) -> Callable[[Any], Any]:
        layers = LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
        return lambda model: model.add_adapter(layers, adapter_name=name)

    states = [
        after(do)
        for do in (
            add("one"),
            lambda model: model.set_adapters("one", 0.5),
            add("two"),
            lambda model: model.set_adapters(["one", "two"], [0.3, 0.7]),
            lambda model: model.disable_adapters(),
            lambda model: model.enable_adapters(),
            lambda model: model.delete_adapters("one"),
            lambda model: model.unload_lora(),
        )
    ]
    assert np.array_equal(states[-1], bare)
    assert differ(states[0], bare) and differ(states[0], states[1]) and differ(*states[2:4])
    assert both.replays() >= 8


def test_a_replaced_component_is_still_the_old_one(both: Both) -> None:
    before = both.pictures(1, 2)[0]
    for name in dict.fromkeys(name.partition("[")[0] for name in both.kind.steps):
        other = fill(copy.deepcopy(getattr(both.plain, name)), 77)
        setattr(both.patched, name, copy.deepcopy(other).to(both.device))
        setattr(both.plain, name, other)
    assert differ(both.picture(1), before)
    both.pictures(2, 3)
    assert both.replays() >= 2


def stopping(pipe: Any, do: Callable[[], Any]) -> dict[str, Any]:
    """Options of a call with which `do` is done after the first step."""
    if "callback_on_step_end" in inspect.signature(pipe.__call__).parameters:
        return {"callback_on_step_end": lambda pipe, step, t, kept: (step or do(), kept)[1]}
    return {"callback": lambda step, t, latents: step or do()}


WITH_CALLBACK = [name for name in KINDS if name != "modular"]


@pytest.mark.parametrize("name", WITH_CALLBACK)
def test_unpatching_in_the_middle_spoils_the_picture(name: str, kind: MakeBoth) -> None:
    both = kind(name)
    expected = both.pictures(1, 2)
    options = stopping(both.patched, lambda: accel.unpatch(both.patched))
    assert np.array_equal(both.drawn(both.patched, 1, **options), expected[0])
    assert all(
        "forward" not in vars(module)
        for component in both.patched.components.values()
        if isinstance(component, nn.Module)
        for module in component.modules()
    )
    assert np.array_equal(both.drawn(both.patched, 2), expected[1])
    accel.patch(both.patched, capture="always")
    both.pictures(1, 2)
    assert both.replays() >= 2


@pytest.mark.parametrize("name", WITH_CALLBACK)
def test_a_picture_broken_off_spoils_the_next(name: str, kind: MakeBoth) -> None:
    """diffusers#7443, diffusers#8879."""
    both = kind(name)

    def interrupt() -> None:
        raise KeyboardInterrupt

    for seed in range(3):
        for pipe in (both.plain, both.patched):
            with pytest.raises(KeyboardInterrupt):
                both.drawn(pipe, seed, **stopping(pipe, interrupt))
        both.picture(seed)
    assert both.replays() >= 3


@contextlib.contextmanager
def weights_may_travel(device: torch.device) -> Iterator[None]:
    """`tensor.data` may be set to a tensor of another device, as where CUDA is."""
    with data_crosses_devices() if device.type == "sim" else contextlib.nullcontext():
        yield


@pytest.mark.parametrize("name", ["controlnet", "t2i_adapter", "ip_adapter", "flux_img2img"])
def test_offloaded_models_are_read_where_they_were(
    name: str, kind: MakeBoth, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """diffusers#4399, diffusers#11584, pytorch#150711."""
    monkeypatch.setattr("accel.patches.patched._can_ever_record", lambda module: True)
    with weights_may_travel(device):
        both = kind(name)
        both.pictures(1, 2)
        both.patched.enable_model_cpu_offload(device=device)
        both.pictures(1, 2)
        both.patched.remove_all_hooks()
        with torch.no_grad():
            both.patched.to(device)
        before = both.replays()
        both.pictures(1, 2)
        assert both.replays() > before


@pytest.mark.parametrize("name", [n for n in WITH_CALLBACK if "flux" not in n])
def test_guidance_switched_on_and_off_mixes_batches(name: str, kind: MakeBoth) -> None:
    """Without guidance a step is one row, with it two."""
    both = kind(name)
    drawn = [both.picture(1, guidance_scale=scale) for scale in (7.5, 1.0, 3.0, 1.0, 7.5)]
    assert np.array_equal(drawn[0], drawn[4]) and np.array_equal(drawn[1], drawn[3])
    assert differ(drawn[0], drawn[1]) and differ(drawn[0], drawn[2])
    assert both.counts() == [(2, 2)] * len(both.kind.steps)


@pytest.mark.parametrize("name", ["controlnet", "ip_adapter", "inpaint", "flux_img2img"])
def test_verify_finds_fault_with_a_good_pipeline(name: str, kind: MakeBoth) -> None:
    """diffusers#2758, pytorch#169082."""
    both = kind(name)
    inputs = {**both.kind.options, **both.kind.inputs(1, PIXELS), "num_inference_steps": 3}
    accel.unpatch(both.patched)
    outcome = accel.verify(both.patched, prompt="a red circle", **inputs)
    assert outcome.equal, str(outcome)
