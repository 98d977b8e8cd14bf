"""LoRA's life on a patched pipeline: in every state the picture is an unpatched pipe's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from accel.pipelines import tiny
from tests.patches.pair import Pair

MakePair = Callable[..., Pair]


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two LoRAs for the tiny "sd15", a.safetensors and b.safetensors."""
    folder = tmp_path_factory.mktemp("loras")
    for rank, name in enumerate("ab", start=2):
        torch.manual_seed(rank)
        pipe = tiny.pipeline("sd15")
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        pipe.unet.add_adapter(
            LoraConfig(r=rank, target_modules=targets, init_lora_weights=False), adapter_name=name
        )
        layers = get_peft_model_state_dict(pipe.unet, adapter_name=name)
        pipe.save_lora_weights(folder, layers, weight_name=f"{name}.safetensors")
    return folder


def test_every_state_of_a_loras_life(pair: MakePair, loras: Path) -> None:
    both = pair("sd15", text_encoder=False, vae=False)
    pictures: dict[str, np.ndarray] = {}

    def after(what: str, do: Callable[[Any], Any]) -> None:
        before = both.picture(0)
        both.both(do)
        pictures[what] = both.picture(0)
        for seed in (1, 2):
            both.picture(seed)
        assert not np.array_equal(pictures[what], before), what

    def load(name: str) -> Callable[[Any], Any]:
        return lambda pipe: pipe.load_lora_weights(
            loras, weight_name=f"{name}.safetensors", adapter_name=name
        )

    bare = both.picture(0)
    after("loaded", load("a"))
    after("halved", lambda pipe: pipe.set_adapters("a", 0.5))
    after("whole again", lambda pipe: pipe.set_adapters("a", 1.0))
    assert np.array_equal(pictures["whole again"], pictures["loaded"])
    after("second", load("b"))
    after("both", lambda pipe: pipe.set_adapters(["a", "b"], [0.7, 0.3]))
    after("disabled", lambda pipe: pipe.disable_lora())
    assert np.array_equal(pictures["disabled"], bare)
    after("enabled", lambda pipe: pipe.enable_lora())
    after("only the first", lambda pipe: pipe.set_adapters("a"))
    both.both(lambda pipe: pipe.fuse_lora())
    both.picture(0)
    both.both(lambda pipe: pipe.unfuse_lora())
    both.picture(0)
    after("unloaded", lambda pipe: pipe.unload_lora_weights())
    assert both.part("unet").replays > 0


def test_a_failed_switch_changes_nothing(pair: MakePair, loras: Path) -> None:
    both = pair("sd15", text_encoder=False, vae=False)
    both.both(lambda pipe: pipe.load_lora_weights(loras, weight_name="a.safetensors"))
    before = both.picture(0)
    for pipe in (both.plain, both.patched):
        with pytest.raises(ValueError, match="c"):
            pipe.set_adapters("c")
    assert np.array_equal(both.picture(0), before)


def test_a_scale_given_with_the_call(pair: MakePair, loras: Path) -> None:
    both = pair("sd15", text_encoder=False, vae=False)
    both.both(lambda pipe: pipe.load_lora_weights(loras, weight_name="a.safetensors"))
    pictures = [
        both.picture(0, cross_attention_kwargs={"scale": scale}) for scale in (0.0, 0.5, 0.5, 1.0)
    ]
    assert np.array_equal(pictures[1], pictures[2])
    assert not np.array_equal(pictures[0], pictures[1])
    assert not np.array_equal(pictures[1], pictures[3])
    assert np.array_equal(both.picture(0), pictures[3])
