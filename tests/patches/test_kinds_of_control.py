"""What controls a picture beside its prompt, changed between calls and in the middle of one.

Each test is named after its symptom; a plain and a patched pipeline draw the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

import accel
from tests.patches.kinds import (
    PIXELS,
    Both,
    adapter,
    controlnet,
    image_prompts,
    lora,
    photograph,
    picture,
)

MakeBoth = Callable[..., Both]


@pytest.fixture
def kind(device: torch.device) -> MakeBoth:
    """Makes a kind's pipeline twice: `kind("controlnet")`."""
    return lambda name, **options: Both(name, device, **options)


def all_differ(pictures: list[np.ndarray]) -> bool:
    return len({x.tobytes() for x in pictures}) == len(pictures)


SCALES: dict[str, tuple[str, list[Any]]] = {
    "controlnet": ("controlnet_conditioning_scale", [0.0, 0.5, 1.0]),
    "controlnet_inpaint": ("controlnet_conditioning_scale", [0.0, 0.5, 1.0]),
    "flux_controlnet": ("controlnet_conditioning_scale", [0.0, 0.5, 1.0]),
    "two_controlnets": ("controlnet_conditioning_scale", [[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]]),
    "t2i_adapter": ("adapter_conditioning_scale", [0.0, 0.5, 1.0]),
    "sdxl_t2i_adapter": ("adapter_conditioning_scale", [0.0, 0.5, 1.0]),
    "two_t2i_adapters": ("adapter_conditioning_scale", [[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]]),
    "img2img": ("strength", [0.4, 0.7, 1.0]),
    "inpaint": ("strength", [0.4, 0.7, 1.0]),
    "flux_img2img": ("strength", [0.3, 0.6, 1.0]),
    "lora": ("cross_attention_kwargs", [{"scale": 0.0}, {"scale": 0.5}, {"scale": 1.0}]),
}


@pytest.mark.parametrize("name", SCALES)
def test_another_scale_is_not_seen(name: str, kind: MakeBoth) -> None:
    both, (argument, scales) = kind(name), SCALES[name]
    first, again = ([both.picture(1, **{argument: scale}) for scale in scales] for _ in range(2))
    assert all(map(np.array_equal, first, again))
    assert all_differ(first)
    assert both.replays() >= 3


def test_a_scale_that_is_another_in_every_call_costs_recordings_for_ever(kind: MakeBoth) -> None:
    both = kind("controlnet")
    drawn = [both.picture(1, controlnet_conditioning_scale=0.1 * turn) for turn in range(9)]
    assert all_differ(drawn)
    control = both.report["controlnet"]
    assert control.captures <= 4
    assert any("has had more than 4 values" in reason for reason in control.reasons)
    assert both.report["unet"].captures == 1


