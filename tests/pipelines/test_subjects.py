from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.pipelines import loading, subjects, tiny, zoo
from accel.pipelines.errors import BadInput
from accel.pipelines.loading import placement
from accel.pipelines.models import ZOO, Trust
from accel.pipelines.settings import Lora

Folder = Callable[[str], Path]


def _tiny_zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zoo's names with the tiny pipelines behind them: real sizes are no matter for a test."""

    def build(name: str, device: Any, dtype: torch.dtype, seed: int) -> Any:
        return tiny.pipeline(name, seed).to(device, dtype)

    monkeypatch.setattr(zoo, "build", build)


@pytest.mark.parametrize("name", ["zimage", "qwenimage", "sana"])
def test_the_zoo_is_called_with_its_own_defaults(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _tiny_zoo(monkeypatch)
    subject = subjects.choose(name, {"prompt": "a cat", "steps": 2}, "cpu").load()
    settings, defaults = subject.settings, zoo.defaults(name)
    assert settings.width == defaults["width"]
    assert settings.guidance == defaults.get("guidance_scale", defaults.get("true_cfg_scale"))
    assert settings.negative_prompt == defaults.get("negative_prompt")
    assert settings.extra == {k: v for k, v in defaults.items() if k == "use_resolution_binning"}
    assert (settings.prompt, settings.steps, settings.model) == ("a cat", 2, name)
    assert subject.fingerprint is None


@pytest.mark.parametrize("allowed", [False, True])
def test_a_lora_on_the_zoo_is_checked_like_any_other(
    allowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _tiny_zoo(monkeypatch)
    (tmp_path / "style.bin").write_bytes(b"no weights")
    wishes = {"loras": (Lora(str(tmp_path / "style.bin")),), "steps": 2}
    words = "cannot be loaded" if allowed else "needs pickle"
    with pytest.raises(BadInput, match=words):
        subjects.choose("sd15", wishes, "cpu", trust=Trust(pickle=allowed)).load()
    with pytest.raises(BadInput, match="--lora gone: no such file"):
        subjects.choose("sd15", {"loras": (Lora("gone"),)}, "cpu")


def test_the_names_of_the_zoo_are_known_without_it() -> None:
    assert list(ZOO) == zoo.names()


def test_an_argument_the_zoo_does_not_take_is_refused_before_weights_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zoo, "build", lambda *arguments, **options: pytest.fail("built"))
    with pytest.raises(BadInput, match="StableDiffusionXLPipeline takes no warp"):
        subjects.choose("sdxl", {"extra": {"warp": 9}}, "cpu")


def test_an_argument_is_refused_before_weights_are_loaded(
    saved: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load", lambda *arguments, **options: pytest.fail("loaded"))
    with pytest.raises(BadInput, match="StableDiffusionPipeline takes no warp"):
        subjects.choose(str(saved("sd15")), {"extra": {"warp": 9}}, "cpu")


def test_a_folder_comes_before_the_zoo(
    saved: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zimage").symlink_to(saved("sd15"))
    subject = subjects.choose("zimage", {}, "cpu").load()
    assert type(subject.pipe).__name__ == "StableDiffusionPipeline"
    assert subject.fingerprint is not None


def test_precision_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert placement("cpu").dtype == torch.float32
    assert placement("cpu", "bfloat16").dtype_name == "bfloat16"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: False)
    assert placement().dtype == torch.float16
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: True)
    assert (placement().dtype, placement().device.type) == (torch.bfloat16, "cuda")
    with pytest.raises(Exception, match="--device cuda:3: there are 1 CUDA GPUs here"):
        placement("cuda:3")
