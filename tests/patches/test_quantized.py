"""Quantized denoisers behind a patched pipeline: the plain pipeline's picture, bit for bit.

torchao, GGUF and bitsandbytes each keep their weights in another way: a wrapper around inner
tensors, a tensor of another class, a layer with a state beside it. Each is skipped where its
library is missing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch import nn

from accel.pipelines import tiny
from tests.patches.pair import Pair

MakePair = Callable[..., Pair]
PARTS = {"sd15": "unet", "flux": "transformer"}
ONLY_DENOISER = {"text_encoder": False, "vae": False}


def linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """The linear layers whose width quantizers can cut into blocks: (parent, name, layer)."""
    return [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, nn.Linear) and layer.in_features % 32 == 0
    ]


def torchao(config: str) -> Callable[[nn.Module], None]:
    def quantize(model: nn.Module) -> None:
        library = importlib.import_module("torchao.quantization")
        wide = {id(layer) for _, _, layer in linears(model)}
        library.quantize_(model, getattr(library, config)(), lambda x, _: id(x) in wide)

    return quantize


def gguf(kind: str) -> Callable[[nn.Module], None]:
    def quantize(model: nn.Module) -> None:
        library = importlib.import_module("gguf")
        diffusers = importlib.import_module("diffusers.quantizers.gguf.utils")
        quant_type = library.GGMLQuantizationType[kind]
        for parent, name, old in linears(model):
            new = diffusers.GGUFLinear(
                old.in_features, old.out_features, old.bias is not None, torch.float32, "meta"
            )
            packed = library.quants.quantize(old.weight.detach().cpu().numpy(), quant_type)
            weight = torch.from_numpy(packed).to(old.weight.device)
            new.weight = diffusers.GGUFParameter(weight, quant_type=quant_type)
            new.bias = old.bias
            setattr(parent, name, new.requires_grad_(False))

    return quantize


def bitsandbytes(layer: str, weight: str, **options: Any) -> Callable[[nn.Module], None]:
    def quantize(model: nn.Module) -> None:
        library = importlib.import_module("bitsandbytes")
        for parent, name, old in linears(model):
            device, bias = old.weight.device, old.bias is not None
            makes = {k: x for k, x in options.items() if k != "threshold"}
            new = getattr(library.nn, layer)(old.in_features, old.out_features, bias, **options)
            values = old.weight.detach().cpu()
            new.weight = getattr(library.nn, weight)(values, requires_grad=False, **makes)
            new.bias = old.bias
            setattr(parent, name, new.to(device).requires_grad_(False))

    return quantize


METHODS: dict[str, Callable[[nn.Module], None]] = {
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao fp8": torchao("Float8WeightOnlyConfig"),
    "gguf Q8_0": gguf("Q8_0"),
    "gguf Q4_0": gguf("Q4_0"),
    "bitsandbytes 8 bit": bitsandbytes("Linear8bitLt", "Int8Params", has_fp16_weights=False),
    "bitsandbytes 8 bit, outliers": bitsandbytes(
        "Linear8bitLt", "Int8Params", has_fp16_weights=False, threshold=0.5
    ),
    "bitsandbytes 4 bit": bitsandbytes("Linear4bit", "Params4bit", quant_type="nf4"),
}
"""Each quantizes the linear layers of a model in place, on the device where these are."""


@pytest.fixture(params=PARTS)
def name(request: pytest.FixtureRequest) -> str:
    """A tiny pipeline's name."""
    return str(request.param)


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest, device: torch.device) -> str:
    """A way to quantize whose library is there and knows the device."""
    library = str(request.param).split()[0]
    pytest.importorskip(library, exc_type=ImportError)
    if library == "bitsandbytes" and device.type == "sim":
        pytest.skip("bitsandbytes knows no device in Python")
    return str(request.param)


def denoiser(pipe: Any, name: str) -> nn.Module:
    model = getattr(pipe, PARTS[name])
    assert isinstance(model, nn.Module)
    return model


def quantized(pair: MakePair, name: str, method: str) -> Pair:
    """Pipelines with a quantized denoiser, which have drawn another picture than before."""
    both = pair(name, **ONLY_DENOISER)
    original = both.picture(0)
    both.both(lambda pipe: METHODS[method](denoiser(pipe, name)))
    assert not np.array_equal(both.picture(0), original)
    return both


