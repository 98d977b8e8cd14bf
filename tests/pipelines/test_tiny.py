"""Tiny families and pipelines give calls and pictures that are worth comparing."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from accel.memory import Pool
from accel.pipelines import tiny
from accel.pipelines.random_weights import count
from accel.runner import GraphRunner
from accel.signature import map_tree

ALL = {**tiny.FAMILIES, **tiny.FLEX_FAMILIES}

# The class fixes a width: 2048 behind the glyph encoder, 32 groups in every norm, 1280 of a CLIP.
WIDE_BY_CLASS = {"hunyuan_image", "hunyuan_video15", "svd", "wan_animate2"}

# The classes of denoisers that no tiny family is of, and why.
SOUND = "makes sound, neither pictures nor videos"
A_PART = "no pipeline's denoiser: a part of one"
LEFT_OUT = {
    "AceStepTransformer1DModel": SOUND,
    "ControlNetXSAdapter": A_PART,  # of UNetControlNetXSModel; its own forward raises
    "CosmosControlNetModel": "calls torchvision, which this project does without",
    "DreamLiteTransformer2DModel": A_PART,  # of DreamLiteUNetModel
    "LongCatAudioDiTTransformer": SOUND,
    "MiniMaxMusic3RVQDepthDecoder": SOUND,
    "MiniMaxMusic3Transformer1DModel": SOUND,
    "MotionAdapter": A_PART,  # of UNetMotionModel; it has no forward
    "RFD4ProteinaTransformer": "makes proteins",
    "StableAudio3DiTModel": SOUND,
    "StableAudioDiTModel": SOUND,
    "T5FilmDecoder": SOUND,
    "TransformerTemporalModel": A_PART,  # of UNet3DConditionModel and others
    "UNet1DModel": SOUND,
}
ROOMS = ("transformers", "unets", "controlnets")
"""Packages of diffusers.models that hold denoisers and what steers them."""


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


def moved(tree: Any, device: torch.device) -> Any:
    return map_tree(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, tree)


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, two) for one, two in zip(some, others, strict=True))


def denoiser_classes() -> set[str]:
    """Names of the modules that diffusers exports from its rooms of denoisers."""
    prefixes = tuple(f"diffusers.models.{room}." for room in ROOMS)
    exported = [getattr(diffusers, name) for name in dir(diffusers)]
    kinds = [x for x in exported if isinstance(x, type) and issubclass(x, torch.nn.Module)]
    return {kind.__name__ for kind in kinds if kind.__module__.startswith(prefixes)}


def names_in_pipelines() -> set[str]:
    """Every word that the code of an exported pipeline, classic or modular, is written with."""
    root = Path(diffusers.__file__).parent
    code = [*root.glob("pipelines/**/*.py"), *root.glob("modular_pipelines/**/*.py")]
    return {word for path in code for word in re.findall(r"\w+", path.read_text("utf-8"))}


def picture(pipe: Any, name: str, prompt: str = "a red circle", seed: int = 0) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    drawn = pipe(prompt, generator=generator, output_type="np", **tiny.CALLS[name])
    return np.asarray(drawn[0][0])


def test_every_denoiser_class_has_a_family_or_a_reason() -> None:
    covered = {family.kind for family in ALL.values()}
    exported = denoiser_classes()
    assert len(exported) > 90
    assert exported - covered == set(LEFT_OUT)
    assert not covered & set(LEFT_OUT)


def test_a_pipeline_uses_every_class_of_the_zoo() -> None:
    used = names_in_pipelines()
    assert {family.kind for family in ALL.values()} - used == set()


def test_at_least_sixty_classes_are_covered() -> None:
    assert len({family.kind for family in tiny.FAMILIES.values()}) >= 60


@pytest.mark.gpu
@pytest.mark.parametrize("name", tiny.FLEX_FAMILIES)
def test_a_family_of_flex_attention_equals_eager_on_a_gpu(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    family, device = tiny.FLEX_FAMILIES[name], torch.device("cuda:0")
    plain, watched = (family.make(seed=0).to(device) for _ in range(2))
    runner = GraphRunner(watched, pool=Pool(device), capture="always", module=watched, name=name)
    for seed, variant in [(1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (3, 1), (4, 0)]:
        call, again = (moved(family.inputs(seed, variant), device) for _ in range(2))
        with torch.no_grad():
            assert same(tensors_in(runner(**again)), tensors_in(plain(**call)))
    report = runner.report
    assert report.captures or report.reasons, report


@pytest.mark.parametrize("name", ALL)
def test_a_family_computes_finite_varying_outputs_that_depend_on_time(name: str) -> None:
    family = ALL[name]
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


@pytest.mark.parametrize("name", ALL)
def test_seeds_choose_weights_latents_and_time(name: str) -> None:
    family = ALL[name]
    call, other = family.inputs(seed=1), family.inputs(seed=2)
    assert not same(tensors_in([call[family.time]]), tensors_in([other[family.time]]))
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
