"""Tiny families and pipelines give calls and pictures that are worth comparing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from accel.pipelines import tiny
from accel.pipelines.random_weights import count

# The class fixes a width: 2048 behind the glyph encoder, 32 groups in every norm.
WIDE_BY_CLASS = {"hunyuan_image", "hunyuan_video15", "svd"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More threads than free cores make tiny models slower, not faster."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [leaf for item in value for leaf in tensors_in(item)]
        if isinstance(value, list | tuple)
        else []
    )


def outputs(model: torch.nn.Module, call: dict[str, Any]) -> list[torch.Tensor]:
    with torch.no_grad():
        return tensors_in(model(**copy.deepcopy(call)))  # some take items off the lists they get


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, two) for one, two in zip(some, others, strict=True))


def picture(pipe: Any, name: str, prompt: str = "a red circle", seed: int = 0) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    drawn = pipe(prompt, generator=generator, output_type="np", **tiny.CALLS[name])
    return np.asarray(drawn[0][0])


def test_there_are_enough_families() -> None:
    assert len(tiny.FAMILIES) >= 50


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_a_family_computes_finite_varying_outputs_that_depend_on_time(name: str) -> None:
    family = tiny.FAMILIES[name]
    model = family.make(seed=0)
    assert count(model) < (5_000_000 if name in WIDE_BY_CLASS else 1_000_000)
    shapes = []
    for variant in (0, 1):
        call = family.inputs(seed=1, variant=variant)
        first = outputs(model, call)
        again = outputs(model, family.inputs(seed=1, variant=variant))
        assert first
        for one, two in zip(first, again, strict=True):
            assert torch.equal(one, two)
            assert one.isfinite().all()
            assert one.std() > 1e-3
        later = {**call, family.time: family.inputs(seed=2, variant=variant)[family.time]}
        assert not same(first, outputs(model, later))
        shapes.append([tuple(leaf.shape) for leaf in tensors_in(call)])
    assert shapes[0] != shapes[1]


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_seeds_choose_weights_latents_and_time(name: str) -> None:
    family = tiny.FAMILIES[name]
    call, other = family.inputs(seed=1), family.inputs(seed=2)
    assert not torch.equal(call[family.time], other[family.time])
    model = family.make(seed=0)
    assert not same(outputs(model, call), outputs(model, other))
    assert same(outputs(family.make(seed=0), call), outputs(model, call))
    assert not same(outputs(family.make(seed=3), call), outputs(model, call))


def test_an_unknown_variant_is_named() -> None:
    with pytest.raises(ValueError, match="variant=2"):
        tiny.FAMILIES["flux"].inputs(variant=2)


@pytest.mark.parametrize("name", tiny.pipeline_names())
def test_a_pipeline_draws_a_varying_picture_that_follows_prompt_and_seed(name: str) -> None:
    pipe = tiny.pipeline(name)
    drawn = picture(pipe, name)
    call = tiny.CALLS[name]
    assert drawn.shape[-3:] == (call["height"], call["width"], 3)
    assert drawn.std() > 0.02
    assert np.array_equal(drawn, picture(pipe, name))
    assert not np.array_equal(drawn, picture(pipe, name, prompt="a green cat"))
    assert not np.array_equal(drawn, picture(pipe, name, seed=1))


def test_an_unknown_pipeline_is_named() -> None:
    with pytest.raises(ValueError, match=r"'nothing'.*sd15"):
        tiny.pipeline("nothing")


@pytest.mark.parametrize("name", tiny.pipeline_names())
def test_a_saved_pipeline_draws_the_same_picture_after_loading(name: str, tmp_path: Path) -> None:
    folder = tiny.save_pipeline(tmp_path / name, name)
    loaded = DiffusionPipeline.from_pretrained(folder)
    loaded.set_progress_bar_config(disable=True)
    # Weights read from a file are aligned differently in memory, and CPU kernels round with that.
    difference = np.abs(picture(loaded, name) - picture(tiny.pipeline(name), name)).max()
    assert difference < 1e-4
