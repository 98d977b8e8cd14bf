import json
from collections.abc import Callable
from pathlib import Path

import pytest

from accel.pipelines.demo import demo_folder
from accel.pipelines.errors import BadInput
from accel.pipelines.models import Trust, is_hub_id, resolve

Folder = Callable[[str], Path]


def test_a_saved_pipeline_is_a_model(saved: Folder) -> None:
    model = resolve(str(saved("sd15")))
    assert not model.modular
    assert model.components["unet"] == ("diffusers", "UNet2DConditionModel")


def test_the_demo_is_the_built_in_one_whatever_lies_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("demo").folder == demo_folder()
    with pytest.raises(BadInput, match=r"^\./demo is no pipeline"):
        resolve("./demo")


@pytest.mark.parametrize(
    "name",
    ["nowhere", "./nowhere/at/all", "a/b/c", "/nowhere", "", "a" * 300, "~nobody-of-that-name/x"],
)
def test_a_missing_folder_is_named(name: str) -> None:
    with pytest.raises(BadInput, match=rf"^no such model folder: {name} \(a model is demo, "):
        resolve(name)


def test_a_folder_without_an_index_is_no_pipeline(saved: Folder) -> None:
    with pytest.raises(BadInput, match=r"is no pipeline: it has neither model_index.json nor"):
        resolve(str(saved("sd15") / "unet"))


def test_a_broken_index_is_named(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{", encoding="utf-8")
    with pytest.raises(BadInput, match=r"model_index.json cannot be read as JSON"):
        resolve(str(tmp_path))


def test_an_index_without_a_class_is_no_pipeline(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}", encoding="utf-8")
    with pytest.raises(BadInput, match="names no _class_name"):
        resolve(str(tmp_path))


def test_a_checkpoint_file_is_no_folder(saved: Folder) -> None:
    file = saved("sd15") / "unet" / "diffusion_pytorch_model.safetensors"
    with pytest.raises(BadInput, match="is a file: a model is demo, a folder or a hub id"):
        resolve(str(file))


def test_pickle_weights_are_refused_unless_allowed(copied: Folder) -> None:
    folder = copied("sd15")
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(BadInput, match=r"needs pickle \(unet/diffusion_pytorch_model.bin\)"):
        resolve(str(folder))
    assert resolve(str(folder), Trust(pickle=True)).folder == folder


def test_pickle_beside_safetensors_is_never_loaded_and_so_not_refused(copied: Folder) -> None:
    folder = copied("sd15")
    (folder / "unet" / "diffusion_pytorch_model.bin").write_bytes(b"x")
    assert resolve(str(folder)).folder == folder


def _edit(path: Path, **values: object) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **values}), encoding="utf-8")


def test_a_component_with_code_of_its_own_is_refused_unless_allowed(copied: Folder) -> None:
    folder = copied("sd15")
    _edit(folder / "model_index.json", unet=["my_unet", "MyUNet"])
    (folder / "unet" / "my_unet.py").write_text("raise SystemExit('ran')", encoding="utf-8")
    with pytest.raises(BadInput, match=r"code of its own \(unet is defined in unet/my_unet.py\)"):
        resolve(str(folder))
    assert resolve(str(folder), Trust(code=True)).folder == folder


def test_a_pipeline_class_of_its_own_is_refused(copied: Folder) -> None:
    folder = copied("sd15")
    _edit(folder / "model_index.json", _class_name=["pipeline", "MyPipeline"])
    with pytest.raises(BadInput, match=r"the pipeline's class is its own.*--trust-remote-code"):
        resolve(str(folder))


def test_an_auto_class_that_names_code_is_refused(copied: Folder) -> None:
    folder = copied("sd15")
    _edit(folder / "model_index.json", text_encoder=["transformers", "AutoModel"])
    resolve(str(folder))
    _edit(folder / "text_encoder" / "config.json", auto_map={"AutoModel": "code.Encoder"})
    with pytest.raises(BadInput, match=r"text_encoder names code in text_encoder/config.json"):
        resolve(str(folder))


def test_the_fingerprint_follows_weights_and_configuration(copied: Folder, saved: Folder) -> None:
    folder = copied("sd15")
    first = resolve(str(folder)).fingerprint
    assert first == resolve(str(saved("sd15"))).fingerprint
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    second = resolve(str(folder)).fingerprint
    _edit(folder / "scheduler" / "scheduler_config.json", beta_end=0.5)
    assert len({first, second, resolve(str(folder)).fingerprint}) == 3


def test_weights_that_come_as_fp16_only_are_found(copied: Folder) -> None:
    folder = copied("sd15")
    assert resolve(str(folder)).variant is None
    for part in ("unet", "vae", "text_encoder"):
        for file in (folder / part).glob("*.safetensors"):
            file.rename(file.with_name(file.name.replace(".safetensors", ".fp16.safetensors")))
    assert resolve(str(folder)).variant == "fp16"


def test_an_existing_folder_is_never_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("owner/name")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert not is_hub_id("owner/name")
    assert not is_hub_id("./name")


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def no_network(*arguments: object, **options: object) -> str:
        raise LocalEntryNotFoundError("cannot reach the hub\nand more")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", no_network)
    with pytest.raises(BadInput) as refused:
        resolve("owner/name")
    assert str(refused.value) == (
        "no folder owner/name here, and the hub did not give that model: cannot reach the hub"
    )
