import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from accel.pipelines import hub

Cli = Callable[..., Any]
Folder = Callable[[str], Path]
SMALL = ("--size", "64", "--steps", "2", "--seed", "1", "--mode", "off")


@pytest.fixture
def lora(saved: Folder, tmp_path: Path) -> Path:
    """A random LoRA for the tiny pipeline's UNet."""
    from diffusers import StableDiffusionPipeline
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    torch.manual_seed(0)
    pipe = StableDiffusionPipeline.from_pretrained(saved("sd15"))
    targets = ["to_q", "to_k", "to_v"]
    pipe.unet.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=targets))
    layers = get_peft_model_state_dict(pipe.unet)
    StableDiffusionPipeline.save_lora_weights(tmp_path / "lora", unet_lora_layers=layers)
    return tmp_path / "lora" / "pytorch_lora_weights.safetensors"


def _pixels(name: str) -> bytes:
    with Image.open(name) as image:
        return image.tobytes()


def test_a_lora_changes_the_picture_by_its_scale(accel_cli: Cli, saved: Folder, lora: Path) -> None:
    runs = {"plain": (), "half": ("--lora", f"{lora}:0.5"), "full": ("--lora", lora)}
    for name, arguments in runs.items():
        done = accel_cli(
            "generate", "x", "-m", saved("sd15"), *SMALL, "-o", f"{name}.png", *arguments
        )
        assert done.code == 0, done.err
    assert len({_pixels(f"{name}.png") for name in runs}) == 3
    again = accel_cli("generate", "--from", "half.png", "--mode", "off", "-o", "again.png")
    assert again.code == 0
    assert again.err == ""
    assert Path("again.png").read_bytes() == Path("half.png").read_bytes()


def test_a_lora_that_changed_since_is_told(accel_cli: Cli, saved: Folder, lora: Path) -> None:
    from safetensors.torch import load_file, save_file

    first = ("generate", "x", "-m", saved("sd15"), *SMALL, "--lora", lora, "-o", "first.png")
    assert accel_cli(*first).code == 0
    save_file({name: layer * 2 for name, layer in load_file(lora).items()}, lora)
    again = accel_cli("generate", "--from", "first.png", "--mode", "off", "-o", "again.png")
    assert again.code == 0
    assert again.complaint.startswith(f"accel: the picture was made with LoRA {lora} ")


def test_a_cached_lora_works_while_the_hub_is_out_of_reach(
    accel_cli: Cli, saved: Folder, lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "cache" / "models--owner--style"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    shutil.copytree(lora.parent, home / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "unreachable", lambda name, option: "the hub is out of reach")
    one, other = (
        accel_cli("generate", "x", "-m", saved("sd15"), *SMALL, "-o", f"{name}.png", "--lora", path)
        for name, path in (("hub", "owner/style:0.5"), ("file", f"{lora}:0.5"))
    )
    assert (one.code, other.code) == (0, 0), one.err
    assert one.complaint == "accel: the hub is out of reach; taking owner/style from the cache"
    assert _pixels("hub.png") == _pixels("file.png")


def test_a_lora_of_another_model_is_refused(accel_cli: Cli, saved: Folder, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    layers = {f"unet.nowhere.{end}.weight": torch.ones(2, 2) for end in ("lora_A", "lora_B")}
    save_file(layers, tmp_path / "other.safetensors")
    done = accel_cli("generate", "x", "-m", saved("sd15"), *SMALL, "--lora", "other.safetensors")
    assert done.code == 2
    assert "--lora" in done.complaint


def test_a_lora_that_needs_pickle_is_refused_unless_allowed(
    accel_cli: Cli, saved: Folder, lora: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    torch.save(load_file(lora), tmp_path / "style.bin")
    arguments = ("generate", "x", "-m", saved("sd15"), *SMALL, "-o", "x.png")
    refused = accel_cli(*arguments, "--lora", "style.bin")
    assert refused.code == 2
    assert refused.complaint == (
        "accel: --lora style.bin needs pickle: allow it with --trust-pickle"
    )
    allowed = accel_cli(*arguments, "--lora", "style.bin", "--trust-pickle")
    assert allowed.code == 0, allowed.err


def test_weights_in_the_fp16_variant_load(accel_cli: Cli, copied: Folder) -> None:
    folder = copied("sd15")
    for part in ("unet", "vae", "text_encoder"):
        for file in (folder / part).glob("*.safetensors"):
            file.rename(file.with_name(file.name.replace(".safetensors", ".fp16.safetensors")))
    done = accel_cli("generate", "x", "-m", folder, *SMALL, "-o", "x.png")
    assert done.code == 0, done.err


@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_a_modular_folder_runs(accel_cli: Cli, saved: Folder, tmp_path: Path, name: str) -> None:
    from diffusers import ModularPipeline

    pipe = ModularPipeline.from_pretrained(str(saved(name)))
    pipe.load_components()
    pipe.save_pretrained(str(tmp_path / "modular"), overwrite_modular_index=True)
    assert not (tmp_path / "modular" / "model_index.json").exists()
    done = accel_cli("generate", "x", "-m", "modular", *SMALL, "-o", "x.png")
    assert (done.code, done.err) == (0, "")
    with Image.open("x.png") as image:
        assert image.size == (64, 64)
        assert len(set(image.getdata())) > 1


def test_a_modular_folder_with_a_missing_part_is_one_line(
    accel_cli: Cli, saved: Folder, tmp_path: Path
) -> None:
    from diffusers import ModularPipeline

    pipe = ModularPipeline.from_pretrained(str(saved("flux")))
    pipe.load_components()
    pipe.save_pretrained(str(tmp_path / "modular"), overwrite_modular_index=True)
    shutil.rmtree(tmp_path / "modular" / "vae")
    done = accel_cli("generate", "x", "-m", "modular", *SMALL)
    assert done.code == 2
    assert done.complaint == "accel: modular cannot be loaded: no vae (--debug says why)"
