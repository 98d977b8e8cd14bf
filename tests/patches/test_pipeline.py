"""patch() on whole pipelines: the same pictures, the right parts, an exact way back."""

from __future__ import annotations

import gc
import inspect
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import EulerDiscreteScheduler
from torch import nn

import accel
from accel.backend import Backend
from accel.patches.schedulers import is_sync_free
from accel.pipelines import tiny
from tests.patches.pair import Pair, draw

MakePair = Callable[..., Pair]


@pytest.mark.parametrize("name", tiny.pipeline_names())
def test_pictures_are_the_same_bit_for_bit(name: str, pair: MakePair) -> None:
    both = pair(name)
    pictures = [both.picture(seed) for seed in range(3)]
    assert not np.array_equal(pictures[0], pictures[1])
    denoiser = both.part("unet" if hasattr(both.patched, "unet") else "transformer")
    assert denoiser.captures >= 1
    assert denoiser.replays >= 6
    assert denoiser.declined is None


def test_sizes_and_prompts_change_between_pictures(pair: MakePair) -> None:
    both = pair("sd15")
    for seed, (size, prompt) in enumerate(
        [(64, "a red circle"), (32, "a blue square"), (64, "a cat"), (32, ""), (64, "two cats")]
    ):
        both.picture(seed, prompt, height=size, width=size)
    both.picture(9, num_images_per_prompt=2)
    assert both.part("unet").captures == 3


def test_components_are_patched_by_kind(pair: MakePair) -> None:
    assert {part.name for part in pair("sd15").report.parts} == {"unet", "text_encoder", "vae"}
    few = pair("sd15", text_encoder=False, vae=False)
    assert {part.name for part in few.report.parts} == {"unet"}
    two = pair("sdxl").report
    assert {part.name for part in two.parts} == {"unet", "text_encoder", "text_encoder_2", "vae"}


def test_nothing_changes_without_a_device_that_records() -> None:
    pipe = tiny.pipeline("sd15")
    before = {name: dict(vars(m)) for name, m in modules(pipe).items()}
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert accel.patch(pipe) is pipe
    assert {name: dict(vars(m)) for name, m in modules(pipe).items()} == before
    assert "no CUDA device" in str(accel.report(pipe))
    assert accel.report(pipe).parts == []
    assert np.array_equal(draw(pipe, "sd15"), draw(tiny.pipeline("sd15"), "sd15"))
    accel.unpatch(pipe)
    with pytest.raises(ValueError, match="is not patched"):
        accel.report(pipe)


def modules(pipe: Any) -> dict[str, nn.Module]:
    return {name: c for name, c in pipe.components.items() if isinstance(c, nn.Module)}


def facts(pipe: Any) -> dict[str, Any]:
    """What patching must bring back: attributes, hooks, signatures, where weights lie."""
    return {
        name: (
            dict(vars(module)),
            [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()],
            inspect.signature(module.forward),
            [p.data_ptr() for p in module.state_dict().values()],
            module.forward,
            getattr(module, "decode", None),
        )
        for name, module in modules(pipe).items()
    }


def test_unpatch_brings_everything_back(device: torch.device, backend: Backend) -> None:
    pipe = tiny.pipeline("sd15").to(device)
    pipe.set_progress_bar_config(disable=True)
    expected = draw(pipe, "sd15")
    before = facts(pipe)
    gc.collect()
    backend.empty_cache()
    reserved = backend.reserved_bytes(device)
    for _ in range(2):
        accel.patch(pipe, capture="always")
        for _ in range(2):
            assert np.array_equal(draw(pipe, "sd15"), expected)
        assert accel.report(pipe)["unet"].captures == 1
        assert accel.report(pipe).pool_bytes > 0
        assert accel.unpatch(pipe) is pipe
        assert facts(pipe) == before
        gc.collect()
        backend.empty_cache()
        assert backend.reserved_bytes(device) - reserved < 1 << 20
    assert np.array_equal(draw(pipe, "sd15"), expected)


def test_unpatching_what_is_not_patched_changes_nothing() -> None:
    pipe = tiny.pipeline("sd15")
    before = facts(pipe)
    assert accel.unpatch(pipe) is pipe
    assert facts(pipe) == before


def test_signatures_are_kept(device: torch.device) -> None:
    plain, patched = tiny.pipeline("flux"), accel.patch(tiny.pipeline("flux").to(device))
    for name, module in modules(plain).items():
        other = modules(patched)[name]
        assert inspect.signature(other.forward) == inspect.signature(module.forward)
        assert other.forward.__name__ == "forward"
        assert other.forward.__doc__ == module.forward.__doc__
        assert type(other) is type(module)