class TestControlNet:
    """diffusers#5453, ComfyUI_stable_fast#26."""

    @pytest.mark.parametrize("name", ["controlnet", "two_controlnets", "flux_controlnet"])
    def test_guidance_that_ends_early_or_begins_late_is_kept(
        self, name: str, kind: MakeBoth
    ) -> None:
        both = kind(name)
        turns = [(0.0, 1.0), (0.0, 0.5), (0.5, 1.0), (0.0, 1.0)]
        drawn = [
            both.picture(
                1,
                control_guidance_start=start,
                control_guidance_end=end,
                num_inference_steps=4,
            )
            for start, end in turns
        ]
        assert np.array_equal(drawn[0], drawn[3])
        assert all_differ(drawn[:3])
        assert both.replays() >= 4

    def test_a_guess_is_taken_for_guidance(self, kind: MakeBoth) -> None:
        both = kind("controlnet")
        drawn = [both.picture(1, guess_mode=guess) for guess in (False, True, True, False)]
        assert np.array_equal(drawn[0], drawn[3])
        assert np.array_equal(drawn[1], drawn[2])
        assert all_differ(drawn[:2])

    def test_residuals_stay_when_it_is_dropped(self, kind: MakeBoth) -> None:
        both = kind("controlnet")
        controlled = both.picture(1)
        bare = [diffusers.StableDiffusionPipeline.from_pipe(p) for p in (both.plain, both.patched)]
        for _ in range(3):
            drawn = [
                both_draw(pipe, both, image=None, height=PIXELS, width=PIXELS) for pipe in bare
            ]
            assert np.array_equal(*drawn)
            assert not np.array_equal(drawn[0], controlled)
            assert np.array_equal(both.picture(1), controlled)
        assert both.report["unet"].captures == 2
        assert both.replays() >= 6

    def test_two_become_one_and_two_again(self, kind: MakeBoth) -> None:
        both = kind("two_controlnets")
        several = both.plain.controlnet, both.patched.controlnet
        two = both.picture(1)
        for pipe, nets in zip((both.plain, both.patched), several, strict=True):
            pipe.controlnet = nets.nets[0]
        one = [both.picture(seed, image=picture(1, PIXELS)) for seed in (1, 2, 1)]
        assert np.array_equal(one[0], one[2])
        assert both.report["controlnet"].replays >= 3
        both.plain.controlnet, both.patched.controlnet = several
        assert np.array_equal(both.picture(1), two)
        assert not np.array_equal(one[0], two)

    def test_another_one_in_its_place_is_not_seen(self, kind: MakeBoth) -> None:
        both = kind("controlnet")
        first = both.pictures(1, 2)[0]
        both.both(lambda pipe: setattr(pipe, "controlnet", controlnet(33).to(pipe.device)))
        assert not np.array_equal(both.picture(1), first)
        both.picture(2)
        assert both.replays() >= 3

    def test_training_it_loses_the_gradients(self, kind: MakeBoth) -> None:
        """pytorch#116848."""
        both = kind("controlnet")
        before = both.pictures(1, 2)[0]
        for pipe in (both.plain, both.patched):
            net = pipe.controlnet.requires_grad_(True).train()
            draw = torch.Generator().manual_seed(0)
            given = {
                "sample": torch.randn(1, 4, 8, 8, generator=draw),
                "encoder_hidden_states": torch.randn(1, 7, 32, generator=draw),
                "controlnet_cond": torch.randn(1, 3, PIXELS, PIXELS, generator=draw),
            }
            given = {name: x.to(pipe.device) for name, x in given.items()}
            residuals, middle = net(**given, timestep=3, return_dict=False)
            with torch.backends.cudnn.flags(deterministic=True):
                sum(x.square().mean() for x in (*residuals, middle)).backward()
            with torch.no_grad():
                for weight in net.parameters():
                    weight -= 0.1 * weight.grad
            net.requires_grad_(False).eval()
        weights = both.plain.controlnet.state_dict()
        for name, weight in both.patched.controlnet.state_dict().items():
            assert torch.equal(weight.cpu(), weights[name].cpu()), name
        assert not np.array_equal(both.picture(1), before)
        both.picture(2)


def both_draw(pipe: Any, both: Both, **call: Any) -> np.ndarray:
    """What another pipeline around the same parts draws, with some arguments dropped if None."""
    pipe.set_progress_bar_config(disable=True)
    options = {name: value for name, value in call.items() if value is not None}
    generator = torch.Generator().manual_seed(1)
    drawn = pipe("a red circle", generator=generator, num_inference_steps=3, **options)
    return np.asarray(drawn[0][0])


