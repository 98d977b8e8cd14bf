"""Which folders are causal LMs that may be loaded, and what is said of the others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from accel.pipelines import language_loading
from accel.pipelines.demo_lm import demo_lm_folder
from accel.pipelines.errors import BadInput
from accel.pipelines.language_models import resolve
from accel.pipelines.loading import Placement
from accel.pipelines.models import Trust

CPU = Placement(torch.device("cpu"), torch.float32)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the built-in model that a test may change."""
    return Path(shutil.copytree(demo_lm_folder(), tmp_path / "copy"))


def _edit(path: Path, **values: object) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **values}), encoding="utf-8")


def test_the_built_in_model_is_called_demo() -> None:
    assert resolve("demo").folder == demo_lm_folder()


def test_a_folder_called_demo_is_not_taken_for_it(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy.rename(copy.parent / "demo").parent)
    assert resolve("demo").folder == demo_lm_folder()
    assert resolve("./demo").folder == Path("demo")


def test_a_folder_is_a_model(copy: Path) -> None:
    speaker = language_loading.load(resolve(str(copy)), CPU)
    assert speaker.positions == 8192
    assert not speaker.model.training
    assert speaker.model.dtype == torch.float32


def test_the_dtype_is_as_asked(copy: Path) -> None:
    where = Placement(torch.device("cpu"), torch.bfloat16)
    assert language_loading.load(resolve(str(copy)), where).model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "name", ["nowhere", "./nowhere/at/all", "a/b/c", "", "a" * 300, "~nobody-of-that-name/x"]
)
def test_a_missing_folder_is_named(name: str) -> None:
    with pytest.raises(BadInput, match=rf"^no such model folder: {name} \(a model is demo, a"):
        resolve(name)


def test_a_file_is_no_folder(copy: Path) -> None:
    with pytest.raises(BadInput, match="is a file: a model is demo, a folder or a hub id"):
        resolve(str(copy / "model.safetensors"))


def test_a_missing_built_in_model_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise FileNotFoundError("the built-in language model is missing")

    monkeypatch.setattr("accel.pipelines.demo_lm.demo_lm_folder", missing)
    with pytest.raises(BadInput, match="is missing, or give a folder or hub id as --model"):
        resolve("demo")


def test_a_pipeline_is_no_language_model(saved: Callable[[str], Path]) -> None:
    with pytest.raises(BadInput, match="is no causal LM but a diffusers pipeline: accel generate"):
        resolve(str(saved("sd15")))


def test_a_folder_called_like_a_picture_model_of_the_zoo_is_that_folder(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy.rename(copy.parent / "sdxl").parent)
    assert resolve("sdxl").folder == Path("sdxl")
    with pytest.raises(BadInput, match="--model sd15 is no causal LM but a picture model"):
        resolve("sd15")


def test_a_pipelines_part_is_no_language_model(saved: Callable[[str], Path]) -> None:
    with pytest.raises(BadInput, match="no causal LM of the kind 'clip_text_model'"):
        resolve(str(saved("sd15") / "text_encoder"))
    with pytest.raises(BadInput, match=r"there are no weights|is no causal LM: it names no kind"):
        resolve(str(saved("sd15") / "unet"))


def test_an_empty_folder_is_no_language_model(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"is no causal LM: it has no config.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "words"), [("{", "cannot be read as JSON"), ("[]", "is no configuration")]
)
def test_a_broken_configuration_is_named(copy: Path, text: str, words: str) -> None:
    (copy / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(BadInput, match=rf"config.json {words}"):
        resolve(str(copy))


def test_missing_weights_are_told(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(BadInput, match="there are no weights"):
        resolve(str(copy))


def test_pickle_weights_are_refused_unless_allowed(copy: Path) -> None:
    from safetensors.torch import load_file

    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    assert resolve(str(copy)).folder == copy  # beside safetensors it is never loaded
    (copy / "model.safetensors").unlink()
    with pytest.raises(BadInput, match=r"needs pickle \(pytorch_model.bin\).*--trust-pickle"):
        resolve(str(copy))
    trust = Trust(pickle=True)
    speaker = language_loading.load(resolve(str(copy), trust), CPU, trust=trust)
    own = language_loading.load(resolve("demo"), CPU).model.state_dict()
    assert all(torch.equal(w, own[name]) for name, w in speaker.model.state_dict().items())


def test_code_of_its_own_is_refused_unless_allowed(copy: Path) -> None:
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    _edit(copy / "config.json", auto_map=names, model_type="own")
    (copy / "own.py").write_text("raise SystemExit('ran')", encoding="utf-8")
    with pytest.raises(BadInput, match=r"needs code of its own.*--trust-remote-code"):
        resolve(str(copy))
    assert resolve(str(copy), Trust(code=True)).folder == copy


def test_code_beside_a_known_kind_is_never_run(copy: Path) -> None:
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    _edit(copy / "config.json", auto_map=names)
    (copy / "own.py").write_text("raise SystemExit('ran')", encoding="utf-8")
    model = language_loading.load(resolve(str(copy)), CPU).model
    assert type(model).__name__ == "Qwen3ForCausalLM"


def test_weights_that_would_be_drawn_at_random_are_refused(copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    words = r"lack 1 of its weights \(model.layers.1.mlp.up_proj.weight\)"
    with pytest.raises(BadInput, match=words):
        language_loading.load(resolve(str(copy)), CPU)


def test_broken_weights_are_one_line(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(BadInput, match=r"--model .* cannot be loaded: "):
        language_loading.load(resolve(str(copy)), CPU)


def test_a_missing_tokenizer_is_one_line(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    with pytest.raises(BadInput, match=r"--model .*: there is no tokenizer in that folder"):
        language_loading.load(resolve(str(copy)), CPU)


def test_a_broken_tokenizer_is_one_line(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{}\n{}", encoding="utf-8")
    with pytest.raises(BadInput, match=r"--model .*: its tokenizer cannot be loaded: ") as refused:
        language_loading.load(resolve(str(copy)), CPU)
    assert "\n" not in str(refused.value)