def test_patching_twice_changes_nothing(pair: MakePair) -> None:
    both = pair("sd15")
    both.picture(0)
    before = facts(both.patched)
    accel.patch(both.patched, capture="always")
    assert facts(both.patched) == before
    both.picture(1)
    assert both.part("unet").captures == 1


def test_patching_again_changes_the_options(pair: MakePair) -> None:
    both = pair("sd15")
    both.picture(0)
    accel.patch(both.patched, capture="always", vae=False, memory_limit="1GiB")
    assert {part.name for part in both.report.parts} == {"unet", "text_encoder"}
    assert "decode" not in vars(both.patched.vae)
    both.picture(1)
    both.picture(2)
    assert both.report.memory_limit == 1 << 30
    assert both.part("unet").captures == 1


def test_a_component_assigned_afterwards_draws_as_without_a_patch(pair: MakePair) -> None:
    both = pair("sd15")
    both.picture(0)

    def replace(pipe: Any) -> None:
        pipe.unet = tiny.pipeline("sd15", seed=3).unet.to(pipe.device)

    both.both(replace)
    for seed in range(1, 4):
        both.picture(seed)


def test_a_component_assigned_afterwards_is_patched(pair: MakePair) -> None:
    both = pair("sd15")
    both.patched.unet = tiny.pipeline("sd15").unet.to(both.patched.device)
    both.picture(1)
    both.picture(2)
    assert both.part("unet").replays > 0


def test_two_pipelines_share_components(device: torch.device, pair: MakePair) -> None:
    from diffusers import StableDiffusionImg2ImgPipeline

    both = pair("sd15")
    both.picture(0)
    others = [
        StableDiffusionImg2ImgPipeline(**pipe.components) for pipe in (both.plain, both.patched)
    ]
    accel.patch(others[1], capture="always")
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    for seed in range(2):
        drawn = []
        for pipe in others:
            pipe.set_progress_bar_config(disable=True)
            generator = torch.Generator().manual_seed(seed)
            drawn.append(
                pipe(
                    "a cat",
                    image=image,
                    generator=generator,
                    output_type="np",
                    num_inference_steps=4,
                )
            )
        assert np.array_equal(drawn[0][0], drawn[1][0])
    both.picture(1)
    accel.unpatch(others[1])
    both.picture(2)
    assert both.part("unet").captures >= 1
    accel.unpatch(both.patched)
    assert "forward" not in vars(both.patched.unet)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"mode": "quick"}, "mode='quick'"),
        ({"capture": "never"}, "capture='never'"),
        ({"memory_limit": "lots"}, "memory_limit='lots'"),
    ],
)
def test_a_bad_option_is_refused_by_name(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        accel.patch(nn.Linear(2, 2), **options)


def test_what_is_no_pipeline_is_refused() -> None:
    with pytest.raises(TypeError, match="not dict"):
        accel.patch({})


def test_calls_under_gradients_are_eager_and_right(device: torch.device) -> None:
    unet = tiny.FAMILIES["sd15"].make().to(device).requires_grad_(True)
    accel.patch(unet, capture="always")
    inputs = {
        k: v.to(device) if isinstance(v, torch.Tensor) else v
        for k, v in tiny.FAMILIES["sd15"].inputs(0).items()
    }
    for _ in range(3):
        unet(**inputs)[0].square().mean().backward()
    assert unet.conv_in.weight.grad is not None
    assert accel.report(unet)["module"].eager_calls == 3


class _Offload:
    """What a hook of accelerate that moves weights around looks like."""

    offload = True


def test_everything_declined_is_logged_once(
    pair: MakePair, caplog: pytest.LogCaptureFixture
) -> None:
    both = pair("sd15", vae=False, text_encoder=False)
    both.both(lambda pipe: setattr(pipe.unet.conv_in, "_hf_hook", _Offload()))
    with caplog.at_level(logging.INFO):
        for seed in range(3):
            both.picture(seed)
    assert both.part("unet").captures == 0
    assert sum("accel" in record.name for record in caplog.records) == 1


def test_schedulers_do_not_wait_while_patched_and_are_stock_afterwards(
    device: torch.device,
) -> None:
    both = Pair("sd15", device)
    kind = type(both.plain.scheduler)
    assert is_sync_free(both.patched.scheduler)
    both.patched.scheduler = EulerDiscreteScheduler.from_config(both.patched.scheduler.config)
    both.plain.scheduler = EulerDiscreteScheduler.from_config(both.plain.scheduler.config)
    for seed in range(3):
        both.picture(seed)
    assert is_sync_free(both.patched.scheduler)
    accel.unpatch(both.patched)
    assert type(both.patched.scheduler) is EulerDiscreteScheduler is not kind