class TestImagePrompts:
    """IP-Adapter: scales lie in attention processors, loading replaces these."""

    def test_its_scale_is_not_seen(self, kind: MakeBoth) -> None:
        both = kind("ip_adapter")
        drawn = []
        for scale in (0.0, 0.6, 1.0, {"down": {"block_0": [1.0]}}, 0.0):
            both.both(lambda pipe, scale=scale: pipe.set_ip_adapter_scale(scale))
            drawn.append(both.pictures(1, 1)[0])
        assert np.array_equal(drawn[0], drawn[4])
        assert all_differ(drawn[:4])
        assert both.replays() >= 10

    def test_unloaded_it_still_guides(self, kind: MakeBoth) -> None:
        both = kind("ip_adapter")
        guided = both.pictures(1, 2)[0]
        both.both(lambda pipe: pipe.unload_ip_adapter())
        bare = both.pictures(1, 2, ip_adapter_image=None)[0]
        assert not np.array_equal(bare, guided)
        both.both(lambda pipe: image_prompts(pipe, 8))
        assert np.array_equal(both.picture(1), guided)
        both.both(lambda pipe: pipe.unload_ip_adapter())
        both.both(lambda pipe: image_prompts(pipe, 9))
        assert all_differ([both.picture(1), bare, guided])
        both.pictures(2, 3)
        assert both.replays() >= 4

    def test_several_pictures_are_taken_for_one(self, kind: MakeBoth) -> None:
        both = kind("ip_adapter")
        for count in (1, 2, 1, 2):
            images = [photograph(seed, PIXELS) for seed in range(count)]
            both.picture(1, ip_adapter_image=[images])
        assert both.report["unet"].captures == 2
        assert both.replays() >= 6

    def test_given_embeddings_are_not_copied_in(self, kind: MakeBoth) -> None:
        both = kind("ip_adapter")
        draw = torch.Generator().manual_seed(0)
        drawn = []
        for _ in range(3):
            given = torch.randn(2, 1, 24, generator=draw)
            pictures = [
                both.drawn(pipe, 1, ip_adapter_image=None, ip_adapter_image_embeds=[on])
                for pipe in (both.plain, both.patched)
                for on in [given.to(pipe.device)]
            ]
            assert np.array_equal(*pictures)
            drawn.append(pictures[0])
        assert all_differ(drawn)
        assert both.report["unet"].captures == 1


class TestAdapters:
    """T2I-Adapter: its states come in the first steps only."""

    def test_states_that_come_and_go_are_kept(self, kind: MakeBoth) -> None:
        both = kind("sdxl_t2i_adapter")
        drawn = [
            both.picture(1, adapter_conditioning_factor=factor, num_inference_steps=4)
            for factor in (1.0, 0.5, 0.0, 1.0)
        ]
        assert np.array_equal(drawn[0], drawn[3])
        assert all_differ(drawn[:3])
        assert both.report["unet"].captures == 2

    def test_another_one_in_its_place_is_not_seen(self, kind: MakeBoth) -> None:
        both = kind("t2i_adapter")
        first = both.pictures(1, 2, 3)[0]
        assert both.report["adapter"].replays == 1
        both.both(lambda pipe: setattr(pipe, "adapter", adapter(55).to(pipe.device)))
        assert not np.array_equal(both.picture(1), first)
        both.pictures(2, 3)
        assert both.report["adapter"].replays == 1


class TestLoRA:
    """stable-fast#143, diffusers#9279, diffusers#11408."""

    NAMES = ("lora", "controlnet", "ip_adapter", "inpaint", "img2img")

    @pytest.mark.parametrize("name", NAMES)
    def test_loaded_scaled_fused_and_unloaded(self, name: str, kind: MakeBoth) -> None:
        both = kind(name)
        if name == "lora":
            both.both(lambda pipe: pipe.unload_lora_weights())
        bare = both.picture(1)
        drawn = []
        for do in (
            lambda pipe: pipe.load_lora_weights(lora(5), adapter_name="new"),
            lambda pipe: pipe.set_adapters("new", 0.3),
            lambda pipe: pipe.fuse_lora(),
            lambda pipe: pipe.unfuse_lora(),
        ):
            both.both(do)
            drawn.append(both.picture(1))
            both.picture(2)
        assert all_differ([bare, *drawn[:2]])
        for pipe in (both.plain, both.patched):
            with pytest.raises(ValueError, match="absent"):
                pipe.set_adapters("absent")
        assert np.array_equal(both.picture(1), drawn[3])
        both.both(lambda pipe: pipe.unload_lora_weights())
        both.picture(1)
        assert both.report["unet"].replays >= 6

    def test_the_other_parts_recordings_survive(self, kind: MakeBoth) -> None:
        both = kind("controlnet")
        both.pictures(1, 2)
        both.both(lambda pipe: pipe.load_lora_weights(lora(5), adapter_name="new"))
        both.pictures(1, 2)
        assert both.report["controlnet"].captures == 1
        assert both.report["unet"].captures == 2


@pytest.mark.parametrize("name", ["flux_img2img", "flux_controlnet"])
def test_the_second_picture_is_recorded_once_more(name: str, kind: MakeBoth) -> None:
    both = kind(name)
    accel.unpatch(both.patched)
    del both.patched.transformer._diffusers_hook
    accel.patch(both.patched, capture="always")
    both.pictures(1, 2, 3)
    assert both.report["transformer"].captures == 1
