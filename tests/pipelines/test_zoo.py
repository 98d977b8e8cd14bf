"""The zoo has the published sizes and builds complete pipelines; no real size is made here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from accel.pipelines import tiny_recipes, zoo, zoo_configs
from accel.pipelines.errors import AccelError
from accel.pipelines.machine import free_memory_bytes, memory_bytes
from accel.pipelines.random_weights import build, count, on_meta
from accel.pipelines.recipe import Part, stock_class
from accel.pipelines.zoo_published import PUBLISHED


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More threads than free cores make tiny models slower, not faster."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", zoo.names())
def test_every_part_has_its_published_size_within_one_percent(name: str) -> None:
    counts = zoo.parameter_counts(name)
    assert counts.keys() == PUBLISHED[name].keys()
    for part, parameters in counts.items():
        published, source = PUBLISHED[name][part]
        assert abs(parameters / published - 1) < 0.01, (part, parameters, source)


def test_weights_that_main_memory_has_no_room_for_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before they are made: the system ends a process that takes too much, without a word."""
    monkeypatch.setattr(zoo, "free_memory_bytes", lambda: 3 * 2**30)
    wanted = r"^out of memory: the weights of sd15 take 4\.0 GiB, 3\.0 are free here: .*smaller"
    with pytest.raises(AccelError, match=wanted):
        zoo.build("sd15", "cpu", torch.float32)


def test_free_memory_is_told_in_bytes() -> None:
    free, there = free_memory_bytes(), memory_bytes()
    assert free is not None and there is not None and 2**20 < free <= there


def test_the_zoo_holds_the_nine_models() -> None:
    expected = {"zimage", "qwenimage", "flux", "sdxl", "sd15", "sd35m", "sana", "pixart", "wan"}
    assert set(zoo.names()) == expected


@pytest.mark.parametrize("name", zoo.names())
def test_defaults_are_arguments_that_the_stock_pipeline_takes(name: str) -> None:
    taken = inspect.signature(stock_class(zoo_configs.RECIPES[name].pipeline).__call__).parameters
    settings = zoo.defaults(name)
    assert set(settings) <= set(taken)
    assert settings["num_inference_steps"] > 0
    settings["height"] = 1
    assert zoo.defaults(name)["height"] != 1, "a caller's change must not stay"


@pytest.mark.parametrize("name", zoo.names())
def test_a_pipeline_without_weights_has_scheduler_and_tokenizers(name: str) -> None:
    pipe = zoo.build(name, device="cpu", parts=())
    recipe = zoo_configs.RECIPES[name]
    assert type(pipe).__name__ == recipe.pipeline
    assert type(pipe.scheduler).__name__ == recipe.scheduler.kind
    assert all(getattr(pipe, part) is None for part in recipe.parts)
    prompt = "a red circle on a blue background, zebra, Ünïcode"
    for tool in recipe.tools:
        encoder = recipe.parts[tool.replace("tokenizer", "text_encoder")].config
        size = encoder.get("vocab_size") or encoder["text_config"]["vocab_size"]
        ids = getattr(pipe, tool)(prompt).input_ids
        assert 8 < len(ids) < 77
        assert 0 <= min(ids) <= max(ids) < size


def test_parts_limit_what_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch, "flux")
    pipe = zoo.build("flux", device="cpu", dtype=torch.float32, parts="transformer")
    assert pipe.vae is None
    assert isinstance(pipe.transformer, nn.Module)


@pytest.mark.parametrize("call", [zoo.build, zoo.defaults, zoo.dtype, zoo.parameter_counts])
def test_an_unknown_model_is_named(call: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match=r"'nothing'.*zimage"):
        call("nothing")


def test_an_unknown_part_is_named() -> None:
    with pytest.raises(ValueError, match=r"'head'.*transformer"):
        zoo.build("flux", device="cpu", parts=("head",))


def shrink(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Puts the tiny parts of the same pipeline under the zoo's scheduler and tools."""
    small = tiny_recipes.RECIPES[{"sd35m": "sd3"}.get(name, name)]()
    big = zoo_configs.RECIPES[name]
    recipe = replace(big, parts=small.parts, tools=small.tools)
    monkeypatch.setitem(zoo_configs.RECIPES, name, recipe)


@pytest.mark.parametrize("name", zoo.names())
def test_the_zoos_scheduler_and_settings_draw_a_finite_varying_picture(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch, name)
    pipe = zoo.build(name, device="cpu", dtype=torch.bfloat16)
    size = {"height": 32, "width": 32, "num_inference_steps": 4}
    settings = {**zoo.defaults(name), **size}
    if "num_frames" in settings:
        settings["num_frames"] = 5
    if "max_sequence_length" in inspect.signature(pipe.__call__).parameters:
        settings["max_sequence_length"] = 64
    generator = torch.Generator().manual_seed(0)
    latents = pipe("a red circle", generator=generator, output_type="latent", **settings)[0]
    assert torch.as_tensor(latents).isfinite().all()
    generator = torch.Generator().manual_seed(0)
    drawn = pipe("a red circle", generator=generator, output_type="np", **settings)[0]
    assert drawn[0].std() > 0.02


class Sample(nn.Module):
    """A module with everything that must come out right."""

    _keep_in_fp32_modules = ("norm",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 16)
        self.tied = nn.Linear(64, 16)
        self.norm = nn.LayerNorm(16)
        self.embedding = nn.Embedding(10, 16)
        self.register_buffer("table", torch.arange(5.0), persistent=False)
        self.register_buffer("ids", torch.arange(5))
        self.tie_weights()

    def tie_weights(self) -> None:
        self.tied.weight = self.linear.weight


def test_buffers_keep_their_values_and_tied_weights_stay_tied() -> None:
    made = build(Sample, "cpu", torch.bfloat16, seed=0)
    assert torch.equal(made.table, torch.arange(5.0))
    assert torch.equal(made.ids, torch.arange(5))
    assert made.tied.weight is made.linear.weight
    assert made.linear.weight.dtype == torch.bfloat16
    assert made.norm.weight.dtype == torch.float32, "the class asks for it"
    assert not made.training


def test_weights_are_random_finite_and_repeatable() -> None:
    made, same, other = (build(Sample, "cpu", torch.float32, seed) for seed in (1, 1, 2))
    for (name, one), two, three in zip(
        made.named_parameters(), same.parameters(), other.parameters(), strict=True
    ):
        assert one.isfinite().all()
        assert one.std() > 0, name
        assert torch.equal(one, two)
        assert not torch.equal(one, three)
    assert 0.9 < made.norm.weight.mean() < 1.1
    assert 0.1 < made.linear.weight.std() < 0.15  # 64 ** -0.5


def test_nothing_is_allocated_before_weights_are_made() -> None:
    module = on_meta(Part("FluxTransformer2DModel", {}).make)
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert count(module) > 11e9