def assert_served(both: Pair, replays_before: int = 0) -> None:
    """It was replayed, or it was declined and the report says why."""
    part = both.part(PARTS[both.name])
    reasons = {reason for reason in part.reasons if "first call" not in reason}
    assert part.replays > replays_before or part.declined or reasons, part


def test_fresh_prompts(pair: MakePair, name: str, method: str) -> None:
    both = quantized(pair, name, method)
    pictures = [
        both.picture(seed, prompt)
        for seed, prompt in enumerate(("a blue square", "two dogs", "a red circle in the snow"))
    ]
    assert not np.array_equal(pictures[0], pictures[1])
    assert_served(both)


def test_layers_swapped(pair: MakePair, method: str) -> None:
    """Other layers are put in, as a checkpoint loaded anew does."""
    both = quantized(pair, "sd15", method)
    before = both.picture(1)

    def swap(pipe: Any) -> None:
        other = tiny.pipeline("sd15", seed=1).unet.to(pipe.device)
        news = linears(other)
        METHODS[method](other)
        for (parent, name, _), (donor, _, _) in zip(linears(pipe.unet), news, strict=True):
            setattr(parent, name, getattr(donor, name))

    both.both(swap)
    assert not np.array_equal(both.picture(1), before)
    both.picture(2)
    assert_served(both)


def weights(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """The quantized weights: (layer, weight)."""
    return [
        (layer, layer.weight)
        for layer in model.modules()
        if hasattr(layer, "weight") and type(layer.weight) not in (nn.Parameter, type(None))
    ]


def inner(weight: Any) -> list[torch.Tensor]:
    """The scales of a torchao weight, the bytes of another."""
    return [weight.scale] if hasattr(weight, "__tensor_flatten__") else [weight.data]


@pytest.mark.parametrize("method", [m for m in METHODS if "bits" not in m], indirect=True)
@pytest.mark.parametrize("keeps_the_old", [False, True])
def test_weights_replaced(pair: MakePair, method: str, keeps_the_old: bool) -> None:
    both = quantized(pair, "sd15", method)
    before = both.picture(1)
    olds: list[Any] = []

    def replace(pipe: Any) -> None:
        other = tiny.pipeline("sd15", seed=1).unet.to(pipe.device)
        METHODS[method](other)
        news = weights(other)
        for (layer, old), (_, new) in zip(weights(pipe.unet), news, strict=True):
            layer.weight = new
            olds.append(old)

    both.both(replace)
    if not keeps_the_old:
        olds.clear()
    assert not np.array_equal(both.picture(1), before)
    both.picture(2)
    assert_served(both)


def test_weights_changed_in_place(pair: MakePair, method: str) -> None:
    both = quantized(pair, "sd15", method)
    before = both.picture(1)
    replays = both.part("unet").replays

    def change(pipe: Any) -> None:
        found = weights(pipe.unet)
        assert found
        for (_, weight), (_, donor) in zip(found, reversed(found), strict=True):
            for x, y in zip(inner(weight), inner(donor), strict=True):
                if x.shape == y.shape and x is not y:
                    x.copy_(y)

    with torch.no_grad():
        both.both(change)
    assert not np.array_equal(both.picture(1), before)
    both.picture(2)
    assert_served(both, replays)


def test_lora_on_top(pair: MakePair, method: str) -> None:
    """Whatever PEFT makes of quantized layers: put on, scaled, switched off."""
    both = quantized(pair, "sd15", method)
    bare = both.picture(1)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    try:
        both.both(lambda pipe: pipe.unet.add_adapter(config, adapter_name="a"))
    except (TypeError, ValueError, ImportError) as error:
        pytest.skip(f"PEFT puts no LoRA on {method}: {error}")
    on = both.picture(1)
    assert not np.array_equal(on, bare)
    both.both(lambda pipe: pipe.set_adapters("a", 0.5))
    assert not np.array_equal(both.picture(1), on)
    both.picture(2)
    both.both(lambda pipe: pipe.disable_lora())
    assert np.array_equal(both.picture(1), bare)
    assert_served(both)
